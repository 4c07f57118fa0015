"""Finding the text files of a folder as git does, and reading them piece by piece."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections import Counter
from itertools import pairwise

import pytest

from racer_local.corpus import files
from racer_local.corpus.files import NotText, Piece, pieces, walk
from racer_local.errors import ConfigError

needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git is the judge here")


def plant(folder, tree):
    """Writes files by their name; a name that ends in / is an empty folder."""
    for name, text in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(os.fsencode(text))
    return folder


def found(*paths, top=None, max_bytes=1000):
    """The names below `top` (the first path), and what was skipped."""
    skipped = Counter()
    names = [os.path.relpath(one.path, top or paths[0]) for one in walk(paths, max_bytes=max_bytes, skipped=skipped)]
    return names, dict(skipped)


def read(path, *, chat=False, skipped=None):
    (one,) = walk([path], max_bytes=1 << 30, skipped=Counter())
    return list(pieces(one, chat=chat, skipped=Counter() if skipped is None else skipped))


def reason(path, **options):
    with pytest.raises(NotText) as caught:
        read(path, **options)
    return str(caught.value)


# Finding


def test_a_folder_gives_its_files_in_sorted_order_with_size_and_time(tmp_path):
    plant(tmp_path, {"b": "12", "a/z": "1", "a/c/d": "1", "B": "1", ".dot/x": "1", ".env": "1", "empty/": ""})
    assert found(tmp_path) == ([".env", "B", "b", ".dot/x", "a/z", "a/c/d"], {})
    (one,) = walk([tmp_path / "b"], max_bytes=2, skipped=Counter())
    status = os.stat(tmp_path / "b")
    assert (one.path, one.size, one.modified) == (tmp_path.resolve() / "b", 2, status.st_mtime_ns)


def test_a_path_that_is_not_there_is_one_clear_line_before_anything_is_given(tmp_path):
    plant(tmp_path, {"a": "1"})
    for missing in ("no\nsuch", "a/below", "\udcff"):
        with pytest.raises(ConfigError, match=r"no such file or folder: .*; name one that exists") as caught:
            walk([tmp_path, tmp_path / missing], max_bytes=9, skipped=Counter())
        assert "\n" not in str(caught.value)
        str(caught.value).encode()


def test_each_file_comes_once_and_is_counted_once_however_often_it_is_named(tmp_path):
    plant(tmp_path, {".gitignore": "ignored", ".git/x": "", "a/b/c": "1", "a/b/ignored": "1", "a/b/none": "", "d": "1"})
    (tmp_path / "link").symlink_to("a")
    a = tmp_path / "a"
    names, skipped = found(tmp_path, a / "b", a, tmp_path / "link", a / "b" / "c", a / ".." / "d", top=tmp_path)
    assert sorted(names) == [".gitignore", "a/b/c", "d"]
    assert skipped == {files.LINKS: 1, files.IGNORED: 1, files.EMPTY: 1}


def test_a_link_is_followed_where_it_is_named_and_not_where_it_is_met(tmp_path):
    plant(tmp_path, {"real/a": "1", "here/b": "1"})
    for name, target in (("folder", "../real"), ("file", "../real/a"), ("nowhere", "gone"), ("loop", ".")):
        (tmp_path / "here" / name).symlink_to(target)
    assert found(tmp_path / "here") == (["b"], {files.LINKS: 4})
    assert found(tmp_path / "here" / "folder", top=tmp_path) == (["real/a"], {})
    assert found(tmp_path / "here" / "file", top=tmp_path) == (["real/a"], {})


def test_what_is_no_file_to_read_is_counted_by_its_reason(tmp_path):
    plant(tmp_path, {"small": "1", "large": "12345", "empty": ""})
    os.mkfifo(tmp_path / "fifo")
    reasons = {files.TOO_LARGE: 1, files.EMPTY: 1, files.NOT_REGULAR: 1}
    assert found(tmp_path, max_bytes=4) == (["small"], reasons)
    assert found(*(tmp_path / name for name in ("large", "empty", "fifo")), max_bytes=4) == ([], reasons)


def test_what_cannot_be_read_or_vanishes_meanwhile_does_not_end_the_walk(tmp_path, monkeypatch):
    plant(tmp_path, {"a": "1", "b": "1", "locked/x": "1", "z/c": "1"})
    scan, look = os.scandir, os.lstat

    def refuse(function, name):
        def refusing(path):
            if os.path.basename(path) == name:
                raise PermissionError
            return function(path)

        return refusing

    monkeypatch.setattr(os, "scandir", refuse(scan, "locked"))
    monkeypatch.setattr(os, "lstat", refuse(look, "b"))
    assert found(tmp_path) == (["a", "z/c"], {files.UNREADABLE: 2})


def test_a_name_that_is_no_utf8_is_a_name(tmp_path):
    plant(tmp_path, {".gitignore": "*.\udcfe\n", "a\udcff/b\udcff": "text", "a\udcff/b.\udcfe": "1"})
    assert found(tmp_path) == ([".gitignore", "a\udcff/b\udcff"], {files.IGNORED: 1})
    assert read(tmp_path / "a\udcff" / "b\udcff") == [Piece("text", True)]


def test_a_chain_of_folders_deeper_than_the_recursion_limit_is_walked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(1100):
        os.mkdir("d")
        os.chdir("d")
    with open("file", "w") as file:
        file.write("1")
    monkeypatch.undo()
    deep = "d/" * 1100
    assert found(tmp_path) == ([f"{deep}file"], {})
    monkeypatch.chdir(tmp_path)  # pytest can't remove it: that recurses
    os.remove(f"{deep}file")
    os.removedirs(deep)


# What git ignores


def test_ignored_files_and_folders_are_counted_and_a_folder_counts_once(tmp_path):
    plant(tmp_path, {".gitignore": "*.log\nbuild/\n", "a": "1", "a.log": "1", "build/b": "1", "build/c": "1"})
    assert found(tmp_path) == ([".gitignore", "a"], {files.IGNORED: 1, files.FOLDER_IGNORED: 1})


def test_what_is_named_is_taken_though_it_is_ignored(tmp_path):
    plant(tmp_path, {".git/x": "", ".gitignore": "*.log\n/out\n", "a.log": "1", "out/b": "1", "out/c.log": "1"})
    assert found(tmp_path / "a.log", top=tmp_path) == (["a.log"], {})
    assert found(tmp_path / "out") == (["b"], {files.IGNORED: 1})
    assert found(tmp_path, tmp_path / "out")[0] == [".gitignore", "out/b"]


def test_a_line_that_ignores_the_named_folder_is_void_in_it_and_the_others_are_not(tmp_path):
    plant(
        tmp_path,
        {".git/x": "", ".gitignore": ".env\n", "venv/.gitignore": "*", "venv/lib/a": "1", "venv/lib/.env": "1"},
    )
    assert found(tmp_path)[1] == {files.IGNORED: 1, files.FOLDER_IGNORED: 1}
    assert found(tmp_path / "venv" / "lib") == (["a"], {files.IGNORED: 1})


def test_a_list_of_what_is_kept_holds_in_a_named_folder_too(tmp_path):
    plant(tmp_path, {".git/x": "", ".gitignore": "*\n!/src\n!*.py\n", "src/a.py": "1", "src/b.txt": "1"})
    assert found(tmp_path) == (["src/a.py"], {files.IGNORED: 2})
    assert found(tmp_path / "src") == (["a.py"], {files.IGNORED: 1})


def test_the_rules_of_the_repository_around_a_named_folder_hold_and_none_from_above_it(tmp_path):
    plant(tmp_path, {".gitignore": "c\n", "r/.gitignore": "a\n/s/b\n", "r/.git/info/exclude": "e\n"})
    plant(tmp_path / "r" / "s", {"a": "1", "b": "1", "c": "1", "e": "1", "t/b": "1"})
    assert found(tmp_path / "r" / "s") == (["c", "t/b"], {files.IGNORED: 3})
    shutil.rmtree(tmp_path / "r" / ".git")
    assert found(tmp_path / "r" / "s") == (["a", "b", "c", "e", "t/b"], {})


def test_a_repository_in_a_folder_has_its_own_rules_and_git_s_folder_is_never_entered(tmp_path):
    plant(
        tmp_path, {".gitignore": "a\n", "a": "1", "r/.git/info/exclude": "b\n", "r/a": "1", "r/b": "1", "s/.git": "1"}
    )
    assert found(tmp_path) == ([".gitignore", "r/a"], {files.IGNORED: 2})


def test_an_ignore_file_that_is_odd_ignores_what_it_can(tmp_path):
    plant(tmp_path, {"a/x": "1", "a/.gitignore": "\ufeffx\r\n[\nfoo\\\n\udcff\udcfe\n!\n/\n\0", "b/.gitignore/x": "1"})
    plant(tmp_path, {"c/x": "1", "e/x": "1"})
    (tmp_path / "c" / ".gitignore").symlink_to("../a/.gitignore")
    os.mkfifo(tmp_path / "e" / ".gitignore")
    names, skipped = found(tmp_path)
    assert names == ["a/.gitignore", "b/.gitignore/x", "c/x", "e/x"]
    assert skipped == {files.IGNORED: 1, files.LINKS: 1, files.NOT_REGULAR: 1}


def as_git(top):
    """What git lists of a new repository."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "XDG_CONFIG_HOME": os.devnull}
    listing = ["git", "-C", str(top), "ls-files", "-z", "-co", "--exclude-standard"]
    return {os.fsdecode(name) for name in subprocess.check_output(listing, env=env).split(b"\0") if name}


def new_repository(top):
    subprocess.run(["git", "init", "-q", str(top)], check=True)
    return top


NAMES = "a b x keep a.log important.log dir/x dir/keep a/b a/x/b a/x/y/b foo/bar foo1/2/bar #x !x x[1] b\\c é \udcff"
INNER = "sub/a sub/a.log sub/dir/x sub/sub/x sub/sub/a.log"
NAMES = [*NAMES.split(), *INNER.split(), "tail "]


@needs_git
@pytest.mark.parametrize(
    "ignored",
    [
        {"": "/a\n"},
        {"": "dir/\n!dir/keep\n"},
        {"": "dir/*\n!dir/keep\n"},
        {"": "**/x\n"},
        {"": "a/**/b\n"},
        {"": "a/**\n!a/x/\n"},
        {"": "*.log\n!important.log\n"},
        {"": "*\n!*/\n!*.log\n"},
        {"": "*.log\n", "sub": "!a.log\n", "sub/sub": "*.log"},
        {"": "!a.log\n", "sub": "*\n!x\n"},
        {"": "tail\n", "sub": "/a  \n"},
        {"": "tail\\ \n#x\n\\!x\n"},
        {"": "\\#x\n!x\nx[[]1]\n"},
        {"": "b\\\\c\n[!a-z]\n??\n[]#]x\n"},
        {"": "/\n//\n!\nsub//a\n/sub/a*/\n"},
    ],
    ids=lambda ignored: repr(ignored),
)
def test_a_walk_finds_what_git_lists(tmp_path, ignored):
    top = new_repository(tmp_path / "top")
    # The names a and foo are folders in one tree, and files in a folder of the other.
    plant(top, {name: "1" for name in NAMES if name != "a"})
    plant(top / "sub" / "flat", {name: "1" for name in NAMES if not name.startswith("a/")})
    plant(top, {os.path.join(folder, ".gitignore"): lines for folder, lines in ignored.items()})
    assert set(found(top)[0]) == as_git(top)


NAMED = ["a", "b", "foo", "*", "a?", "*.log", "[a-c]", "[!a]", "**", "é", "f*o", "c]", "\\#a"]
FEW = ["a", "b", "ab", "foo", "a.log", "c]", "g", "!b", "#a", "a\\b", "b ", "\udcff"]


def random_rule(roll):
    """A line as people write them; git and pathspec differ in the odd corners of brackets and of ** inside a name."""
    parts = roll.choices(NAMED, k=roll.randint(1, 3))
    return roll.choice(["", "", "", "!"]) + roll.choice(["", "/"]) + "/".join(parts) + roll.choice(["", "/"])


@needs_git
@pytest.mark.parametrize("seed", range(40))
def test_a_walk_of_a_random_tree_with_random_rules_finds_what_git_lists(tmp_path, seed):
    roll = random.Random(seed)
    top = new_repository(tmp_path / "top")
    folders = [top]
    for _ in range(40):
        path = roll.choice(folders) / roll.choice(FEW)
        if roll.random() < 0.3 and not path.exists():
            path.mkdir()
            folders.append(path)
        elif not path.exists():
            path.write_text("1")
    ruled = roll.sample(folders, min(3, len(folders)))
    for path in (top / ".git" / "info" / "exclude", *(folder / ".gitignore" for folder in ruled)):
        path.write_bytes(os.fsencode("\n".join(random_rule(roll) for _ in range(3))))
    assert set(found(top)[0]) == as_git(top)


# Reading


WORDS = [
    "a",
    "word",
    "\n",
    "\n",
    "\r\n",
    "\n\n\n",
    "\n    ",
    "\t",
    " ",
    "é",
    "👩‍👩‍👧‍👦",
    "\ufeff",
    "日本",
    "\r",
    "x" * 30,
]


def begins_a_line(before, after):
    return before[-1] == "\n" and not after[0].isspace()


def check_seams(parts, block):
    """Each part ends where the next line begins, or has no such place; none is far longer than a block."""
    assert all(len(part) <= 4 * block for part in parts)
    for part, after in pairwise(parts):
        assert begins_a_line(part, after) or not any(begins_a_line(*pair) for pair in pairwise(part))


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("seed", range(20))
def test_joined_the_pieces_are_the_text_and_only_the_first_begins_a_document(tmp_path, monkeypatch, block, seed):
    monkeypatch.setattr(files, "BLOCK", block)
    roll = random.Random(seed)
    text = "x" + "".join(roll.choices(WORDS, k=200))
    path = plant(tmp_path, {"file": text}) / "file"
    got = read(path)
    assert "".join(piece.text for piece in got) == text
    assert [piece.begins for piece in got] == [True] + [False] * (len(got) - 1)
    check_seams([piece.text for piece in got], block)
    log = plant(tmp_path, {"log.jsonl": json.dumps({"role": "user", "content": text})}) / "log.jsonl"
    again = read(log, chat=True)
    assert "".join(piece.text for piece in again) == text
    check_seams([piece.text for piece in again], block)


def test_a_piece_ends_behind_a_line_that_no_white_space_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 7)
    path = plant(tmp_path, {"file": "ab\n\n  c\nd\n\n  ee\nf\n"}) / "file"
    assert [piece.text for piece in read(path)] == ["ab\n\n  c\n", "d\n\n  ee\n", "f\n"]


def test_a_large_file_comes_in_pieces_of_about_a_block(tmp_path):
    text = "0123456789abcde\n" * (3 << 16) + "y" * (3 << 20)
    lengths = [len(piece.text) for piece in read(plant(tmp_path, {"file": text}) / "file")]
    assert sum(lengths) == len(text)
    assert max(lengths) <= 2 * files.BLOCK
    assert 5 <= len(lengths) <= 8


def test_a_byte_order_mark_at_the_start_is_dropped_and_others_stay(tmp_path):
    assert read(plant(tmp_path, {"file": "\ufeffa\ufeff"}) / "file") == [Piece("a\ufeff", True)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x7fELF\0\xff", files.BINARY),
        (b"late\n" * 500_000 + b"\0", files.BINARY),
        (b"caf\xe9\n", files.NOT_UTF8),
        (b"late\n" * 500_000 + b"\xff", files.NOT_UTF8),
        ("cut é".encode()[:-1], files.NOT_UTF8),
        (b" \n\t\r\n", files.EMPTY),
        (b" " * (2 << 20), files.EMPTY),
        (b"\xef\xbb\xbf", files.EMPTY),
    ],
    ids=["elf", "late NUL", "latin-1", "late byte", "cut", "blank", "large blank", "mark"],
)
def test_a_file_without_text_says_why_wherever_it_shows(tmp_path, data, why):
    (tmp_path / "file").write_bytes(data)
    assert reason(tmp_path / "file") == why


def test_a_file_that_is_gone_or_cannot_be_read_is_unreadable(tmp_path):
    path = plant(tmp_path, {"file": "1"}) / "file"
    (one,) = walk([path], max_bytes=9, skipped=Counter())
    path.unlink()
    for _ in range(2):
        with pytest.raises(NotText, match=r"^unreadable$"):
            list(pieces(one, chat=False, skipped=Counter()))
        path.mkdir(exist_ok=True)


# Chat logs


def log(folder, *lines, end="\n"):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return plant(folder, {"log.jsonl": "\n".join(texts) + end}) / "log.jsonl"


def say(content, role="user"):
    return {"role": role, "content": content, "name": "x"}


def test_each_message_of_a_chat_log_is_a_document_of_its_own(tmp_path):
    parts = [
        {"type": "text", "text": "five"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "six"},
        "no",
    ]
    path = log(
        tmp_path,
        {"messages": [say("one", "system"), say("two\nlines\u2028\x85")], "model": "m"},
        "",
        say("three"),
        " \r",
        {"messages": [say(None), say(""), say(" \n"), {"role": "assistant", "tool_calls": []}, say("four")]},
        say(parts),
    )
    skipped = Counter()
    texts = ["one", "two\nlines\u2028\x85", "three", "four", "five\nsix"]
    assert read(path, chat=True, skipped=skipped) == [Piece(text, True) for text in texts]
    assert skipped == {}
    assert files.BAD_LINES not in skipped


def test_a_long_message_is_cut_and_only_its_first_piece_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 4)
    path = log(tmp_path, say("abc\ndef\ngh"), say("i"))
    assert read(path, chat=True) == [Piece("abc\n", True), Piece("def\n", False), Piece("gh", False), Piece("i", True)]


BAD = [
    "{",
    "7",
    "null",
    '"text"',
    "[]",
    '{"prompt": "x"}',
    '{"content": "x"}',
    '{"messages": 1}',
    '{"messages": ["x"]}',
    '{"messages": [{"role": "user", "content": 1}]}',
    '{"role": "user", "content": {}}',
    "[" * 100_000,
    '{"role": "user", "content": ' + "1" * 5000 + "}",
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[:50])
def test_a_line_of_another_shape_is_counted_and_the_rest_goes_on(tmp_path, bad):
    skipped = Counter()
    assert read(log(tmp_path, bad, say("x"), bad), chat=True, skipped=skipped) == [Piece("x", True)]
    assert skipped == {files.BAD_LINES: 2}


def test_a_log_that_is_being_written_may_end_anywhere(tmp_path):
    data = json.dumps(say("héllo 🎉"), ensure_ascii=False).encode()
    for end in range(1, len(data)):
        (tmp_path / "log.jsonl").write_bytes(data + b"\n" + data[:end])
        skipped = Counter()
        assert read(tmp_path / "log.jsonl", chat=True, skipped=skipped) == [Piece("héllo 🎉", True)]
        assert skipped == {files.BAD_LINES: 1}


def test_half_a_character_that_json_can_say_and_utf8_cannot_is_replaced(tmp_path):
    path = log(tmp_path, r'{"role": "user", "content": "a\ud83d \ud83c\udf89"}')
    assert read(path, chat=True) == [Piece("a\ufffd 🎉", True)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a": 1}\n{"b": 2}\n', files.NOT_CHAT),
        (b'{"messages": []}\n', files.NOT_CHAT),
        (b"\n \n", files.EMPTY),
        (b'{"role": "user", "content": null}\n', files.EMPTY),
        (b'{"role": "user", "content": "x"}\n\xff\n', files.NOT_UTF8),
        (b'{"role": "user", "content": "x"}\n\0\n', files.BINARY),
    ],
)
def test_a_log_without_messages_says_why_and_counts_no_lines(tmp_path, data, why):
    (tmp_path / "log.jsonl").write_bytes(data)
    skipped = Counter()
    assert reason(tmp_path / "log.jsonl", chat=True, skipped=skipped) == why
    assert skipped == {}


def test_a_chat_log_is_text_like_any_other_where_chat_is_not_asked_for_or_the_name_is_another(tmp_path):
    path = log(tmp_path, say("x"))
    assert read(path) == [Piece(path.read_text(), True)]
    other = path.rename(tmp_path / "log.json")
    assert read(other, chat=True) == [Piece(other.read_text(), True)]
