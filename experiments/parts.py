"""What the parts of a model feed their GEMMs, and what formats lose of it.

A model is trained in BF16; then X, W and dY of its linear layers are taken on one batch. By part of
the model (attention, feed-forward, Mamba; into it and out of it) and tensor: the shape of the tensor
and, for each format, the share of non-zero values that become zero, and SQNR; all as defined in
experiments/outliers.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import fpemu
from experiments import learning, outliers, prediction, studies

FORMATS = ("fp16", "e4m3", "fp8_tensor_e4m3", "mxfp8_e4m3/rceil", "mxfp4/rceil", "nvfp4")
#: Linear layer of a GPT's block -> its part.
GPT_PARTS = {
    "qkv": "attention in", "proj": "attention out",
    "up": "feed-forward in", "down": "feed-forward out",
}  # fmt: skip
ENDS = {"into": "in", "qkv": "in", "out": "out"}


def part_of(layer: str, pattern: str | None) -> str:
    """The part that a linear layer belongs to.

    Parameters
    ----------
    layer : str
        Its name among the blocks.
    pattern : str or None
        That of a hybrid; None: a GPT.

    >>> part_of("2.down", None), part_of("0.into", "MFA"), part_of("2.out", "MFA")
    ('feed-forward out', 'Mamba in', 'attention out')
    """
    block, _, name = layer.partition(".")
    if pattern is None:
        return GPT_PARTS[name]
    return f"{studies.PARTS[pattern[int(block)]]} {ENDS[name]}"


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """Train, capture, cast; returns a row per linear layer and tensor."""
    found: list[dict[str, Any]] = []
    pattern = point["model"].get("pattern")

    def at_end(net: Any) -> None:
        for layer, tensors in prediction.capture(net, point).items():
            for name, x in sorted(tensors.items()):
                row: dict[str, Any] = {
                    "layer": layer,
                    "part": part_of(layer, pattern),
                    "tensor": name,
                }
                row |= zip(outliers.SHAPE, outliers.shape_of(x.cpu().numpy()), strict=True)
                for fmt in FORMATS:
                    stats = fpemu.stats(x, fmt)
                    row[f"zeroed {fmt}"] = stats.underflow / max(1, stats.size - stats.zeros)
                    row[f"db {fmt}"] = stats.sqnr_db
                found.append(row)

    run = learning.train({**point, "task": "gpt" if pattern is None else "hybrid"}, at_end)
    return {"held_out": run["held_out"], "tensors": found}


def table(
    points: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Means over layers and seeds, by model, part and tensor; kurtosis as median, crest as largest."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for p, m in zip(points, metrics, strict=True):
        name = "hybrid" if "pattern" in p["model"] else "GPT"
        for tensor in m["tensors"]:
            groups.setdefault((name, tensor["part"], tensor["tensor"]), []).append(tensor)
    rows = []
    for (name, part, kind), of in groups.items():
        row: dict[str, Any] = {"model": name, "part": part, "tensor": kind, "n": len(of)}
        row["kurtosis"] = statistics.median(r["kurtosis"] for r in of)
        row["crest"] = max(r["crest"] for r in of)
        row["top1pct"] = statistics.fmean(r["top1pct"] for r in of)
        for fmt in FORMATS:
            row[f"zeroed {fmt}"] = statistics.fmean(r[f"zeroed {fmt}"] for r in of)
            known = [r[f"db {fmt}"] for r in of if r[f"db {fmt}"] is not None]
            row[f"db {fmt}"] = statistics.median(known) if known else None
        rows.append(row)
    return rows
