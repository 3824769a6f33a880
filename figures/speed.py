"""Draw the figure of a record of experiments/speed.py: time by phase, and bytes of the state.

    python figures/speed.py                    # results/full/speed.json -> figures/full/speed.*

Left: a training step emulated on a CPU, by phase, in float32 steps, and what it takes of memory at
its peak, where that was measured. Right: bytes a parameter of the
training state of Llama 3 8B by role.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import style

PHASES = {"quantize": "#1b7f3b", "gemm": "#2f7fbc", "rest": "#d0d0d0"}
ROLES = {"weights": "#1b7f3b", "gradients": "#f9a04b", "masters": "#9a9a9a", "moments": "#dedede"}


def bars(
    axes: Axes,
    names: list[str],
    parts: list[dict[str, float]],
    shades: dict[str, str],
    notes: list[str],
) -> None:
    """Stacked horizontal bars, the whole and a note at their ends, names of the parts above the first."""
    for row, (values, note) in enumerate(zip(parts, notes, strict=True)):
        left = 0.0
        for part, shade in shades.items():
            width = values.get(part, 0.0)
            axes.barh(
                row, width, left=left, height=0.66, color=shade, edgecolor="white", linewidth=0.4
            )
            left += width
        axes.annotate(
            f"{left:.2f}{note}", (left, row), xytext=(3, 0), textcoords="offset points", va="center",
            fontsize=6.5,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=6.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    handles = [axes.barh(0, 0, color=shade) for shade in shades.values()]
    axes.legend(
        handles, list(shades), loc="lower left", bbox_to_anchor=(0, 1), ncols=len(shades),
        fontsize=6.5, frameon=False, handlelength=1, handleheight=0.8, columnspacing=1,
        borderaxespad=0.1,
    )  # fmt: skip
    axes.margins(x=0.3 if any(notes) else 0.14)


def cost(record: dict[str, Any]) -> Figure:
    metrics = record["metrics"]
    steps, states = metrics["steps"], metrics["states"]
    figure, (left, right) = style.new(1, 2, figsize=(style.DOUBLE, 2.9))
    reference = next(row["seconds"] for row in steps if row["recipe"] == "torch")
    parts = [
        {phase: row[phase] * row["ratio"] / row["seconds"] for phase in PHASES} for row in steps
    ]
    names = ["torch float32" if row["recipe"] == "torch" else row["recipe"] for row in steps]
    peaks = [f", {row['peak_mb']:.0f} MB" if "peak_mb" in row else "" for row in steps]
    bars(left, names, parts, PHASES, peaks)
    left.set_xlabel(f"step, in float32 steps ({1e3 * reference:.0f} ms on this CPU)")
    large = [row for row in states if row["model"] != "GPT"]
    each = [{role: row[role] / row["parameters"] for role in ROLES} for row in large]
    bars(right, [row["layout"] for row in large], each, ROLES, [""] * len(large))
    right.set_xlabel(f"bytes a parameter, {large[0]['model']}")
    return figure


def draw(path: Path, out: Path) -> list[Path]:
    """Draw the figure; the arguments, result and errors are those of `style.draw`."""
    return style.draw("speed", lambda record: {"": cost(record)}, path, out)


def main() -> int:
    return style.command("speed", __doc__ or "", draw, "results/full")


if __name__ == "__main__":
    sys.exit(main())
