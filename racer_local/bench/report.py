"""The suite's results as pictures, and as one page of HTML that needs nothing else."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from racer_local.bench.results import PLAIN, TOTAL, Counts, Results, View, gained, mat, mean_nodes
from racer_local.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, FIXED, PEERS, CEILING = "#d1495b", "#8d99ae", "#2a6f97", "#222222"
MARKS = "osD^vP*X<>hpd"
TEMPLATE = Path(__file__).with_name("report.html")


def write(found: Sequence[Results], page: Path | None, folder: Path | None = None) -> list[Path]:
    """The page, and the plots as PNG files in `folder`; the paths of what was written.

    Raises ConfigError where matplotlib is not installed, or nothing was measured.
    """
    try:
        from jinja2 import Environment, FileSystemLoader
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing; install it with: pip install 'racer-local[report]'") from error
    if not any(one.temperatures for one in found):
        raise ConfigError("nothing was measured yet; run bench suite with the same file until it has a question")
    drawn: dict[str, bytes] = {}

    def draw(name: str, size: tuple[float, float], paint: Callable[[Any], object]) -> str:
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        out = io.BytesIO()
        figure.savefig(out, dpi=110, metadata={"Software": None})
        drawn[name] = out.getvalue()
        return base64.b64encode(drawn[name]).decode()

    sections = [_section(one, draw) for one in found if one.temperatures]
    over = draw("speed-ups", (8.5, 1.2 + 0.42 * len(_categories(found))), lambda figure: _overview(figure, found))
    written = []
    if page:
        pages = Environment(loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, trim_blocks=True)
        text = pages.get_template(TEMPLATE.name).render(sections=sections, overview=over, plain=PLAIN, total=TOTAL)
        page.write_text(text, encoding="utf-8")
        written.append(page)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        for name, png in drawn.items():
            written.append(folder / f"{name}.png")
            written[-1].write_bytes(png)
    return written


def _section(one: Results, draw: Callable[..., str]) -> dict[str, Any]:
    """What the page says of one file."""
    name = one.header["model"]["name"].removesuffix(".gguf")
    first = one.at(one.temperatures[0])
    rows = 1.2 + 0.5 * len(first.categories)
    views: list[dict[str, Any]] = []
    for temperature in one.temperatures:
        view = one.at(temperature)
        ways = [way for way in one.ways if view.answers(TOTAL, way)]
        image = draw(f"{name}-speed-up-{temperature:g}", (9, rows), lambda figure, view=view: _speed_ups(figure, view))
        views.append({"temperature": temperature, "view": view, "ways": ways, "image": image})
    images = [
        ("MAT against nodes", draw(f"{name}-mat", (4.6, 3.6), lambda figure: _mat(figure, first))),
        ("What verifying costs", draw(f"{name}-cost", (4.6, 3.6), lambda figure: _cost(figure, first))),
        ("Accepted length", draw(f"{name}-lengths", (4.6, 3.6), lambda figure: _lengths(figure, first))),
        ("Where the time goes", draw(f"{name}-time", (4.6, 3.6), lambda figure: _time(figure, first))),
        ("Accepted by source", draw(f"{name}-sources", (9, 3.2), lambda figure: _sources(figure, first))),
    ]
    behind = [
        f"{category} at temperature {entry['temperature']:g} ({spread})"
        for entry in views
        for category in entry["view"].categories
        if (spread := entry["view"].speed_up(category, "racer")).ratio < 1
    ]
    return {"name": name, "header": one.header, "views": views, "images": images, "gained": gained, "behind": behind}


def _categories(found: Sequence[Results]) -> list[str]:
    names = [category for one in found for t in one.temperatures[:1] for category in one.at(t).categories]
    return [*dict.fromkeys(name for name in names if name != TOTAL), TOTAL]


def label(category: str) -> str:
    return category.replace("_", " ")


def _overview(figure: Figure, found: Sequence[Results]) -> None:
    """racer in each category of each file, and the ceiling."""
    axes, categories = figure.add_subplot(), _categories(found)
    found = [one for one in found if one.temperatures]
    for i, one in enumerate(found):
        view, shift = one.at(one.temperatures[0]), 0.22 * (i - (len(found) - 1) / 2)
        at = {name: y + shift for y, name in enumerate(categories)}
        color = [OURS, PEERS, "#e09f3e", FIXED][i % 4]
        _with_spread(axes, view, "racer", at, color, MARKS[i], one.header["model"]["name"].removesuffix(".gguf"))
        for name in view.categories:
            axes.plot(view.ceiling(name), at[name], "|", color=color, markersize=9)
    _rows(axes, categories, "racer's speed-up over plain decoding; | what an oracle would reach with this T(n)")


def _with_spread(
    axes: Axes, view: View, way: str, at: dict[str, float], color: str, mark: str, name: str, size: float = 6
) -> None:
    spreads = {category: view.speed_up(category, way) for category in view.categories}
    known = {category: spread for category, spread in spreads.items() if spread.ratio == spread.ratio}
    if known:
        x = np.array([[s.ratio, max(0, s.ratio - s.low), max(0, s.high - s.ratio)] for s in known.values()]).T
        axes.errorbar(
            x[0], [at[c] for c in known], xerr=x[1:], fmt=mark, color=color, markersize=size, elinewidth=1, label=name
        )


def _rows(axes: Axes, categories: Sequence[str], what: str) -> None:
    axes.axvline(1, color=CEILING, linewidth=0.8)
    axes.set_yticks(range(len(categories)), [label(name) for name in categories])
    axes.invert_yaxis()
    axes.set_xlabel(what)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)


def _speed_ups(figure: Figure, view: View) -> None:
    axes, at = figure.add_subplot(), {name: float(y) for y, name in enumerate(view.categories)}
    names = [way for way in view.results.ways if way != PLAIN]
    for i, way in enumerate(names):
        color = OURS if way.startswith("racer") else PEERS if way.startswith("llama") else FIXED
        shifted = {name: y + 0.6 * (i / max(1, len(names) - 1) - 0.5) for name, y in at.items()}
        _with_spread(axes, view, way, shifted, color, MARKS[i % len(MARKS)], way, 6 if color == OURS else 4)
        repeats = [(view.by_repeat(name, way), shifted[name]) for name in view.categories]
        for ratios, y in repeats if len(repeats[0][0]) > 1 else ():
            axes.plot(ratios, [y] * len(ratios), ".", color=color, markersize=2)
    for i, name in enumerate(view.categories):
        axes.plot(view.ceiling(name), at[name], "|", color=CEILING, markersize=22, label="" if i else "ceiling")
    axes.set_xscale("log", base=2)
    ticks = [0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    _rows(axes, view.categories, f"speed-up over plain decoding, temperature {view.records[0].temperature:g}")


def _mat(figure: Figure, view: View) -> None:
    axes = figure.add_subplot()
    for i, way in enumerate(view.results.ways):
        sums = view.sums(TOTAL, way)
        if sums.steps and way != PLAIN:
            color = OURS if way.startswith("racer") else PEERS if way.startswith("llama") else FIXED
            axes.plot(mean_nodes(sums), mat(sums), MARKS[i % len(MARKS)], color=color, label=way)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("mean nodes of a step, root counted")
    axes.set_ylabel("mean accepted tokens (MAT)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)


def _cost(figure: Figure, view: View) -> None:
    """T(n), and how often racer chose each size."""
    axes, cost = figure.add_subplot(), view.results.header["cost"]
    nodes = _numbers(view.sums(TOTAL, "racer").nodes)
    most = max([8, *nodes])
    if cost:
        points = [(int(n), t) for n, t in cost.items() if int(n) <= most]
        axes.plot(*zip(*points, strict=True), "o-", color=PEERS, markersize=3, label="T(n) / T(1)")
        axes.plot([1, most], [1, most], ":", color=FIXED, label="n plain forwards")
        axes.set_ylim(0, 1.05 * max(t for _, t in points))
    axes.set_xlabel("nodes of a tree, root counted")
    axes.set_ylabel("plain forwards")
    if nodes:
        shares = axes.twinx()
        shares.bar([*nodes], _shares(nodes), color=OURS, alpha=0.35, label="share of racer's steps")
        shares.set_ylim(0, 1)
        shares.legend(fontsize=7, frameon=False, loc="upper right")
    axes.legend(fontsize=7, frameon=False, loc="upper left")


def _lengths(figure: Figure, view: View) -> None:
    axes = figure.add_subplot()
    for way, color, style in (("racer", OURS, "o-"), ("paper@64", FIXED, "s--"), ("lookup", PEERS, "^:")):
        lengths = _numbers(view.sums(TOTAL, way).lengths)
        if lengths:
            axes.plot([*lengths], _shares(lengths), style, color=color, markersize=4, label=way)
    axes.set_yscale("log")
    axes.set_xlabel("draft nodes accepted in a step")
    axes.set_ylabel("share of the steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)


def _time(figure: Figure, view: View) -> None:
    """Milliseconds a token: prompt, draft, verify, and the rest of the loop; a peer's decoding is not split."""
    axes = figure.add_subplot()
    ways = [way for way in view.results.ways if view.sums(TOTAL, way).tokens][::-1]
    left = np.zeros(len(ways))
    for name, color, alpha in (
        ("prompt", FIXED, 0.5), ("draft", OURS, 1.0), ("verify", PEERS, 1.0), ("sample and the rest", PEERS, 0.4)
    ):  # fmt: skip
        wide = np.array([_split(view.sums(TOTAL, way))[name] for way in ways])
        axes.barh(ways, wide, left=left, color=color, alpha=alpha, label=name)
        left += wide
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("milliseconds a token")
    axes.legend(fontsize=7, frameon=False)


def _split(sums: Counts) -> dict[str, float]:
    parts = {
        "prompt": sums.seconds - sums.timed_seconds,
        "draft": sums.draft_seconds,
        "verify": sums.verify_seconds,
        "sample and the rest": sums.timed_seconds - sums.draft_seconds - sums.verify_seconds,
    }
    return {name: 1e3 * seconds / max(1, sums.tokens) for name, seconds in parts.items()}


def _sources(figure: Figure, view: View) -> None:
    """Of racer's tokens: how many each source drafted."""
    axes, left = figure.add_subplot(), np.zeros(len(view.categories))
    way = "racer+corpus" if "racer+corpus" in view.results.ways else "racer"
    sums = [view.sums(category, way) for category in view.categories]
    for name, color in (("context", OURS), ("logits", PEERS), ("corpus", "#e09f3e")):
        wide = np.array([one.by_source.get(name, 0) / max(1, one.tokens) for one in sums])
        axes.barh([label(category) for category in view.categories], wide, left=left, color=color, label=name)
        left += wide
    axes.invert_yaxis()
    axes.set_xlabel(f"share of {way}'s tokens that were drafted, by source")
    axes.legend(fontsize=8, frameon=False)


def _numbers(counts: dict[str, int]) -> dict[int, int]:
    return dict(sorted((int(n), count) for n, count in counts.items()))


def _shares(counts: dict[int, int]) -> list[float]:
    return [count / sum(counts.values()) for count in counts.values()]
