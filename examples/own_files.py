"""Drafts from your own files: python examples/own_files.py [MODEL.gguf [INDEX]]

Without an index it makes one of an answer. Make your own with: racer-local index build PATH... -m MODEL.gguf -o INDEX
"""

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from racer_local import Llama
from racer_local.models import fetch

model = sys.argv[1] if len(sys.argv) > 1 else str(fetch("smollm2-135m"))
question = [{"role": "user", "content": "List the planets of the solar system, one a line, with one fact about each."}]

with TemporaryDirectory() as folder, closing(Llama(model, n_ctx=2048, verbose=False)) as llm:
    if len(sys.argv) > 2:
        index = sys.argv[2]
    else:  # what the model said to such a question before foretells what it will say now
        notes, index = Path(folder) / "planets.txt", str(Path(folder) / "planets.index")
        asked = llm.create_chat_completion(question, max_tokens=120, temperature=0)
        notes.write_text(asked["choices"][0]["message"]["content"], encoding="utf-8")
        command = [sys.executable, "-m", "racer_local", "index", "build", str(notes), "-m", model, "-o", index]
        subprocess.run(command, check=True)
    for corpora in ([], [index]):
        llm.forget()
        llm.create_chat_completion(question, max_tokens=120, temperature=0, corpora=corpora)
        stats = llm.last_stats
        speed = f"{stats['tokens_per_second']:.0f} tokens/s, MAT {stats['mean_accepted_tokens']:.2f}"
        print(f"{corpora}: {speed}, accepted {stats['accepted_by_source']}")
