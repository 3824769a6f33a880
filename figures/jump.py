"""Draw the figures of a record of experiments/jump.py.

    python figures/jump.py [RECORD] [--out DIR]

Left: the share of dY that saturates in the step of the first jump, all layers pooled (full) and in
the worst layer of any seed (hollow), against how far it jumps. Right: what is left of the weight
gradient in the steps around the jump. Means over seeds, with 95 % intervals. The other figure: the
claims about the loss, as those of figures/loss_curves.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from matplotlib.figure import Figure

from experiments import jump
from figures import loss_curves, style

NAME = "jump"
SHADES = {"delayed": "#08306b", "newest": "#9a9a9a", "current": "#2f7fbc"}
MARKS = {"delayed": "o", "newest": "s", "current": "^"}
LINES = {"once": style.SOLID, "often": style.DASHED}


def around(record: dict[str, Any]) -> Figure:
    cells = {row["cell"]: row for row in record["metrics"]["cells"]}
    figure, (left, right) = style.new(1, 2, figsize=(style.DOUBLE, 2.3), width_ratios=(1, 1.25))
    lowest = 0.001  # percent
    for arm, how in (("delayed", "once"), ("newest", "often")):
        rows = [row for row in cells.values() if (row["arm"], row["jumps"]) == (arm, how)]
        rows = sorted([cells[arm], *rows], key=lambda row: row["log2_jump"])
        jumps = [row["log2_jump"] for row in rows]
        at = [jump.at(row, 0) for row in rows]
        pooled = style.on_log([100 * seen["saturated"][0] for seen in at], lowest)
        worst = style.on_log([100 * seen["worst"] for seen in at], lowest)
        look: dict[str, Any] = {"color": SHADES[arm], "marker": MARKS[arm], "linestyle": LINES[how]}
        left.plot(jumps, pooled, label=arm, **look)
        left.plot(jumps, worst, **{**look, "linestyle": ":"}, markerfacecolor="white")
    style.percent_axis(left, "y", lowest, every=2)
    left.set_xticks(range(0, 9, 2))
    style.power_of_two_axis(left.xaxis)
    left.set_xlabel("jump of the gradients")
    left.set_ylabel("dY that saturates, %")
    left.set_title("In the step of the jump")
    left.legend(frameon=False, fontsize=6.5, loc="lower right")
    places = np.arange(len(jump.AROUND))
    ends = []
    for name in ("current often 2^8", "delayed once 2^8", "delayed often 2^8", "newest often 2^8"):
        row = cells[name]
        kept = np.array([seen["left"] for seen in row["around"]])
        arm, how = row["arm"], row["jumps"]
        right.plot(
            places, kept[:, 0], color=SHADES[arm], linestyle=LINES[how], marker=MARKS[arm],
            markersize=3,
        )  # fmt: skip
        right.fill_between(
            places, kept[:, 1], kept[:, 2], color=SHADES[arm], alpha=0.2, linewidth=0
        )
        ends.append((kept[-1, 0], f"{arm}, {how}", SHADES[arm]))
    right.set_xticks(places, [f"{offset:+d}" if offset else "jump" for offset in jump.AROUND])
    right.axvline(4 - 0.5, color="black", linewidth=0.6, linestyle=":")  # steps are left out here
    right.set_xlabel("step, from the first jump")
    right.set_title(f"Weight gradient that is left, jumps of {style.power_of_two(8)}")
    right.set_ylim(-0.05, 1.15)
    figure.draw_without_rendering()
    style.label_lines(right, places[-1], ends, gap=8)
    return figure


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    return {
        "_around": around(record),
        "_gaps": loss_curves.claims(record, lambda arm: SHADES[arm.split()[0]]),
    }


def draw(path: Path, out: Path) -> list[Path]:
    """Draw both figures; the arguments, result and errors are those of `style.draw`."""
    return style.draw(NAME, figures, path, out)


def main() -> int:
    return style.command(NAME, __doc__ or "", draw, "results/full")


if __name__ == "__main__":
    sys.exit(main())
