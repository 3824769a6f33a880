"""Draw the figure of a record of experiments/recipes.py: claims, seeds, intervals, verdicts.

    python figures/recipes.py                    # results/recipes.json -> figures/recipes.*

Left: the share of non-zero dY of the BF16 run that an unscaled format flushes to zero. Middle and
right: the difference in held-out loss of each claim, a point per seed, and the interval of the
mean (all intervals together hold with 95 %). The grey band is the margin within which recipes
count as equal; a hatch says "not resolved".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import style

#: What a claim says, as words between arm and reference.
WORDS = {"worse": ">", "better": "<", "equal": "="}


def verdicts(record: dict[str, Any]) -> Figure:
    metrics = record["metrics"]
    large = [c for c in metrics["claims"] if c["hypothesis"] == "underflow"]
    small = [c for c in metrics["claims"] if c["hypothesis"] != "underflow"]
    figure, (left, middle, right) = style.new(
        1, 3, figsize=(style.DOUBLE, 2.0), width_ratios=(0.8, 1.2, 1.5)
    )
    flushed(left, metrics["flushed"])
    differences(middle, large, metrics["losses"])
    differences(right, small, metrics["losses"], record["point"]["margin"])
    middle.set_title("Underflow and what recovers it")
    right.set_title("Placement, MXFP8, FP4")
    for axes in (middle, right):
        axes.set_xlabel("held-out loss difference, nats/byte")
    return figure


def flushed(axes: Axes, shares: Sequence[dict[str, Any]]) -> None:
    """A bar per format."""
    for row, entry in enumerate(shares):
        share = 100 * entry["share"]
        axes.barh(row, share, height=0.6, color=style.colour(entry["format"]))
        inside = share > 60
        axes.annotate(
            f"{share:.3g} %", (share, row), xytext=(-3 if inside else 3, 0),
            textcoords="offset points", va="center", ha="right" if inside else "left",
            color="white" if inside and entry["format"] != "e5m2" else "black", fontsize=7,
        )  # fmt: skip
    axes.set_yticks(range(len(shares)), [entry["format"] for entry in shares])
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)
    axes.set_title("Unscaled dY flushed")
    axes.set_xlabel("% of non-zero values")


def differences(
    axes: Axes,
    claims: Sequence[dict[str, Any]],
    losses: dict[str, list[float]],
    margin: float | None = None,
) -> None:
    """A line per claim: seeds, mean and interval."""
    if margin is not None:
        axes.axvspan(-margin, margin, color="#ececec", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=0.6)
    labels = []
    for row, claim in enumerate(claims):
        arm, reference = claim["arm"], claim["reference"]
        shade = style.colour(arm.replace("nvfp4 sr", "nvfp4/sr"))
        seeds = [a - b for a, b in zip(losses[arm], losses[reference], strict=True)]
        axes.barh(
            row, claim["high"] - claim["low"], left=claim["low"], height=0.34, color="white",
            edgecolor=shade, linewidth=0.8,
            hatch=style.NOT_RESOLVED if claim["verdict"] == "not resolved" else None,
        )  # fmt: skip
        axes.plot([claim["mean"]] * 2, [row - 0.3, row + 0.3], color=shade, linewidth=1.8)
        axes.plot(seeds, [row] * len(seeds), "o", color=shade, markersize=2.4)
        side = 0 if claim["mean"] > 0 else 1  # where there is room
        axes.annotate(
            claim["verdict"], (side, row), xycoords=("axes fraction", "data"),
            xytext=(3 - 6 * side, 0), textcoords="offset points", ha=("left", "right")[side],
            va="center", fontsize=6.5, style="italic",
        )  # fmt: skip
        labels.append(f"{arm}\n{WORDS[claim['says']]} {reference}")
    axes.set_yticks(range(len(claims)), labels, fontsize=6.5)
    axes.set_ylim(len(claims) - 0.5, -0.75)
    axes.grid(axis="y", visible=False)
    axes.use_sticky_edges = False  # bars keep their distance from the frame
    axes.margins(x=0.08)
    axes.autoscale(axis="x")


def draw(path: Path, out: Path) -> list[Path]:
    """Draw the figure; the arguments, result and errors are those of `style.draw`."""
    return style.draw("recipes", lambda record: {"": verdicts(record)}, path, out)


def main() -> int:
    return style.command("recipes", __doc__ or "", draw)


if __name__ == "__main__":
    sys.exit(main())
