"""Figures of experiments/accumulation.py, drawn from its record alone.

    python figures/accumulation.py [RECORD] [--out DIR]

draws <record's name>_error, _bias and _wgrad, each as .pdf and .png. The same record gives the same
bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import style

Rows = list[dict[str, Any]]

TITLES = {
    "normal": "normal · normal",
    "gelu": "gelu(normal) · normal",
    "growing": "gelu(normal) · gelu(normal): sums grow",
    "constant": "1 · 1.875 everywhere",
    "layer": "layer {layer}: Y = X Wᵀ",
    "wgrad": "layer {layer}: dW = dYᵀ X, K = tokens",
}

#: Line style and marker beside the colour: what shares a colour, or a grey, must not share these.
SOLID, DASHED, DOTTED, DASHDOT = "-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2))
STYLES: dict[str, tuple[Any, str]] = {
    "fast": (SOLID, "o"),
    "promoted": (DASHED, "s"),
    "Blackwell E4M3": (DOTTED, "^"),
    "Hopper BF16": (SOLID, "D"),
    "Ampere FP16": (SOLID, "v"),
    "NVFP4": (SOLID, "P"),
    "MXFP4": (SOLID, "X"),
    "sequential": (DASHED, "<"),
    "pairwise": (DASHDOT, ">"),
}
COLOURS = {"fp32.sequential": "#777777", "fp32.pairwise": "#777777"}


def look(line: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `plot` for a line of the record."""
    dash, marker = next((s for key, s in STYLES.items() if key in line["label"]), (SOLID, "o"))
    return {"color": shade(line), "linestyle": dash, "marker": marker, "markersize": 2.8}


def shade(line: dict[str, Any]) -> str:
    return COLOURS.get(line["unit"]) or style.colour(line["unit"].split(".")[-1])


def lines_of(metrics: dict[str, Any], rows: Rows) -> list[dict[str, Any]]:
    """The record's lines that the rows are about."""
    present = {row["line"] for row in rows}
    return [line for line in metrics["lines"] if line["label"] in present]


# Against K ---------------------------------------------------------------------------------------


def panels(record: dict[str, Any], key: str) -> tuple[Figure, list[tuple[str, Axes, Rows]], float]:
    """Six panels with a log2 axis of K and a percent axis that has a place for exact zero."""
    metrics = record["metrics"]
    rows: Rows = metrics["errors"]
    kinds = [kind for kind in TITLES if any(row["kind"] == kind for row in rows)]
    figure, grid = style.new(
        3, 2, figsize=(style.DOUBLE, 7.4), sharex=True, sharey=True, squeeze=False
    )
    values = [100 * abs(row[key]) for row in rows if row[key] is not None]
    lowest = style.decade_below(values, 1e-8)
    ks = record["point"]["lengths"]
    made = []
    for kind, axes in zip(kinds, grid.ravel(), strict=True):
        style.percent_axis(axes, "y", lowest, every=2)
        axes.set_ylim(style.zero_place(lowest) / 6)  # room for names beside zero
        exponents = [k.bit_length() - 1 for k in ks]
        axes.set_xticks([k for k in exponents if (exponents[-1] - k) % 3 == 0])
        axes.set_xlim(exponents[0] - 0.3, exponents[-1] + 0.58 * (exponents[-1] - exponents[0]))
        style.power_of_two_axis(axes.xaxis)
        axes.set_title(TITLES[kind].format(layer=metrics["layer"]))
        made.append((kind, axes, [row for row in rows if row["kind"] == kind]))
    for axes in grid[-1]:
        axes.set_xlabel("K, products in a sum")
    return figure, made, lowest


def label(
    figure: Figure, axes: Axes, ends: list[tuple[float, float, str, str]], zero: float
) -> None:
    """Names right of the lines' last points; more than two lines at zero share one name."""
    at_zero = [end for end in ends if end[1] <= zero]
    if len(at_zero) > 2:
        x, y = at_zero[0][:2]
        ends = [end for end in ends if end not in at_zero]
        ends.append((x, y, "all others", "#000000"))
    figure.draw_without_rendering()
    style.label_lines(axes, max(end[0] for end in ends), [end[1:] for end in ends], gap=7.2)
    for text in axes.texts:
        text.set_fontsize(6)


def error(record: dict[str, Any]) -> Figure:
    """RMS error against K."""
    metrics = record["metrics"]
    figure, made, lowest = panels(record, "rms")
    labels = []
    for _, axes, rows in made:
        ends = []
        for line in lines_of(metrics, rows):
            own = [r for r in rows if r["line"] == line["label"] and r["rms"] is not None]
            x = [np.log2(r["k"]) for r in own]
            y = style.on_log([100 * r["rms"] for r in own], lowest)
            axes.plot(x, y, **look(line), linewidth=1)
            ends.append((x[-1], float(y[-1]), line["label"], shade(line)))
        labels.append((axes, ends))
    for axes, ends in labels:
        label(figure, axes, ends, style.zero_place(lowest))
    for _, axes, _ in made[::2]:
        axes.set_ylabel("RMS error, % of RMS of exact")
    figure.supxlabel(f"0: exact, or below {lowest:.0e} %", fontsize=7)
    return figure


def resolved(row: dict[str, Any]) -> bool:
    """Whether a bias is more than twice its standard error; one output's error is no estimate."""
    return row["bias"] != 0 and (row["bias_se"] is None or abs(row["bias"]) > 2 * row["bias_se"])


def bias(record: dict[str, Any]) -> Figure:
    """|bias| against K: filled where magnitudes shrink, open where they grow, none: unresolved."""
    metrics = record["metrics"]
    figure, made, lowest = panels(record, "bias")
    labels = []
    for _, axes, rows in made:
        ends = []
        for line in lines_of(metrics, rows):
            own = [r for r in rows if r["line"] == line["label"] and r["bias"] is not None]
            x = [np.log2(r["k"]) for r in own]
            y = style.on_log([100 * abs(r["bias"]) for r in own], lowest)
            kind = look(line)
            marker = kind.pop("marker")
            axes.plot(x, y, **kind, linewidth=0.8)
            for inner, sign in ((kind["color"], -1), ("white", 1)):
                shown = [i for i, r in enumerate(own) if resolved(r) and r["bias"] * sign > 0]
                axes.plot(
                    [x[i] for i in shown], y[shown], marker, color=kind["color"], markersize=3.2,
                    markerfacecolor=inner, markeredgewidth=0.7,
                )  # fmt: skip
            ends.append((x[-1], float(y[-1]), line["label"], shade(line)))
        labels.append((axes, ends))
    for axes, ends in labels:
        label(figure, axes, ends, style.zero_place(lowest))
    for _, axes, _ in made[::2]:
        axes.set_ylabel("|bias|, % of mean |exact|")
    figure.supxlabel(
        "filled: magnitudes shrink; open: they grow; no marker: zero, or within two standard errors;"
        f" 0: none, or below {lowest:.0e} %",
        fontsize=7,
    )
    return figure


# Weight gradients --------------------------------------------------------------------------------


def wgrad(record: dict[str, Any]) -> Figure:
    """Error of dW from adding and from the cast, and how much its norm shrinks."""
    metrics = record["metrics"]
    rows: Rows = metrics["weight_gradients"]
    lines = lines_of(metrics, rows)[::-1]
    figure, (left, right) = style.new(
        1, 2, figsize=(style.DOUBLE, 0.95 + 0.2 * len(lines)), sharey=True, width_ratios=(1.25, 1)
    )
    lowest = style.decade_below([100 * row["error"] for row in rows if row["error"]], 1e-8)
    moved = {
        id(row): 100 * abs(row["norm_change"]) for row in rows if row["norm_change"] is not None
    }
    least = style.decade_below(list(moved.values()), 1e-8)
    for place, line in enumerate(lines):
        own = [row for row in rows if row["line"] == line["label"] and id(row) in moved]
        dark = shade(line)
        adding = style.on_log([100 * row["error"] for row in own], lowest)
        casting = style.on_log([100 * row["cast_error"] for row in own], lowest)
        heights = place + np.linspace(0.22, -0.22, len(own))
        left.plot(adding, heights, "o", color=dark, markersize=3.2, clip_on=False)
        left.plot(
            casting, heights, "s", color=dark, markerfacecolor="white", markersize=3.2,
            markeredgewidth=0.8, clip_on=False,
        )  # fmt: skip
        x = style.on_log([moved[id(row)] for row in own], least)
        for row, at, height in zip(own, x, heights, strict=True):
            inner = dark if row["norm_change"] < 0 else "white"
            right.plot(
                at, height, "o", color=dark, markerfacecolor=inner, markersize=3.2,
                markeredgewidth=0.8, clip_on=False,
            )  # fmt: skip
    style.percent_axis(left, "x", lowest, every=2)
    style.percent_axis(right, "x", least, every=2)
    left.set_yticks(range(len(lines)), [line["label"] for line in lines])
    left.set_ylim(-0.6, len(lines) - 0.4)
    left.set_xlabel("relative error of dW, %\nfilled: from adding; open squares: from the cast")
    right.set_xlabel("change of ‖dW‖ by adding, %\nfilled: shrinks; open: grows, or none")
    names = list(dict.fromkeys(row["layer"] for row in rows))
    left.set_title(f"dW over {rows[0]['k']} tokens; top to bottom {', '.join(names)}")
    return figure


# All of them -------------------------------------------------------------------------------------


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    return {"_error": error(record), "_bias": bias(record), "_wgrad": wgrad(record)}


def draw(path: Path, out: Path) -> list[Path]:
    """Draw every figure; the arguments, result and errors are those of `style.draw`."""
    return style.draw("accumulation", figures, path, out)


def main() -> int:
    return style.command("accumulation", __doc__ or "", draw)


if __name__ == "__main__":
    sys.exit(main())
