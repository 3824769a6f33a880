"""A ranking of recipes made before any of them trains: by the noise that casting adds to each GEMM.

A GPT is trained in BF16 on a tuning seed; then the tensors of its linear layers are cast as each
recipe would. The noise of a GEMM, relative to its result, is about the sum of the operands' noise
shares, ``sum (q - x)^2 / sum x^2``; a recipe's score is the mean over layers and GEMMs, in dB.
Rotated operands are compared with the rotated tensor. Delayed scaling counts as current scaling.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

import fpemu
from experiments import learning, model, studies
from fpemu.nn import layer as layers
from fpemu.nn import streams
from fpemu.recipes import GEMMS, OPERANDS


def noise(core: layers.Core, name: str, x: Tensor, seed: int) -> float:
    """Noise share of one operand of a layer."""
    step = core.plan.steps[name]
    q = layers.cast(core, name, x, streams.ticket(seed, core.index, 0), note=False)
    if step.transform is not None:
        turn = step.transform
        x = fpemu.hadamard(x, size=turn.size, signs=turn.signs, axis=OPERANDS[name])
    x, q = x.double(), q.double()
    return float((q - x).square().sum() / x.square().sum())


def scores(net: Any, captured: dict[str, dict[str, Tensor]], seed: int) -> dict[str, Any]:
    """Per recipe of the study: the score and, per operand, the mean noise share over layers, dB."""
    found = {}
    for arm in studies.RECIPE_ARMS:
        fpemu.nn.convert(
            net.blocks, studies.recipe(arm).without("delayed"), seed=seed, verbose=False
        )
        shares: dict[str, list[float]] = {name: [] for name in OPERANDS}
        for name, linear in linears(net).items():
            for operand in OPERANDS:
                x = captured[name][operand.split(".")[1]]
                shares[operand].append(noise(linear.core, operand, x, seed))
        means = {name: statistics.fmean(values) for name, values in shares.items()}
        gemms = [sum(means[f"{gemm}.{tensor}"] for tensor in GEMMS[gemm]) for gemm in GEMMS]
        found[arm] = {
            "score_db": decibel(statistics.fmean(gemms)),
            "operands_db": {name: decibel(share) for name, share in means.items()},
        }
    return found


def decibel(share: float) -> float | None:
    """Signal to noise; None where there is no noise."""
    return None if share == 0 else -10 * math.log10(share)


def linears(net: Any) -> dict[str, Any]:
    return {n: m for n, m in net.blocks.named_modules() if isinstance(m, nn.Linear)}


def capture(net: Any, point: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """X, W and dY of every linear layer of the blocks, on one batch of training text."""
    found: dict[str, dict[str, Tensor]] = {}
    handles = []
    for name, linear in linears(net).items():
        found[name] = {"w": linear.weight.detach()}

        def forward(_: Any, inputs: Any, output: Tensor, name: str = name) -> None:
            found[name]["x"] = inputs[0].detach().flatten(0, -2)
            output.register_hook(
                lambda g, name=name: found[name].update(dy=g.detach().flatten(0, -2))
            )

        handles.append(linear.register_forward_hook(forward))
    data, context = learning.texts()[0], point["model"]["context"]
    starts = torch.arange(point["batch"]) * (len(data) // (point["batch"] + 1))
    inputs, targets = (t.to(point["device"]) for t in model.windows(data, starts, context))
    model.next_byte_loss(net, inputs, targets).backward()
    for handle in handles:
        handle.remove()
    return found


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """Train, capture, cast; returns the scores by arm."""
    found: dict[str, Any] = {}

    def at_end(net: Any) -> None:
        found.update(scores(net, capture(net, point), point["rounding"]))

    learning.train({**point, "task": "gpt"}, at_end)
    return {"arms": found}
