"""Draw the figure of a record of experiments/loss_scale.py.

    python figures/loss_scale.py [RECORD] [--out DIR]

Left, above: gap of the held-out loss to BF16 against the loss scale, means over seeds with 95 %
intervals; the axis is linear within the margin of equality (grey) and logarithmic beyond. Left,
below: of the last step's dY, the share of non-zero values that becomes zero (full) and the share
that saturates (dotted; FP16: the share of all steps that overflow and are skipped). Right: torch's dynamic scale
over the steps, of the first seed; crosses are overflows, whose steps are skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import style

NAME = "loss_scale"
ARMS = {"fp16": "o", "e5m2": "s", "e4m3": "^"}  # and their marks
WIDTHS = {"e5m2": 3.6, "e4m3": 2.2, "fp16": 0.9}
TICKS = (-0.1, -0.01, 0, 0.01, 0.1, 1)


def sweep(record: dict[str, Any]) -> Figure:
    found = record["metrics"]
    fixed = [row for row in found["cells"] if row["scaler"] == "fixed"]
    figure, axes = style.new(
        2,
        2,
        figsize=(style.DOUBLE, 3.7),
        sharex="col",
        width_ratios=(1.35, 1),
        height_ratios=(1.35, 1),
    )
    gaps, lost = axes[:, 0]
    grid = axes[0, 1].get_gridspec()
    for spare in axes[:, 1]:
        spare.remove()
    trace = figure.add_subplot(grid[:, 1])
    curves = {
        arm: sorted((row for row in fixed if row["arm"] == arm), key=lambda row: row["log2_scale"])
        for arm in ARMS
    }
    scales = [row["log2_scale"] for row in curves["fp16"]]
    margin = found["margin"]
    gaps.axhspan(-margin, margin, color="#e6e6e6", linewidth=0, zorder=0)
    gaps.axhline(0, color="black", linewidth=0.6)
    lowest = 0.01  # percent
    for arm, mark in ARMS.items():
        rows, shade = curves[arm], style.colour(arm)
        mean, low, high = (np.array([row[key] for row in rows]) for key in ("gap", "low", "high"))
        gaps.fill_between(scales, low, high, color=shade, alpha=0.2, linewidth=0)
        gaps.plot(scales, mean, color=shade, marker=mark, markersize=3)
        zero = [100 * row["underflow_share"] for row in rows]
        over = [100 * row["skipped_share" if arm == "fp16" else "saturated_share"] for row in rows]
        lost.plot(scales, style.on_log(zero, lowest), color=shade, marker=mark, markersize=3)
        lost.plot(
            scales, style.on_log(over, lowest), color=shade, linestyle=":", marker=mark, markersize=3,
            markerfacecolor="white",
        )  # fmt: skip
    gaps.set_yscale("symlog", linthresh=margin, linscale=0.7)
    gaps.set_ylabel("gap to BF16, nats per byte")
    gaps.set_title(f"Held-out loss after {record['point']['common']['steps']} steps")
    top = max(row["high"] for row in fixed)
    bottom = min([-2 * margin, *(row["low"] for row in fixed)])
    gaps.set_ylim(bottom * 1.3, top * 8)  # above the curves: the legend, in one line
    shown = [t for t in TICKS if bottom * 1.3 <= t <= top * 2]
    gaps.set_yticks(shown, [f"{t:g}" for t in shown])
    style.percent_axis(lost, "y", lowest)
    lost.set_ylabel("%")
    lost.set_title("Full: dY that becomes zero. Dotted: too large", fontsize=7.5)
    lost.set_xlabel("loss scale S")
    lost.set_xlim(scales[0] - 1, scales[-1] + 1)
    lost.set_xticks(range(scales[0], scales[-1] + 1, 4))
    style.power_of_two_axis(lost.xaxis)
    for arm, mark in ARMS.items():  # a legend: the curves cross
        words = "FP16" if arm == "fp16" else f"FP8, {arm} dY"
        gaps.plot([], [], color=style.colour(arm), marker=mark, markersize=3, label=words)
    gaps.legend(
        loc="upper center", ncols=len(ARMS), fontsize=6.5, frameon=False, columnspacing=1,
        handlelength=1.6, borderaxespad=0.1,
    )  # fmt: skip
    length, ends = draw_trace(trace, record)
    figure.draw_without_rendering()
    style.label_lines(trace, length, ends, gap=8.5)
    return figure


def draw_trace(axes: Axes, record: dict[str, Any]) -> tuple[int, list[tuple[float, str, str]]]:
    """log2 of the dynamic scale, of the first seed; returns where the lines end and their labels."""
    seed = record["point"]["seeds"][0]
    runs = [{**record["point"]["common"], **run} for run in record["metrics"]["runs"]]
    runs = [run for run in runs if run["scaler"] == "dynamic" and run["seed"] == seed]
    runs.sort(key=lambda run: WIDTHS[run["arm"]], reverse=True)  # lines that coincide stay visible
    for run in runs:
        shade, trace = style.colour(run["arm"]), run["log2_scale_by_step"]
        steps = np.arange(len(trace)) + 1
        axes.step(steps, trace, where="mid", color=shade, linewidth=WIDTHS[run["arm"]])
        at = run["skipped_at"]
        axes.plot([s + 1 for s in at], [trace[s] for s in at], "x", color=shade, markersize=4)
    length = max(len(run["log2_scale_by_step"]) for run in runs)
    axes.set_xlim(0, length)
    axes.set_xticks(range(0, length + 1, 40 if length > 80 else 10))
    axes.set_xlabel("step")
    low, high = axes.get_ylim()
    axes.set_yticks(range(4 * int(low // 4), int(high) + 4, 4))
    style.power_of_two_axis(axes.yaxis)
    axes.set_ylabel("loss scale S")
    axes.set_title("Dynamic; ×: overflow, step skipped", fontsize=7.5)
    ends: dict[int, list[str]] = {}
    for run in runs:
        ends.setdefault(run["log2_scale_by_step"][-1], []).append(run["arm"])
    labels = [(float(k), ", ".join(dict.fromkeys(arms)), "black") for k, arms in ends.items()]
    return length, labels


def draw(path: Path, out: Path) -> list[Path]:
    """Draw the figure; the arguments, result and errors are those of `style.draw`."""
    return style.draw(NAME, lambda record: {"": sweep(record)}, path, out)


def main() -> int:
    return style.command(NAME, __doc__ or "", draw, "results/full")


if __name__ == "__main__":
    sys.exit(main())
