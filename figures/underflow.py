"""Figures of experiments/underflow.py, drawn from its record alone.

    python figures/underflow.py [RECORD] [--out DIR]

draws <record's name>_loss_scale, _formats, _histogram, _parts, _rounding, _layers, _course and
_training, each as .pdf and .png. The same record gives the same bytes.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments import harness
from figures import style

TITLES = {
    "weight": "weights W",
    "activation": "activations X",
    "gradient": "gradients dY",
    "weight gradient": "weight gradients dW",
    "tensor": "tensors of the file",
}

Rows = list[dict[str, Any]]


def last_step(rows: Rows) -> int:
    return max(row["step"] for row in rows)


def main_kind(metrics: dict[str, Any]) -> str:
    """What the study is about: gradients, or the user's tensors."""
    return "gradient" if "gradient" in metrics["axes"] else "tensor"


def unit_of(metrics: dict[str, Any]) -> str:
    """What "the worst" is one of."""
    return "layer" if main_kind(metrics) == "gradient" else "tensor"


def kinds_of(metrics: dict[str, Any]) -> list[str]:
    return [kind for kind in TITLES if kind in metrics["axes"]]


def when(record: dict[str, Any], step: int) -> str:
    """The step for a title; nothing where there was no training."""
    return (
        f", step {step + 1} of {record['point']['training']['steps']}"
        if "training" in record["point"]
        else ""
    )


# (a) Loss scales ---------------------------------------------------------------------------------


def loss_scale(record: dict[str, Any]) -> Figure:
    """Share of values that vanish, and that overflow, against the loss scale."""
    rows: Rows = record["metrics"]["loss_scale"]
    step = last_step(rows)
    rows = [row for row in rows if row["step"] == step]
    formats = list(dict.fromkeys(row["format"] for row in rows))
    scales = sorted({row["log2_scale"] for row in rows})
    figure, (top, bottom) = style.new(
        2, 1, figsize=(style.SINGLE * 1.35, 3.9), sharex=True, height_ratios=(2.2, 1)
    )
    cell = {(row["format"], row["log2_scale"]): row for row in rows}
    zero = {f: [100 * cell[f, k]["underflow_share"] for k in scales] for f in formats}
    worst = {f: [100 * cell[f, k]["worst_share"] for k in scales] for f in formats}
    over = {f: [100 * cell[f, k]["saturated_share"] for k in scales] for f in formats}
    lowest = style.decade_below([v for f in formats for v in zero[f]], 1e-4)
    least = style.decade_below([v for f in formats for v in over[f]], 1e-5)
    for f in formats:
        line, high = style.on_log(zero[f], lowest), style.on_log(worst[f], lowest)
        shade = style.colour(f)
        top.fill_between(scales, line, high, color=shade, alpha=0.15, linewidth=0)
        top.plot(scales, high, color=shade, linewidth=0.6)
        top.plot(scales, line, color=shade, marker="o", markersize=2.5)
        bottom.plot(scales, style.on_log(over[f], least), color=shade, marker="o", markersize=2.5)
    style.percent_axis(top, "y", lowest)
    style.percent_axis(bottom, "y", least, every=2)
    what = TITLES[main_kind(record["metrics"])]
    top.set_title(f"Unscaled formats: {what}{when(record, step)}")
    unit = unit_of(record["metrics"])
    top.set_ylabel(f"become zero, % of non-zero\n(dots: all {unit}s; thin: the worst)")
    bottom.set_ylabel("beyond the\nlargest finite, %")
    bottom.set_xlabel("loss scale S")
    bottom.set_xticks([k for k in scales if k % 4 == 0])
    style.power_of_two_axis(bottom.xaxis)
    # Label where the curves are farther apart: at the last scale, or (large values) at the first.
    apart = {at: closest([style.on_log(zero[f], lowest)[at] for f in formats]) for at in (0, -1)}
    at, side = (-1, "right") if apart[-1] >= min(apart[0], 1.5) else (0, "left")
    bottom.set_xlim(scales[0] - (0.5 if side == "right" else 4), scales[-1] + (4 if at else 0.5))
    figure.draw_without_rendering()
    ends = [(style.on_log(zero[f], lowest)[at], f, style.colour(f)) for f in formats]
    style.label_lines(top, scales[at], ends, gap=8.5, side=side)
    if side == "right":
        over_ends = [
            (style.on_log(over[f], least)[-1], f, style.colour(f)) for f in formats if any(over[f])
        ]
        style.label_lines(bottom, scales[-1], over_ends, gap=8.5)
    never = [f for f in formats if not any(over[f])]
    if never:
        bottom.text(0.02, 0.9, f"never: {', '.join(never)}", transform=bottom.transAxes, va="top")
    return figure


def closest(values: list[float]) -> float:
    """Ratio of the two nearest values."""
    ordered = sorted(values)
    return min((b / a for a, b in pairwise(ordered)), default=np.inf)


# (b) Per tensor against per block ----------------------------------------------------------------


def formats(record: dict[str, Any]) -> Figure:
    """What each format loses of each kind of tensor: share that vanishes, and SQNR."""
    metrics = record["metrics"]
    rows: Rows = metrics["by_format"]
    step = last_step(rows)
    rows = [row for row in rows if row["step"] == step]
    names = list(dict.fromkeys(row["format"] for row in rows))
    kinds = kinds_of(metrics)
    table, unit = metrics["formats"], unit_of(metrics)
    cell = {(row["kind"], row["format"]): row for row in rows}
    height = 0.9 + 2 * (0.145 * len(names) + 0.25)
    width = style.DOUBLE if len(kinds) > 1 else style.SINGLE * 1.2
    figure, panels = style.new(
        2, len(kinds), figsize=(width, height), sharey=True, sharex="row", squeeze=False
    )
    lowest = max(1e-4, style.decade_below([100 * row["worst_share"] for row in rows]))
    places = np.arange(len(names))[::-1]
    for column, kind in enumerate(kinds):
        flush, quality = panels[:, column]
        for place, name in zip(places, names, strict=True):
            row = cell.get((kind, name))
            if row is None:
                continue
            shade = style.colour(name)
            pooled, worst = style.on_log(
                [100 * row["underflow_share"], 100 * row["worst_share"]], lowest
            )
            flush.plot([pooled, worst], [place, place], color=shade, linewidth=1.2)
            flush.plot(worst, place, marker="|", color=shade, markersize=6, markeredgewidth=1.2)
            flush.plot(pooled, place, marker="o", color=shade, clip_on=False)
            if row["sqnr_db_median"] is not None:
                low = row["sqnr_db_worst"]
                low = row["sqnr_db_median"] if low is None else low
                quality.plot(
                    [low, row["sqnr_db_median"]], [place, place], color=shade, linewidth=1.2
                )
                quality.plot(low, place, marker="|", color=shade, markersize=6, markeredgewidth=1.2)
                quality.plot(row["sqnr_db_median"], place, marker="o", color=shade)
        style.percent_axis(flush, "x", lowest, every=2)
        flush.set_title(TITLES[kind])
        quality.set_xlim(left=-2)
        for axes in (flush, quality):
            axes.set_ylim(-0.6, len(names) - 0.4)
            axes.grid(axis="y", visible=False)
            for edge in granularity_edges(table, names):
                axes.axhline(len(names) - 0.5 - edge, color="#9a9a9a", linewidth=0.5, linestyle=":")
    for axes in panels[:, 0]:
        axes.set_yticks(places, [f"{name} ({table[name]['shared']})" for name in names])
    for axes in panels[0]:
        axes.set_xlabel("become zero, %")
    for axes in panels[1]:
        axes.set_xlabel("SQNR, dB")
    figure.suptitle(
        f"Dot: all {unit}s together (SQNR: the median {unit}). Bar: the worst {unit}.\n"
        f"In brackets: how many values share a scale. {when(record, step)[2:].capitalize()}",
        x=0.01, ha="left", fontsize=7.5,
    )  # fmt: skip
    return figure


def granularity_edges(table: dict[str, Any], names: list[str]) -> list[int]:
    """Where the list of formats passes from one block size to another."""
    sizes = [table[name]["shared"] for name in names]
    return [i for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]]


# (c) Where the exponents lie ---------------------------------------------------------------------

#: Strips under the histogram: format and log2 of the loss scale.
STRIPS = (
    ("bf16", 0),
    ("fp16", 0),
    ("fp16", 10),
    ("e5m2", 0),
    ("e5m2", 16),
    ("e4m3", 0),
    ("e4m3", 20),
)


def histogram(record: dict[str, Any]) -> Figure:
    """Gradient exponents with a zero bin, and the formats' ranges as strips below."""
    metrics = record["metrics"]
    kind = main_kind(metrics)
    rows: Rows = [row for row in metrics["histograms"] if row["kind"] == kind]
    first, last = rows[0], rows[-1]
    figure, axes = style.new(
        2, 2, figsize=(style.DOUBLE, 3.6), width_ratios=(1.75, 1), height_ratios=(1.5, 1)
    )
    bars, strips = axes[0, 0], axes[1, 0]
    grid = axes[0, 1].get_gridspec()
    axes[0, 1].remove()
    axes[1, 1].remove()
    below = figure.add_subplot(grid[:, 1])

    counts = np.array(last["counts"])
    exponents = last["lowest"] + np.arange(len(counts))
    used = exponents[counts > 0] if counts.any() else np.array([0])
    left, right = max(int(used[0]), -44) - 1, max(int(used[-1]), 2) + 2
    zero_at = left - 2
    share = 100 * counts / (counts.sum() + last["zeros"])
    shown = exponents >= left
    share[np.argmax(shown)] += share[~shown].sum()  # the lowest bin takes what lies below
    bars.bar(
        exponents[shown] + 0.5,
        share[shown],
        width=1,
        color="#b5b5b5",
        edgecolor="white",
        linewidth=0.3,
    )
    zeros = 100 * last["zeros"] / (counts.sum() + last["zeros"])
    bars.bar(
        zero_at, zeros, width=1.6, color="white", edgecolor="#555555", hatch="xxx", linewidth=0.6
    )
    tallest = max(share[shown].max(), 1e-9)
    limit = 1.25 * tallest
    if first is not last:
        start = np.array(first["counts"])
        edge = 100 * start / (start.sum() + first["zeros"])
        bars.step(exponents[shown] + 0.5, edge[shown], where="mid", color="black", linewidth=0.9)
        shoulder = int(np.flatnonzero(edge > 0.4 * edge.max())[-1])
        bars.annotate(
            f"step {first['step'] + 1}", (exponents[shoulder] + 1, edge[shoulder]), xytext=(3, 0),
            textcoords="offset points", ha="left", va="center", fontsize=7,
        )  # fmt: skip
        limit = max(limit, 1.25 * edge.max())
    bars.set_ylim(0, limit)
    if zeros:
        text = f"{harness.percent(zeros / 100)} % are\nexactly zero"
        bars.text(zero_at + 1.3, 0.97 * limit, text, ha="left", va="top", fontsize=7)
    bars.set_ylabel("% of all values")
    bars.set_title(f"Exponents of {TITLES[kind]}{when(record, last['step'])}")
    ticks = [k for k in range(left + 1, right + 1) if k % 8 == 0]
    bars.set_xticks([zero_at, *ticks], ["0", *(style.power_of_two(k) for k in ticks)])
    bars.set_xlim(zero_at - 1.5, right)
    draw_strips(strips, metrics["formats"], zero_at, right)
    strips.set_xlim(bars.get_xlim())
    strips.set_xticks([zero_at, *ticks], ["0", *(style.power_of_two(k) for k in ticks)])
    strips.set_xlabel("|value| before scaling (bin: [2ᵏ, 2ᵏ⁺¹); first bin: exact zeros)")

    draw_distances(below, metrics, last["step"])
    return figure


def draw_strips(
    axes: Axes, formats: dict[str, Any], zero_at: float, right: float, strips: Any = STRIPS
) -> None:
    """A bar per format and loss scale: light where subnormal, full where normal."""
    chosen = [(name, k) for name, k in strips if name in formats]
    for place, (name, k) in enumerate(reversed(chosen)):
        row, shade = formats[name], style.colour(name)
        tiny, normal, top = (
            np.log2(row[key]) - k for key in ("min_subnormal", "min_normal", "max")
        )
        axes.add_patch(
            Rectangle(
                (tiny, place - 0.32),
                normal - tiny,
                0.64,
                facecolor="white",
                edgecolor=shade,
                hatch="/////",
                linewidth=0.7,
            )
        )
        axes.add_patch(
            Rectangle((normal, place - 0.32), top - normal, 0.64, facecolor=shade, linewidth=0)
        )
        dark = name in ("fp16", "e4m3")
        where = (max(normal, zero_at + 1.2) + min(top, right)) / 2
        text = name + (f", S = {style.power_of_two(k)}" if k else "")
        axes.text(
            where,
            place,
            text,
            ha="center",
            va="center",
            fontsize=6.5,
            color="white" if dark else "black",
            clip_on=True,
        )
    axes.set_ylim(-0.6, len(chosen) - 0.4)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_title("Range of a format: hatched subnormal, full normal", fontsize=7.5)


#: Strips under the histograms by kind of layer.
PART_STRIPS = (("fp16", 0), ("fp16", 10), ("e5m2", 0), ("e5m2", 16), ("e4m3", 0))
#: What NVFP4's block reaches below its largest value before values become zero: 6 / 0.25.
NVFP4_REACH = np.log2(24)


def parts(record: dict[str, Any]) -> Figure:
    """Gradient exponents by kind of layer at several steps, above the formats' ranges."""
    metrics = record["metrics"]
    rows: Rows = metrics["parts"]
    names = [n for n in ("qkv", "proj", "up", "down", "head") if any(r["part"] == n for r in rows)]
    steps = sorted({row["step"] for row in rows})
    steps = list(dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])))
    cell = {(row["step"], row["part"]): row for row in rows}
    used = [
        row["lowest"] + i for row in rows for i, count in enumerate(row["counts"])
        if count > 1e-3 * sum(row["counts"])
    ]  # fmt: skip
    left, right = max(min(used), -46), max(max(used), -4) + 2
    zero_at = left - 3
    figure, panels = style.new(
        len(names) + 1, 1, figsize=(style.SINGLE * 1.35, 0.95 * len(names) + 1.5), sharex=True,
        height_ratios=[1] * len(names) + [1.1],
    )  # fmt: skip
    looks = dict(zip(steps, (("#9a9a9a", 1.0), ("#5f5f5f", 1.4), ("#000000", 1.9)), strict=False))
    for axes, name in zip(panels, names, strict=False):
        for place, (step, (shade, width)) in enumerate(looks.items()):
            row = cell[step, name]
            counts = np.array(row["counts"])
            exponents = row["lowest"] + np.arange(len(counts))
            share = 100 * counts / max(1, counts.sum() + row["zeros"])
            share[exponents == left] += share[exponents < left].sum()
            shown = (exponents >= left) & (exponents <= right)
            axes.stairs(
                share[shown], [*exponents[shown], exponents[shown][-1] + 1], color=shade,
                linewidth=width, label=f"step {step + 1}",
            )  # fmt: skip
            zeros = 100 * row["zeros"] / max(1, counts.sum() + row["zeros"])
            axes.bar(zero_at - 0.7 + 0.7 * place, zeros, width=0.6, color=shade)
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
        draw_reach(axes, cell[steps[-1], name])
        axes.set_title(f"dY of {name}", fontsize=7.5, y=0.62, x=0.985, loc="right")
    panels[0].legend(fontsize=6.5, loc="upper left", bbox_to_anchor=(0.06, 1.12), frameon=False)
    panels[len(names) // 2].set_ylabel("% of all values")
    draw_strips(panels[-1], metrics["formats"], zero_at, right, PART_STRIPS)
    panels[-1].set_title("Hatched subnormal, full normal. Green: NVFP4, 16 values", fontsize=7.5)
    ticks = [k for k in range(left, right + 1) if k % 8 == 0]
    panels[-1].set_xticks([zero_at, *ticks], ["0", *(style.power_of_two(k) for k in ticks)])
    panels[-1].set_xlim(zero_at - 1.6, right)
    panels[-1].set_xlabel("|value| before scaling (bin: [2ᵏ, 2ᵏ⁺¹); first bin: exact zeros)")
    return figure


def draw_reach(axes: Axes, row: dict[str, Any]) -> None:
    """A bar from the median block's largest value down to what becomes zero; whiskers: 5 to 95 %."""
    counts = np.array(row["maxima"])
    if not counts.any():
        return
    below = np.cumsum(counts) / counts.sum()
    low, middle, high = (
        row["lowest"] + int(np.argmax(below >= q)) + 0.5 for q in (0.05, 0.5, 0.95)
    )
    height = 0.93 * axes.get_ylim()[1]
    shade = style.colour("nvfp4")
    axes.plot(
        [middle - NVFP4_REACH, middle], [height] * 2, color=shade, linewidth=3,
        solid_capstyle="butt",
    )  # fmt: skip
    axes.plot([low, high], [height] * 2, color=shade, linewidth=0.8, marker="|", markersize=4)


def draw_distances(axes: Axes, metrics: dict[str, Any], step: int) -> None:
    """How far below its block's maximum a value lies: what scaling can and cannot reach."""
    rows = [row for row in metrics["below_maximum"] if row["step"] == step]
    lines = {0: ("#bdbdbd", 2.6), 128: ("#8c8c8c", 2.0), 32: ("#555555", 1.4), 16: ("#000000", 0.9)}
    far = 36
    for row in rows:
        counts = np.array(row["counts"])
        total = counts.sum()
        if not total:
            continue
        beyond = 100 * (total - np.cumsum(counts)) / total  # share lying at least d binades below
        d = np.arange(len(beyond)) + 1
        keep = (beyond > 1e-3) & (d <= far)
        shade, width = lines[row["block"]]
        name = "the tensor" if row["block"] == 0 else f"{row['block']} values"
        axes.plot(d[keep], beyond[keep], color=shade, linewidth=width, label=name)
    for element, like in (("e2m1", "nvfp4"), ("e4m3", "e4m3"), ("e5m2", "e5m2")):
        row = next((r for r in metrics["formats"].values() if r["element"] == element), None)
        if row is None:
            continue
        # With the largest value on the format's: zero is what lies at or below half its smallest.
        reach = np.log2(row["max"]) - np.log2(row["min_subnormal"]) + 1
        shade = style.colour(like)
        axes.axvline(reach, color=shade, linewidth=1.1)
        axes.text(reach, 170, element, color=shade, ha="center", va="bottom", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 150)
    axes.set_yticks([1e-3, 1e-2, 0.1, 1, 10, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])
    axes.set_xlim(0, far)
    axes.set_xticks(range(0, far + 1, 4))
    axes.set_xlabel("at least so many binades below the\nlargest value that shares the scale")
    axes.set_ylabel("% of non-zero values")
    axes.set_title("Right of a format's line: becomes zero\n", fontsize=7.5)
    legend = axes.legend(title="one scale for", loc="upper right", fontsize=6.5, title_fontsize=6.5)
    legend.get_frame().set(alpha=1, linewidth=0.5)


# (d) Rounding to nearest against stochastic rounding ---------------------------------------------


def rounding(record: dict[str, Any]) -> Figure:
    """What is kept of what nearest flushes, and the bias of the whole."""
    rows: Rows = record["metrics"]["rounding"]
    step = last_step(rows)
    rows = [row for row in rows if row["step"] == step][::-1]
    figure, (kept, bias) = style.new(
        1, 2, figsize=(style.DOUBLE, 0.75 + 0.19 * len(rows)), sharey=True, width_ratios=(1, 1.25)
    )
    for place, row in enumerate(rows):
        shade = style.colour(row["format"])
        if row["kept_sr"] is not None:
            kept.plot(0, place, "o", color=shade, clip_on=False)
            error = 200 * (row["kept_sr_se"] or 0)
            kept.errorbar(
                100 * row["kept_sr"],
                place,
                xerr=error,
                fmt="o",
                color=shade,
                markerfacecolor="white",
                capsize=2,
                linewidth=1,
            )
        if row["magnitude_bias_rne"] is not None:
            bias.plot(100 * row["magnitude_bias_rne"], place, "o", color=shade)
            error = 200 * (row["magnitude_bias_sr_se"] or 0)
            bias.errorbar(
                100 * row["magnitude_bias_sr"],
                place,
                xerr=error,
                fmt="o",
                color=shade,
                markerfacecolor="white",
                capsize=2,
                linewidth=1,
            )
    kept.set_yticks(range(len(rows)), [row["format"] for row in rows])
    kept.axvline(100, color="#555555", linewidth=0.7)
    highest = max((100 * row["kept_sr"] for row in rows if row["kept_sr"] is not None), default=0)
    kept.set_xlim(-6, max(130, highest + 10))
    kept.set_xlabel("kept, % of what nearest flushes")
    kept.set_title("filled: to nearest; open: stochastic")
    bias.set_xscale("symlog", linthresh=0.01, linscale=0.6)
    ticks = [-100, -10, -1, -0.1, -0.01, 0, 0.01, 0.1, 1]
    bias.set_xticks(ticks, [f"{t:g}" for t in ticks])
    bias.set_xlim(-130, 2)
    bias.axvline(0, color="#555555", linewidth=0.7)
    bias.set_xlabel("bias of the projection on the exact tensor, %")
    what = TITLES[main_kind(record["metrics"])]
    bias.set_title(f"{what}{when(record, step)}; {rows[0]['draws']} draws, mean ± 2 s.e.")
    for axes in (kept, bias):
        axes.set_ylim(-0.6, len(rows) - 0.4)
    return figure


# Layers, and the course of training --------------------------------------------------------------


def layers(record: dict[str, Any]) -> Figure:
    """Heat map: share of non-zero gradients that vanish, by layer and format."""
    metrics = record["metrics"]
    kind = main_kind(metrics)
    rows = [row for row in metrics["by_layer"] if row["kind"] == kind]
    names = metrics["layers"]
    values = 100 * np.array([row["underflow"] for row in rows], dtype=float).T  # NaN: not measured
    figure, axes = style.new(
        figsize=(min(style.DOUBLE, 1.6 + 0.46 * len(rows)), 1.3 + 0.15 * len(names))
    )
    norm = LogNorm(0.01, 100)
    axes.imshow(
        np.fmax(values, 1e-9), norm=norm, cmap="Greys", aspect="auto", interpolation="nearest"
    )
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            if np.isnan(values[i, j]):
                continue
            shade = style.text_on(float(norm(max(values[i, j], 0.01))))
            text = harness.percent(values[i, j] / 100)
            axes.text(j, i, text, ha="center", va="center", fontsize=6, color=shade)
    axes.set_xticks(
        range(len(rows)),
        [row["format"] for row in rows],
        rotation=40,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    step = last_step(metrics["by_format"])
    axes.set_title(f"Non-zero values that become zero, %: {TITLES[kind]}{when(record, step)}")
    return figure


def course(record: dict[str, Any]) -> Figure:
    """Heat maps over training, one a format: layers by steps."""
    metrics = record["metrics"]
    names, rows = metrics["layers"], metrics["course"]
    formats_ = list(dict.fromkeys(row["format"] for row in rows))
    steps = sorted({row["step"] for row in rows})
    figure, panels = style.new(
        1, len(formats_), figsize=(style.DOUBLE, 1.15 + 0.125 * len(names)), sharey=True,
        squeeze=False,
    )  # fmt: skip
    cell = {(row["format"], row["step"]): row["underflow"] for row in rows}
    norm = LogNorm(0.01, 100)
    for axes, fmt in zip(panels[0], formats_, strict=True):
        values = 100 * np.array([cell[fmt, step] for step in steps], dtype=float).T
        image = axes.imshow(
            np.fmax(values, 1e-9), norm=norm, cmap="Greys", aspect="auto", interpolation="nearest"
        )
        unscaled = metrics["formats"][fmt]["shared"] == "unscaled"
        axes.set_title(f"{fmt}, S = 1" if unscaled else fmt, fontsize=7.5)
        shown = [*range(0, len(steps) - 2, 2), len(steps) - 1]
        axes.set_xticks(shown, [str(steps[i] + 1) for i in shown], fontsize=6)
        axes.set_yticks(range(len(names)), names, fontsize=6.5)
        axes.grid(visible=False)
        axes.tick_params(length=2)
    panels[0][len(formats_) // 2].set_xlabel("step (powers of two, and the last)")
    bar = figure.colorbar(image, ax=panels[0], pad=0.01, aspect=30)
    bar.set_ticks([0.01, 0.1, 1, 10, 100], labels=["≤ 0.01", "0.1", "1", "10", "100"])
    bar.set_label("dY that becomes zero, % of non-zero", fontsize=7)
    bar.outline.set_linewidth(0.5)
    return figure


def training(record: dict[str, Any]) -> Figure:
    """Underflow of the gradients over training, above the loss."""
    metrics = record["metrics"]
    rows = [row for row in metrics["by_format"] if row["kind"] == "gradient"]
    present = {row["format"] for row in rows}
    followed = [row["format"] for row in metrics.get("course", ())]
    chosen = list(dict.fromkeys(followed)) or sorted(present)[:5]
    figure, (top, bottom) = style.new(
        2, 1, figsize=(style.SINGLE * 1.35, 3.9), sharex=True, height_ratios=(2.2, 1)
    )
    steps = sorted({row["step"] for row in rows})
    share = {
        (row["format"], row["step"]): (100 * row["underflow_share"], 100 * row["worst_share"])
        for row in rows
    }
    lowest = style.decade_below([share[f, s][0] for f in chosen for s in steps], 1e-4)
    x = [s + 1 for s in steps]
    for f in chosen:
        line, high = (style.on_log([share[f, s][i] for s in steps], lowest) for i in (0, 1))
        top.plot(x, high, color=style.colour(f), linewidth=0.6)
        top.plot(x, line, color=style.colour(f), marker="o", markersize=3)
    style.percent_axis(top, "y", lowest)
    top.set_ylabel("become zero, % of non-zero\n(dots: all layers; thin: the worst)")
    top.set_title("Gradients dY over training")
    loss = metrics["train_loss"]
    bottom.plot(range(1, len(loss) + 1), loss, color="#555555", linewidth=0.9)
    bottom.set_ylabel("training loss,\nnats per byte")
    bottom.set_xlabel("step")
    bottom.set_xlim(-0.01 * len(loss), 1.36 * len(loss))
    bottom.set_xticks([t for t in bottom.get_xticks() if 0 <= t <= len(loss)])
    figure.draw_without_rendering()
    ends = []
    for f in chosen:
        (height,) = style.on_log([share[f, steps[-1]][0]], lowest)
        unscaled = metrics["formats"][f]["shared"] == "unscaled"
        ends.append((float(height), f"{f}, S = 1" if unscaled else f, style.colour(f)))
    style.label_lines(top, x[-1], ends, gap=8.5)
    return figure


# All of them -------------------------------------------------------------------------------------


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """What the record has data for: a user's tensors have no training."""
    metrics = record["metrics"]
    makers = {"loss_scale": loss_scale, "formats": formats, "histogram": histogram}
    if metrics.get("parts"):
        makers["parts"] = parts
    if metrics.get("course"):
        makers["course"] = course
    if metrics["rounding"]:
        makers["rounding"] = rounding
    if metrics["layers"]:
        makers["layers"] = layers
    if len(metrics.get("train_loss", ())) > 1:
        makers["training"] = training
    return {f"_{name}": make(record) for name, make in makers.items()}


def draw(path: Path, out: Path) -> list[Path]:
    """Draw every figure; the arguments, result and errors are those of `style.draw`."""
    return style.draw("underflow", figures, path, out)


def main() -> int:
    return style.command("underflow", __doc__ or "", draw)


if __name__ == "__main__":
    sys.exit(main())
