"""Figures of experiments/rounding.py, drawn from its record alone.

    python figures/rounding.py [RECORD] [--out DIR]      # default: results/full/rounding.json

draws <record's name>_map, _split, _scales, _bits and _gradients, each as .pdf and .png. Intervals
are Student's t over seeds, 95 %; where none shows, it is smaller than the mark.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import style

Rows = list[dict[str, Any]]
DATA = {"gaussian": "Gaussian values", "gradient": "gradients dY"}
WAYS = {"rne": "o", "sr": "s", "rtz": "v"}
SPELLED = {"rne": "nearest", "sr": "stochastic", "rtz": "toward zero"}
LOWEST = 1e-5  # percent: biases below are drawn at zero's place
#: Points of the map that have a name: format, rounding, and where the name stands (points).
NAMED = {
    ("fp8_tensor_e4m3", "rne"): (0, -9), ("fp8_tensor_e5m2", "rne"): (0, 6),
    ("int8_tensor", "rne"): (-12, 0), ("mxfp8_e4m3", "rne"): (0, 6), ("mxfp6_e2m3/rceil", "rne"): (6, 5),
    ("mxfp4", "rne"): (-4, 6), ("mxfp4", "sr"): (-4, 6), ("mxfp4/rceil", "sr"): (-2, 5),
    ("nvfp4", "rne"): (8, -9), ("nvfp4", "sr"): (-2, -10), ("nvfp4/up", "rne"): (17, 5),
    ("nvfp4/up", "sr"): (6, 13), ("mxint8", "rne"): (0, 6), ("nvfp4", "rtz"): (16, 5),
}  # fmt: skip


def shade(name: str) -> str:
    """Colour of a format or of a recipe that is called by one."""
    name = name.removeprefix("dy ")
    return style.colour("nvfp4/up" if "up" in name else name)


def percent(cell: dict[str, Any], key: str = "mean") -> float:
    return 100 * cell[key]


# Bias against SQNR -------------------------------------------------------------------------------


def bias_map(record: dict[str, Any]) -> Figure:
    rows: Rows = record["metrics"]["map"]
    figure, panels = style.new(1, 2, figsize=(style.DOUBLE, 3.1), sharey=True)
    for axes, (data, title) in zip(panels, DATA.items(), strict=True):
        for row in (r for r in rows if r["data"] == data):
            bias = percent(row["bias"])
            (y,) = style.on_log([abs(bias)], LOWEST)
            name, way = row["format"], row["rounding"]
            hollow = bias > 0 and abs(bias) >= LOWEST
            axes.plot(
                row["sqnr_db"], y, WAYS[way], color=shade(name), markersize=4,
                markerfacecolor="white" if hollow else shade(name), clip_on=False,
            )  # fmt: skip
            if (name, way) in NAMED:
                axes.annotate(
                    name.removeprefix("fp8_tensor_").replace("_tensor", ""), (row["sqnr_db"], y),
                    xytext=NAMED[name, way], textcoords="offset points", ha="center", va="center",
                    fontsize=6, color=shade(name),
                )  # fmt: skip
        style.percent_axis(axes, "y", LOWEST, every=2)
        axes.set_title(title)
        axes.set_xlabel("SQNR, dB")
    panels[0].set_ylabel("|magnitude bias|, %")
    handles = [
        panels[0].plot([], [], mark, color="black", markersize=4)[0] for mark in WAYS.values()
    ]
    handles += panels[0].plot([], [], "o", color="black", markerfacecolor="white", markersize=4)
    figure.legend(
        handles, [*(f"{SPELLED[way]}" for way in WAYS), "hollow: too large (bias > 0)"],
        loc="outside upper right", ncols=4, frameon=False, fontsize=7, handletextpad=0.2,
    )  # fmt: skip
    return figure


# Its parts ---------------------------------------------------------------------------------------

CAUSES = {"scale": ("#333333", ""), "dead": ("#ffffff", "////"), "grid": ("#b5b5b5", "")}
PARTED = (
    "fp8_tensor_e4m3", "fp8_tensor_e5m2", "mxfp8_e4m3", "mxfp8_e4m3/rceil", "mxfp4", "mxfp4/even",
    "mxfp4/rceil", "mxfp4/ceil", "nvfp4", "nvfp4/up", "nvfp4/2d", "nvfp4/te-4over6-mae-256",
)  # fmt: skip


def parts(record: dict[str, Any]) -> Figure:
    rows: Rows = record["metrics"]["map"]
    cell = {(r["data"], r["format"], r["rounding"]): r for r in rows}
    chosen = [(f, w) for f in PARTED for w in ("rne", "sr") if ("gaussian", f, w) in cell]
    figure, panels = style.new(1, 2, figsize=(style.DOUBLE, 0.75 + 0.15 * len(chosen)), sharey=True)
    for axes, (data, title) in zip(panels, DATA.items(), strict=True):
        for place, (fmt, way) in enumerate(chosen):
            row = cell[data, fmt, way]
            ends = {-1: 0.0, 1: 0.0}
            for cause, (fill, hatch) in CAUSES.items():
                width = percent(row[cause])
                side = 1 if width > 0 else -1
                axes.barh(
                    place, width, left=ends[side], height=0.62, color=fill, hatch=hatch,
                    edgecolor="black", linewidth=0.4,
                )  # fmt: skip
                ends[side] += width
            low, mean, high = (percent(row["bias"], key) for key in ("low", "mean", "high"))
            axes.plot([low, high], [place, place], color="#c02020", linewidth=1)
            axes.plot(mean, place, "d", color="#c02020", markersize=3)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.grid(axis="y", visible=False)
        axes.set_title(title)
        axes.set_xlabel("magnitude bias, %")
    panels[0].set_yticks(
        range(len(chosen)), [f"{f.replace('te-', '')}{', SR' if w == 'sr' else ''}" for f, w in chosen],
        fontsize=6.5,
    )  # fmt: skip
    panels[0].set_ylim(len(chosen) - 0.4, -0.6)
    handles = [
        panels[0].barh(0, 0, color=fill, hatch=hatch, edgecolor="black", linewidth=0.4)
        for fill, hatch in CAUSES.values()
    ]
    handles += panels[0].plot([], [], "d", color="#c02020", markersize=3)
    figure.legend(
        handles, ["scale: beyond the largest code", "dead zone: nearest code is zero", "grid", "whole"],
        loc="outside upper right", ncols=4, frameon=False, fontsize=7,
    )  # fmt: skip
    return figure


# NVFP4's scales ----------------------------------------------------------------------------------


def scales(record: dict[str, Any]) -> Figure:
    rows: Rows = [r for r in record["metrics"]["scales"] if r["rounding"] == "sr"]
    kinds = list(dict.fromkeys(r["data"] for r in rows))
    formats = list(dict.fromkeys(r["format"] for r in rows))
    cell = {(r["data"], r["format"]): r for r in rows}
    figure, panels = style.new(
        1, 3, figsize=(style.DOUBLE, 0.7 + 0.1 * len(rows)), sharey=True, width_ratios=(1, 1.3, 1.3)
    )
    titles = (
        "Block maxima that clip",
        "Bias: maxima, others (small)",
        "Bias of all values",
    )
    places, names = [], []
    for f, fmt in enumerate(formats):
        for k, kind in enumerate(kinds):
            place = f * (len(kinds) + 0.7) + k
            places.append(place)
            names.append(f"{fmt.replace('te-', '')}:  {kind}" if k == 0 else kind)
            row, colour = cell[kind, fmt], shade(fmt)
            panels[0].barh(place, percent(row["clipped"]), height=0.7, color=colour)
            for key, size in (("maxima", 5), ("others", 2.5)):
                panels[1].plot(percent(row[key]), place, "o", color=colour, markersize=size)
            low, mean, high = (percent(row["bias"], key) for key in ("low", "mean", "high"))
            panels[2].plot([low, high], [place, place], color=colour, linewidth=1.2)
            panels[2].plot(mean, place, "o", color=colour, markersize=3.5)
            panels[2].plot(
                [100 * s for s in row["bias"]["seeds"]], [place] * len(row["bias"]["seeds"]), "|",
                color=colour, markersize=3, markeredgewidth=0.5,
            )  # fmt: skip
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=7.5)
        axes.set_xlabel("%")
        axes.grid(axis="y", visible=False)
        axes.axvline(0, color="black", linewidth=0.6)
    panels[0].set_yticks(places, names, fontsize=6)
    panels[0].set_ylim(max(places) + 0.7, -0.7)
    return figure


# Random bits -------------------------------------------------------------------------------------


def bits(record: dict[str, Any]) -> Figure:
    rows: Rows = [r for r in record["metrics"]["bits"] if r["data"] == "gradient"]
    sources = list(dict.fromkeys(r["source"] for r in rows))
    figure, panels = style.new(1, 2, figsize=(style.DOUBLE, 2.5), sharey=True)
    lowest = -34
    ends = []
    for axes, source in zip(panels, sources, strict=True):
        labels = []
        for row in (r for r in rows if r["source"] == source):
            cut = np.abs(row["cut"])
            n = np.arange(1, len(cut) + 1)
            shown = cut > 2.0**lowest
            y = np.log2(cut[shown])
            axes.plot(n[shown], y, color=shade(row["format"]), marker="o", markersize=2)
            if not shown.all():  # from here on nothing is cut, or next to nothing
                axes.plot(n[shown][-1], y[-1], "x", color=shade(row["format"]), markersize=5)
            labels.append((float(y[0]), row["format"], shade(row["format"])))
        law = next(r for r in rows if r["source"] == source and r["format"] == "nvfp4")["uniform"]
        axes.plot(n, np.log2(np.abs(law)), color="black", linewidth=0.7, linestyle=":")
        axes.set_title(f"gradients dY in {source}")
        axes.set_xlabel("random bits n")
        axes.set_xticks([1, 4, 8, 12, 16, 20, 24, 28, 32])
        axes.set_xlim(-14, 32)
        axes.set_ylim(lowest, 0)
        style.power_of_two_axis(axes.yaxis)
        for known in (8, 16):
            axes.axvline(known, color="#9a9a9a", linewidth=0.6)
        ends.append(labels)
    panels[0].set_ylabel("|bias that n bits add|")
    figure.draw_without_rendering()
    for axes, labels in zip(panels, ends, strict=True):
        style.label_lines(axes, 1, labels, gap=7.5, side="left")
    return figure


# Gradients ---------------------------------------------------------------------------------------

CONVERGING = ("dy nvfp4 sr", "dy nvfp4/up sr", "dy mxfp4 sr", "nvfp4", "nvfp4 sr all")


def gradients(record: dict[str, Any]) -> Figure:
    metrics = record["metrics"]
    figure, (left, middle, right) = style.new(
        1, 3, figsize=(style.DOUBLE, 3.0), width_ratios=(1.5, 1, 1)
    )
    rows = {r["arm"]: r for r in metrics["gemms"] if r["gemm"] == "wgrad"}
    converging(left, [rows[arm] for arm in CONVERGING])
    steps: Rows = metrics["steps"]
    names = [row["arm"] for row in steps]
    for place, row in enumerate(steps):
        colour = shade(row["arm"])
        for axes, cell in (
            (middle, {k: 100 * (rows[row["arm"]]["projection"][k] - 1) for k in ("low", "mean", "high")}),
            (right, row["ratio"]),
        ):  # fmt: skip
            if cell is not None:
                axes.plot([cell["low"], cell["high"]], [place, place], color=colour, linewidth=1.2)
                axes.plot(cell["mean"], place, "o", color=colour, markersize=3.5)
    middle.set_yticks(range(len(names)), names, fontsize=6)
    right.set_yticks(range(len(names)), [])
    for axes in (middle, right):
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
    middle.axvline(0, color="black", linewidth=0.6)
    middle.set_xlabel("projection on the exact dW,\n% off, mean over layers")
    middle.set_title("wgrad")
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    right.axvline(3**0.5, color="#c02020", linewidth=0.9)
    right.annotate(
        "√3", (3**0.5, 1), xycoords=("data", "axes fraction"), xytext=(3, -1),
        textcoords="offset points", ha="left", va="top", color="#c02020", fontsize=7,
    )  # fmt: skip
    right.set_xlabel("|g| / error, the weight\ngradient of a whole step")
    right.set_title("step")
    return figure


def converging(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """|mean of n draws - g| / |g|: exact lines, sampled points, and the floor of no more draws."""
    most = 12  # draws: 2^12
    n = np.arange(0, most + 1)
    labels = []
    for row in rows:
        colour = shade(row["arm"])
        dashed = style.DASHED if row["arm"] == "nvfp4 sr all" else style.SOLID
        floor, error = row["floor"]["mean"], row["error"]["mean"]
        line = np.sqrt(floor**2 + (error**2 - floor**2) / 2.0**n)
        axes.plot(n, np.log2(100 * line), color=colour, linestyle=dashed)
        points = row["sampled"]
        axes.plot(
            range(len(points)), np.log2(100 * np.array(points)), "o", color=colour, markersize=3
        )
        labels.append((float(np.log2(100 * line[-1])), row["arm"], colour))
    top = max(np.log2(100 * r["error"]["mean"]) for r in rows)
    axes.plot(n, top + 0.6 - n / 2, color="black", linewidth=0.7, linestyle=":")
    axes.annotate("1/√n", (2.2, top + 0.6 - 0.9), fontsize=7)
    axes.set_xlim(0, most + 8)
    axes.set_xticks(range(0, most + 1, 4))
    style.power_of_two_axis(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda k, _: f"{2.0**k:.3g}")
    axes.set_xlabel("draws n averaged")
    axes.set_ylabel("distance from the exact dW, %")
    axes.set_title("wgrad: what averaging leaves")
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    style.label_lines(axes, most, labels, gap=8)


# All of them -------------------------------------------------------------------------------------

FIGURES = {"map": bias_map, "split": parts, "scales": scales, "bits": bits, "gradients": gradients}


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    return {f"_{name}": make(record) for name, make in FIGURES.items()}


def draw(path: Path, out: Path) -> list[Path]:
    """Draw every figure; the arguments, result and errors are those of `style.draw`."""
    return style.draw("rounding", figures, path, out)


def main() -> int:
    return style.command("rounding", __doc__ or "", draw, "results/full")


if __name__ == "__main__":
    sys.exit(main())
