"""Draw the figures of experiments/outliers.py, drawn from its record alone.

    python figures/outliers.py [RECORD] [--out DIR]

draws <record's name>_channel and _value (curves against the outlier's size), _rotation, _tensors
(the table of real tensors) and _crossing (integers against floats), each as .pdf and .png; of a
record of --tensor, the table. The same record gives the same bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from experiments.outliers import LABELS, LOSSES, label, worst
from figures import style

NAME = "outliers"
Rows = list[dict[str, Any]]

#: What shares a scale, coarse to fine: lightness (dark is fine) and width (thick is coarse).
SCALINGS = ("tensor", "row", "128", "32", "16", "two-level")
WIDTHS = dict(zip(SCALINGS, (2.6, 2.1, 1.7, 1.3, 1.0, 1.3), strict=True))
SHADES = {
    "FP8": dict(zip(SCALINGS, ("#9ecae1", "#5b9bd0", "#2166ac", "#08306b", "", ""), strict=True)),
    "FP4": dict(
        zip(
            SCALINGS,
            ("#fdb06a", "#ef8a2c", "#c25a09", "#6f2d03", "#74c476", "#0b4f24"),
            strict=True,
        )
    ),
    "INT8": dict(zip(SCALINGS, ("#cdb8de", "#a684c4", "#6f3d99", "#3a1656", "", ""), strict=True)),
}
PANELS = {
    "others_db": "SQNR of the others, dB",
    "zeroed": "others that become zero, %",
    "product_error": "error of the product, %",
    "product_others_error": "error of the product\nwithout the outlier, %",
}
PERCENT = ("zeroed", "product_error", "product_others_error")
FAMILIES = ("FP8", "FP4", "INT8")


def band(axes: Axes, x: list[float], row: dict[str, Any], measure: str, **look: Any) -> np.ndarray:
    """A curve and its interval; returns the curve as it is drawn."""
    factor = 100 if measure in PERCENT else 1
    middle = factor * np.array(row[measure], float)
    half = factor * np.array([h or 0 for h in row[f"{measure}_interval"]], float)
    axes.fill_between(x, middle - half, middle + half, color=look["color"], alpha=0.2, linewidth=0)
    axes.plot(x, middle, **look)
    return middle


def labels(axes: Axes, x: float, ends: list[tuple[float, str, str]], gap: float = 7.5) -> None:
    """Labels in a darker shade than their curves, with a white edge where they lie on one."""
    dark = []
    for y, name, shade in ends:
        r, g, b = to_rgb(shade)
        dark.append((y, name, to_hex((0.7 * r, 0.7 * g, 0.7 * b))))
    style.label_lines(axes, x, dark, gap=gap)
    for text in axes.texts:
        text.set_path_effects([withStroke(linewidth=2, foreground="white")])


def growing(record: dict[str, Any], pattern: str) -> Figure:
    """Curves against the outlier's size: one column a family, one row a measure."""
    metrics = record["metrics"]
    x = metrics["exponents"]
    figure, panels = style.new(
        len(PANELS), 3, figsize=(style.DOUBLE, 7.4), sharex=True, sharey="row",
        height_ratios=(1.35, 1, 1, 1),
    )  # fmt: skip
    drawn: list[tuple[Axes, dict[str, tuple[np.ndarray, str]]]] = []
    for column, family in enumerate(FAMILIES):
        rows = [
            row for row in metrics["growth"]
            if (row["pattern"], row["family"], row["rotation"]) == (pattern, family, 0)
        ]  # fmt: skip
        for axes, (measure, title) in zip(panels[:, column], PANELS.items(), strict=True):
            curves = {}
            for row in rows:
                shade, width = SHADES[family][row["scaling"]], WIDTHS[row["scaling"]]
                y = band(axes, x, row, measure, color=shade, linewidth=width)
                curves[row["scaling"]] = y, shade
            if column == 0:
                axes.set_ylabel(title)
            drawn.append((axes, curves))
        panels[0, column].set_title(f"{family}: one scale for")
        panels[-1, column].set_xlabel(
            "channel times" if pattern == "channel" else "value, in units of the others' RMS"
        )
    for axes in panels[-1]:
        axes.set_xlim(x[0], x[-1] + 6)
        axes.set_xticks([k for k in x if k % 4 == 0])
        style.power_of_two_axis(axes.xaxis)
    for axes in panels[1]:
        axes.set_ylim(-3, 103)
    for measure, row in zip(PANELS, panels, strict=True):
        if "error" in measure:
            row[0].set_yscale("log")
            row[0].set_ylim(0.4, 160)
            row[0].set_yticks([1, 10, 100], ["1", "10", "100"])
    draws = record["point"]["draws"]
    what = "channel, of 512, is multiplied by 2ʲ" if pattern == "channel" else "value becomes ±2ʲ"
    figure.suptitle(
        f"A Gaussian tensor in which one {what}; mean of {draws} draws, band: 95 % interval",
        x=0.01, ha="left", fontsize=8,
    )  # fmt: skip
    figure.draw_without_rendering()
    for axes, curves in drawn:
        labels(axes, x[-1], [(float(y[-1]), name, shade) for name, (y, shade) in curves.items()])
    return figure


# Rotation ----------------------------------------------------------------------------------------

TURNS = {0: ("#000000", 1.0, "none"), 16: ("#6e6e6e", 1.8, "16"), 128: ("#b8b8b8", 2.6, "128")}
TURNED = (
    ("FP8", "tensor"), ("FP8", "32"), ("INT8", "tensor"), ("INT8", "32"), ("FP4", "32"),
    ("FP4", "two-level"),
)  # fmt: skip
#: Usual names of a family by a scaling.
COMMON = {
    ("FP8", "32"): "MXFP8", ("INT8", "32"): "MXINT8", ("FP4", "32"): "MXFP4",
    ("FP4", "two-level"): "NVFP4",
}  # fmt: skip


def rotation(record: dict[str, Any]) -> Figure:
    """What a rotation does for the others as one channel grows."""
    metrics = record["metrics"]
    x = metrics["exponents"]
    cell = {
        (row["family"], row["scaling"], row["rotation"]): row
        for row in metrics["growth"]
        if row["pattern"] == "channel"
    }
    figure, panels = style.new(
        2, 3, figsize=(style.DOUBLE, 3.9), sharex=True, sharey=True
    )  # fmt: skip
    drawn = []
    for axes, (family, scaling) in zip(panels.T.flat, TURNED, strict=True):
        curves = {}
        for size, (shade, width, text) in reversed(TURNS.items()):
            row = cell[family, scaling, size]
            y = band(axes, x, row, "others_db", color=shade, linewidth=width)
            curves[text] = y, shade
        axes.axhline(0, color="#555555", linewidth=0.6)
        name = COMMON.get((family, scaling), f"{family}, one scale")
        axes.set_title(name, color=SHADES[family]["128" if family != "FP4" else scaling])
        drawn.append((axes, curves))
    for axes in panels[-1]:
        axes.set_xlim(x[0], x[-1])
        axes.set_xticks([k for k in x if k % 4 == 0])
        style.power_of_two_axis(axes.xaxis)
        axes.set_xlabel("one channel times")
    for axes in panels[:, 0]:
        axes.set_ylabel("SQNR of the others, dB")
    figure.suptitle(
        "Hadamard rotation of no, 16 or 128 channels; below 0 dB the error is larger than the values"
        f"\nMean of {record['point']['draws']} draws, band: 95 % interval",
        x=0.01, ha="left", fontsize=8,
    )  # fmt: skip
    figure.draw_without_rendering()
    for axes, curves in drawn:
        at = label_place(curves)
        labels(axes, x[at], [(float(y[at]), text, shade) for text, (y, shade) in curves.items()])
    return figure


def label_place(curves: dict[str, tuple[np.ndarray, str]]) -> int:
    """Where three curves lie farthest apart, not at the edges."""
    values = np.sort(np.stack([y for y, _ in curves.values()]), axis=0)
    apart = np.diff(values, axis=0).min(axis=0)
    inner = slice(1, max(2, len(apart) * 3 // 4))
    return 1 + int(np.argmax(apart[inner]))


# Real tensors ------------------------------------------------------------------------------------

WHOLE = ("FP8 tensor", "INT8 tensor", "FP4 32", "FP4 two-level")
QUALITY = (
    "FP8 tensor", "FP8 32", "INT8 tensor", "INT8 row", "INT8 32", "FP4 32", "FP4 two-level",
)  # fmt: skip
ZEROED = ("INT8 tensor", "FP4 32", "FP4 two-level")
TURNED_CELLS = ("INT8 tensor H16", "FP4 32 H16", "FP4 two-level H16")


def table_columns() -> list[tuple[str, str, Callable[[Any], Any], Any]]:
    """(group, heading, value of a row, darkness of a value) of each column."""
    place = {key: i for i, key in enumerate(LOSSES)}

    def of(name: str, measure: str) -> Callable[[dict[str, Any]], Any]:
        return lambda row: row["formats"][name][0][place[measure]]

    def log(low: float, high: float) -> Callable[[float], float]:
        return lambda v: math.log(max(v, low) / low) / math.log(high / low)

    def line(white: float, black: float) -> Callable[[float], float]:
        return lambda v: (v - white) / (black - white)

    made: list[tuple[str, str, Callable[[Any], Any], Any]] = [
        ("shape", "excess kurtosis", lambda row: row["kurtosis"], log(1, 2000)),
        ("shape", "max / RMS", lambda row: row["crest"], log(4, 200)),
        ("shape", "hot channels, %", lambda row: 100 * row["top1pct"], log(1, 60)),
    ]
    shown = [("SQNR, whole tensor, dB", "sqnr_db", name) for name in WHOLE]
    shown += [("SQNR, median row, dB", "row_db", name) for name in QUALITY]
    for group, measure, name in shown:
        # White: what the family has on Gaussian values.
        white, black = {"FP8": (31.5, 23), "INT8": (41, 20), "FP4": (20, 12)}[name.split(" ")[0]]
        made.append((group, LABELS[name], of(name, measure), line(white, black)))
    made += [
        ("far zeroed, %", LABELS[name], scaled(of(name, "far_zeroed")), line(0, 60))
        for name in ZEROED
    ]
    made += [
        ("gain of H16, dB", LABELS[name.removesuffix(" H16")], change(of, name), line(0, -2))
        for name in TURNED_CELLS
    ]
    return made


def scaled(value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def percent(row: dict[str, Any]) -> Any:
        found = value(row)
        return None if found is None else 100 * found

    return percent


def change(of: Callable[..., Any], turned: str) -> Callable[[Any], Any]:
    before, after = of(turned.removesuffix(" H16"), "sqnr_db"), of(turned, "sqnr_db")

    def difference(row: dict[str, Any]) -> Any:
        a, b = before(row), after(row)
        return None if a is None or b is None else b - a

    return difference


MOST = 32  # rows of the table


def tensors(record: dict[str, Any]) -> Figure:
    """The table of real tensors; darker is worse."""
    rows = worst(record["metrics"]["tensors"])[:MOST]
    columns = table_columns()
    figure, axes = style.new(figsize=(style.DOUBLE, max(2.3, 1.35 + 0.165 * len(rows))))
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.grid(visible=False)
    for i, row in enumerate(rows):
        for j, (group, _, value, darkness) in enumerate(columns):
            found = value(row)
            if found is None:
                axes.text(j + 0.5, i + 0.5, "–", ha="center", va="center", fontsize=6.5)
                continue
            grey = min(1.0, max(0.0, darkness(found)))
            axes.fill_between(
                [j + 0.02, j + 0.98], i + 0.03, i + 0.97, color=str(1 - 0.85 * grey), linewidth=0
            )
            text = f"{found:+.1f}" if group.startswith("gain") else compact(found)
            axes.text(
                j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=6.5,
                color="white" if grey > 0.5 else "black",
            )  # fmt: skip
    axes.set_yticks(np.arange(len(rows)) + 0.5, [named(row) for row in rows])
    axes.set_xticks(
        np.arange(len(columns)) + 0.5, [heading for _, heading, _, _ in columns],
        rotation=40, ha="left", rotation_mode="anchor",
    )  # fmt: skip
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    groups = [group for group, _, _, _ in columns]
    for group in dict.fromkeys(groups):
        first, count = groups.index(group), groups.count(group)
        axes.text(first + count / 2, len(rows) + 0.75, group, ha="center", va="center", fontsize=7)
        axes.plot(
            [first + 0.08, first + count - 0.08], [len(rows) + 0.25] * 2, color="black",
            linewidth=0.7, clip_on=False,
        )  # fmt: skip
    for i in range(1, len(rows)):
        if rows[i]["kind"] != rows[i - 1]["kind"]:
            axes.plot([-4, len(columns)], [i, i], color="#9a9a9a", linewidth=0.5, clip_on=False)
    return figure


KINDS = {
    "pretrained weight": "MiniLM W", "pretrained activation": "MiniLM X", "GPT weight": "GPT W",
    "GPT activation": "GPT X", "GPT gradient": "GPT dY",
}  # fmt: skip


def named(row: dict[str, Any]) -> str:
    return f"{KINDS[row['kind']]} {row['name']}" if row["kind"] in KINDS else label(row)


def compact(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


# Integers against floats -------------------------------------------------------------------------

KINDS_OF_BLOCKS = {
    "power": ("#000000", 1.0), "spike": ("#7a7a7a", 1.6), "natural": ("#b8b8b8", 2.4),
}  # fmt: skip


GREEN, RED = "#1b7f3b", "#c2461e"


def mark(axes: Axes, x: float, y: float, text: str, side: str) -> None:
    """A word beside an upright line."""
    axes.annotate(
        text, (x, y), xytext=(2 if side == "left" else -2, 0), textcoords="offset points",
        ha=side, va="center", color=GREEN, fontsize=6.5, zorder=5,
    )  # fmt: skip


def crossing(record: dict[str, Any]) -> Figure:
    """Integer minus float, dB, against a block's crest factor."""
    metrics = record["metrics"]
    cell = {(row["pair"], row["kind"], row["view"]): row for row in metrics["crossings"]}
    figure, panels = style.new(2, 3, figsize=(style.DOUBLE, 4.3), sharey=True)
    drawn = []
    for axes, pair in zip(panels.flat, metrics["pairs"], strict=True):
        limit = pair["largest_crest"]
        right = max(limit, pair["published"] or 0) * 1.25
        axes.axhline(0, color="#555555", linewidth=0.7)
        axes.axvspan(
            limit, right, facecolor="white", edgecolor="#c4c4c4", hatch="////", linewidth=0
        )
        ends = []
        for kind, (shade, width) in KINDS_OF_BLOCKS.items():
            row = cell[pair["pair"], kind, "block"]
            y = np.array(row["integer_db"]) - np.array(row["float_db"])
            axes.plot(row["crest"], y, color=shade, linewidth=width, zorder=3)
            if row["crossing"] is not None:
                axes.plot(row["crossing"], 0, "o", color=shade, markersize=4, zorder=4)
            if len(y):
                ends.append((float(y[-1]), SAID[kind], shade))
        rest = cell[pair["pair"], "spike", "others"]
        y = np.array(rest["integer_db"]) - np.array(rest["float_db"])
        if len(y):
            ends.append((float(y[-1]), "others", RED))
        axes.plot(
            rest["crest"], y, color=RED, linewidth=1.0, zorder=3,
        )  # fmt: skip
        said, exact = pair["published"], pair["model_exact_steps"]
        if said is not None:
            axes.axvline(said, color=GREEN, linewidth=1.1, linestyle=(0, (4, 2)))
            mark(axes, said, -14.5, f"{said:.2f}", "right" if said > limit else "left")
        if exact is not None and (said is None or exact < 0.97 * said):
            axes.axvline(exact, color=GREEN, linewidth=1.1, linestyle=(0, (1, 1.2)))
            mark(axes, exact, -14.5 if said is None else -11.5, f"{exact:.2f}", "right")
        integer, floating = pair["formats"]
        axes.set_title(f"{integer} − {floating}, blocks of {pair['block']}", fontsize=7.5)
        axes.set_xscale("log")
        axes.set_xlim(1.05, right)
        ticks = [t for t in (1.5, 2, 3, 4, 6, 8, 12, 16, 24) if t < right]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.set_xticks([], minor=True)
        drawn.append((axes, limit, ends))
    for axes in panels[:, 0]:
        axes.set_ylabel("SQNR, integer minus float, dB")
        axes.set_ylim(-16, 20)
    for axes in panels[-1]:
        axes.set_xlabel("crest factor of a block, largest / RMS")
    figure.suptitle(
        "Above 0 the integer is better; dots: where they cross. Hatched: no block of this length has"
        " such a crest factor.\nDashed: the published crossing. Dotted: its formula with 2ᵇ⁻¹ − 1"
        " steps for b bits, as the formats have, not 2ᵇ⁻¹.\n“Others”: without the block's largest value.",
        x=0.01, ha="left", fontsize=7.5,
    )  # fmt: skip
    figure.draw_without_rendering()
    for axes, limit, ends in drawn[:1]:
        labels(axes, limit, ends)
    return figure


SAID = {"power": "powers", "spike": "one spike", "natural": "Student-t"}


# All of them -------------------------------------------------------------------------------------


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """What the record has data for: of a user's tensors, the first figure alone."""
    made = {"_tensors": tensors(record)}
    if "growth" in record["metrics"]:
        made |= {
            "_channel": growing(record, "channel"),
            "_value": growing(record, "value"),
            "_rotation": rotation(record),
            "_crossing": crossing(record),
        }
    return made


def draw(path: Path, out: Path) -> list[Path]:
    """Draw every figure; the arguments, result and errors are those of `style.draw`."""
    return style.draw(NAME, figures, path, out)


def main() -> int:
    return style.command(NAME, __doc__ or "", draw, "results/full")


if __name__ == "__main__":
    sys.exit(main())
