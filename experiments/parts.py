"""What the parts of a model feed their GEMMs, and what formats lose of it.

A model is trained in BF16; then X, W and dY of its linear layers are taken on one batch. By part of
the model (attention, feed-forward, Mamba; into it and out of it) and tensor: the shape of the tensor
and, for each format, the share of non-zero values that become zero, and SQNR; all as defined in
experiments/outliers.py. And by layer: the error of the weight gradient when a recipe casts the
operands of that GEMM alone; of the GPT, also whether the last block has more of it than the first.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from typing import Any

from torch import Tensor

import fpemu
from experiments import learning, outliers, prediction, studies, verdicts
from fpemu.nn import layer as layers
from fpemu.nn import streams

FORMATS = ("fp16", "e4m3", "fp8_tensor_e4m3", "mxfp8_e4m3/rceil", "mxfp4/rceil", "nvfp4")
#: Recipes whose weight gradients are compared with exact ones, no layer kept in BF16.
CASTS = ("mxfp8", "mxfp4_sr_rht", "nvfp4_naive", "nvfp4")
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


def wgrad_noise(core: layers.Core, tensors: dict[str, Tensor], seed: int) -> float:
    """``sum (g' - g)^2 / sum g^2`` of a weight gradient whose operands are cast; products in float64.

    A rotation of both operands along tokens leaves their product as it is.
    """
    ticket = streams.ticket(seed, core.index, 0)
    dy, x = (
        layers.cast(core, f"wgrad.{name}", tensors[name], ticket, note=False).double()
        for name in ("dy", "x")
    )
    exact = tensors["dy"].double().T @ tensors["x"].double()
    return float((dy.T @ x - exact).square().sum() / exact.square().sum())


def gradients(net: Any, captured: dict[str, dict[str, Tensor]], seed: int) -> list[dict[str, Any]]:
    """A row per recipe and linear layer: `wgrad_noise`."""
    net, rows = copy.deepcopy(net), []  # the run goes on with its own layers
    for arm in CASTS:
        fpemu.nn.convert(net.blocks, studies.recipe(arm), keep=(), seed=seed, verbose=False)
        rows += [
            {"arm": arm, "layer": name, "noise": wgrad_noise(linear.core, captured[name], seed)}
            for name, linear in prediction.linears(net).items()
        ]
    return rows


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """Train, capture, cast; returns rows per layer and tensor, and per recipe and layer."""
    found: list[dict[str, Any]] = []
    noise: list[dict[str, Any]] = []
    pattern = point["model"].get("pattern")

    def at_end(net: Any) -> None:
        captured = prediction.capture(net, point)
        noise.extend(gradients(net, captured, point["rounding"]))
        for layer, tensors in captured.items():
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
    return {"held_out": run["held_out"], "tensors": found, "wgrad": noise}


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


def depth(
    points: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Of the GPT, by recipe: `wgrad_noise` of each block, mean over its layers and over seeds.

    And the last block's noise over the first's: geometric mean over seeds, with Student's interval
    of its logarithm.
    """
    rows = []
    for arm in CASTS:
        seeds: list[list[float]] = []
        for p, m in zip(points, metrics, strict=True):
            if "pattern" in p["model"]:
                continue
            blocks: dict[int, list[float]] = {}
            for row in m["wgrad"]:
                if row["arm"] == arm:
                    blocks.setdefault(int(row["layer"].split(".")[0]), []).append(row["noise"])
            seeds.append([statistics.fmean(blocks[i]) for i in sorted(blocks)])
        ends = verdicts.interval([math.log(noise[-1] / noise[0]) for noise in seeds])
        mean, low, high = (math.exp(end) for end in ends)
        rows.append({
            "arm": arm, "blocks": [statistics.fmean(noise) for noise in zip(*seeds, strict=True)],
            "last_over_first": {"mean": mean, "low": low, "high": high},
        })  # fmt: skip
    return rows
