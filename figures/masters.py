"""Draw the figures of a record of experiments/masters.py.

    python figures/masters.py [RECORD] [--out DIR]

<record's name>_moves: left, the share of weights that a step leaves as they were, by binade of
lr / |w|, all looks and seeds pooled; the bands are half a step of the format, relative to |w|.
Middle, the same share of the matrices over the steps; right, the share of the norms' weights that
is exactly 1, where they began. Dotted: the decay begins. <record's name>_gaps: the claims; a box is
the 95 % interval of the mean gap, points are seeds, a hatch says "not resolved".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from figures import loss_curves, style

NAME = "masters"
STORED = ("bf16_rne", "bf16_sr", "fp16_rne", "fp16_sr")
#: log2 of half a step over |w|, the least and the most of it.
HALF_STEP = {"bf16": (-9, -8), "fp16": (-12, -11)}
WORDS = {
    "bf16_rne": "bf16", "bf16_sr": "bf16 sr", "fp16_rne": "fp16", "fp16_sr": "fp16 sr",
    "bf16_master": "float32",
}  # fmt: skip
FEWEST = 100  # weights that a binade must hold to be drawn


def line_of(cell: str) -> dict[str, Any]:
    return {
        "color": style.colour(cell),
        "linestyle": style.DASHED if cell.endswith("_sr") else style.SOLID,
    }


def moves(record: dict[str, Any]) -> Figure:
    found = record["metrics"]
    cells = {row["cell"]: row for row in found["cells"]}
    figure, (left, middle, right) = style.new(
        1, 3, figsize=(style.DOUBLE, 2.3), width_ratios=(1.5, 1, 1)
    )
    for fmt, (low, high) in HALF_STEP.items():
        left.axvspan(low, high, color=style.colour(fmt), alpha=0.3, linewidth=0)
        left.annotate(
            fmt, (low, 1.0), xycoords=("data", "axes fraction"), xytext=(-1, 2),
            textcoords="offset points", fontsize=6.5,
        )  # fmt: skip
    for name in STORED:
        count, same = (np.array(cells[name][key]) for key in ("of_bin", "unchanged_in"))
        exponents = found["lowest"] + np.arange(len(count)) + 0.5
        share = np.where(count >= FEWEST, 100 * same / np.maximum(count, 1), np.nan)
        left.plot(exponents, share, **line_of(name))
    left.set_xlabel("lr / |w|")
    left.set_ylabel("left unchanged by a step, %")
    left.set_xticks(range(-16, 9, 4))
    style.power_of_two_axis(left.xaxis)
    for words, style_of in (("to nearest", style.SOLID), ("stochastic", style.DASHED)):
        left.plot([], [], color="#555555", linestyle=style_of, label=words)
    left.legend(frameon=False, fontsize=6.5, loc="upper right")
    steps = np.array(found["look_at"]) + 1
    for axes, key, title in (
        (middle, "unchanged_matrices", "Matrices, unchanged, %"),
        (right, "norms_at_one", "Norm weights that are 1, %"),
    ):
        for name in (*STORED, "bf16_master"):
            look = line_of(name) if name in STORED else {"color": "#555555", "linestyle": ":"}
            axes.plot(steps, 100 * np.array(cells[name][key]), **look)
        axes.axvline(cells["bf16_rne"]["decay"], color="black", linewidth=0.6, linestyle=":")
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylim(-4, 104)
        axes.set_xlim(0, steps[-1])
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    figure.draw_without_rendering()
    for axes, key in ((middle, "unchanged_matrices"), (right, "norms_at_one")):
        ends = [
            (100 * cells[name][key][-1], WORDS[name], line_of(name)["color"])
            for name in (*STORED, "bf16_master")
        ]
        style.label_lines(axes, steps[-1], ends, gap=8)
    return figure


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    return {"_moves": moves(record), "_gaps": loss_curves.claims(record)}


def draw(path: Path, out: Path) -> list[Path]:
    """Draw both figures; the arguments, result and errors are those of `style.draw`."""
    return style.draw(NAME, figures, path, out)


def main() -> int:
    return style.command(NAME, __doc__ or "", draw, "results/full")


if __name__ == "__main__":
    sys.exit(main())
