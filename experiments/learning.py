"""One training run: a point of plain values in, what it learned out.

The text is half prose, half code: the Python language reference and modules of the standard
library, which come with every Python. The last part of each is held out, 32 kB of each kind, and
every run is judged on the same windows of it. Schedules are warm-up, a constant rate, and a linear
decay over the last fifth. A seed has three streams of its own: initial weights, data order and
rounding.

A point is a dict. Keys of a training run::

    task        "gpt" or "hybrid"            model       sizes, as keyword arguments
    only        not always there: letter of the hybrid's pattern whose layers alone are quantized
    arm         name of `studies.ARMS`       scaler      "none" or "dynamic"
    rate, steps, batch, warmup               seed, rounding   integers
    held_out    bytes of each kind of text that the run is judged on
    perturb     "none" or "ulp": one initial weight is moved to its float32 neighbour
    switch      "none", "forward", "backward" or "both": those GEMMs go on in BF16 at the decay
    sums        "library", or how an E4M3 GEMM adds: "float32", "fast", "promoted"
    device      "cpu" or "cuda"
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from experiments import model  # before torch: sets how its threads wait

# isort: split

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpemu
from experiments import hybrid, studies
from fpemu.gemm import matmul
from fpemu.recipes import RECIPES, Recipe

NOTHING = math.log(256)  # the loss of knowing nothing, nats per byte
BIN = 10  # steps: curves are means over so many
KIND_BYTES = 1 << 15  # of each kind of text are held out
CHECKPOINTS = 10
SUBSET = 8  # checkpoints read every so many-th held-out window
DECAY = 0.2  # last share of the steps, in which the rate falls linearly
FINAL_RATE = 0.01  # of the peak rate, where it ends
#: A spike: a training loss this many standard deviations above the mean of the steps before it.
SPIKE, SPIKE_WINDOW = 7.0, 100
GROWTH_INTERVAL = 100  # steps without overflow after which the dynamic loss scale doubles
FIRST_SCALE = 2.0**16

#: Modules whose source is the code half, in this order; the last one is held out.
CODE = (
    "argparse", "ast", "configparser", "contextlib", "dataclasses", "datetime", "difflib", "enum",
    "functools", "inspect", "ipaddress", "mailbox", "optparse", "shutil", "subprocess", "statistics",
)  # fmt: skip


# Text --------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def texts() -> tuple[Tensor, dict[str, Tensor], str]:
    """Training bytes, held-out bytes by kind ("prose", "code"), and the SHA-256 of all of them.

    Raises
    ------
    RuntimeError
        Where this Python comes without the text.
    """
    prose = model.corpus()
    library = Path(os.__file__).parent
    try:
        sources = [(library / f"{name}.py").read_bytes() for name in CODE]
    except OSError as error:
        raise RuntimeError(
            f"texts: this Python comes without the source of its library ({error}), the code to"
            " train on. Use another Python."
        ) from error
    code = torch.frombuffer(bytearray(b"\n".join(sources[:-1])), dtype=torch.uint8)
    held_code = torch.frombuffer(bytearray(sources[-1]), dtype=torch.uint8)
    size = min(len(prose.train), len(code))
    train = torch.cat((prose.train[:size], code[:size]))
    held = {"prose": prose.held_out[: KIND_BYTES + 1], "code": held_code[: KIND_BYTES + 1]}
    whole = torch.cat((train, *held.values()))
    return train, held, hashlib.sha256(whole.numpy().tobytes()).hexdigest()


@torch.no_grad()
def judge(net: Any, context: int, size: int, device: str, every: int = 1) -> dict[str, Any]:
    """Loss (nats per byte) and share of next bytes guessed right, on `size` bytes of each kind.

    Windows do not overlap; every `every`-th is read. ``loss`` is the mean over kinds.
    """
    net.eval()
    found: dict[str, Any] = {"loss_by_kind": {}, "accuracy": {}}
    for kind, data in texts()[1].items():
        starts = torch.arange(0, size - context + 1, context * every)
        loss = right = 0.0
        for part in starts.split(4096 // context):
            inputs, targets = (t.to(device) for t in model.windows(data, part, context))
            logits = net(inputs).float().flatten(0, 1)
            loss += float(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
            right += int((logits.argmax(-1) == targets.flatten()).sum())
        count = len(starts) * context
        found["loss_by_kind"][kind] = loss / count
        found["accuracy"][kind] = right / count
    found["loss"] = statistics.fmean(found["loss_by_kind"].values())
    net.train()
    return found


# Recipes in a model ------------------------------------------------------------------------------


def switched(recipe: Recipe, which: str) -> Recipe:
    """A recipe whose forward GEMM, backward GEMMs or all of them are BF16's."""
    bf16 = RECIPES["bf16"]
    if which != "backward":
        recipe = replace(recipe, fprop=bf16.fprop)
    if which != "forward":
        recipe = replace(recipe, dgrad=bf16.dgrad, wgrad=bf16.wgrad)
    return replace(recipe, name=f"{recipe.name}, {which} bf16")


#: How `Sums` adds -> the recipe of `fpemu.gemm`, a model of cuBLASLt on an H100.
SUMS = {"fast": "cublaslt.fp8_fast", "promoted": "cublaslt.fp8_slow"}


class Sums(torch.autograd.Function):
    """``x @ w.T`` whose operands, in all three GEMMs, are E4M3 by tensor; `how` adds products.

    float32: torch. fast: one chain of Hopper blocks. promoted: such chains of 128 of K, added in
    float32.
    """

    @staticmethod
    def multiply(a: Any, b: Any, how: str) -> Tensor:
        if how == "float32":
            return a.decode().float() @ b.decode().float()
        return matmul(a, b, unit="hopper.wgmma.e4m3", recipe=SUMS[how])

    @staticmethod
    def codes(x: Tensor) -> Any:
        return fpemu.encode(x, "fp8_tensor_e4m3")

    @staticmethod
    def transposed(x: Any) -> Any:
        return replace(x, codes=x.codes.t())

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: str) -> Tensor:
        flat, codes_w = Sums.codes(x.reshape(-1, x.shape[-1])), Sums.codes(w)
        ctx.x, ctx.w, ctx.how = flat, codes_w, how
        return Sums.multiply(flat, Sums.transposed(codes_w), how).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        g = Sums.codes(dy.reshape(-1, dy.shape[-1]))
        dx = Sums.multiply(g, ctx.w, ctx.how).view(*dy.shape[:-1], -1)
        return dx, Sums.multiply(Sums.transposed(g), ctx.x, ctx.how), None


class SumsLinear(nn.Linear):
    """A linear layer by `Sums`."""

    how = "float32"

    def forward(self, x: Tensor) -> Tensor:
        return Sums.apply(x, self.weight, self.how)


def build(point: dict[str, Any]) -> nn.Module:
    """The model of a point, before any step."""
    initial = torch.Generator().manual_seed(point["seed"])
    net: Any
    if point["task"] == "hybrid":
        net = hybrid.Hybrid(hybrid.Shape(**point["model"]), initial)
    else:
        net = model.GPT(model.Shape(**point["model"]), initial)
    if point["perturb"] == "ulp":
        with torch.no_grad():
            first = next(m for m in net.blocks.modules() if isinstance(m, nn.Linear)).weight[0, :1]
            first.copy_(torch.nextafter(first, torch.full_like(first, math.inf)))
    net.to(point["device"])
    if point["sums"] == "library":
        keep = None
        if "only" in point:
            letters = enumerate(point["model"]["pattern"])
            keep = [f"{i}.*" for i, letter in letters if letter != point["only"]]
        fpemu.nn.convert(
            net.blocks, studies.ARMS[point["arm"]], keep=keep, seed=point["rounding"], verbose=False
        )
    else:
        for layer in net.blocks.modules():
            if type(layer) is nn.Linear:
                layer.__class__, layer.how = SumsLinear, point["sums"]
    return net


# Training ----------------------------------------------------------------------------------------


def decay_start(steps: int) -> int:
    """The first step of the decay.

    >>> decay_start(480)
    384
    """
    return steps - round(DECAY * steps)


def rate_at(step: int, peak: float, steps: int, warmup: int) -> float:
    """Linear warm-up, constant, and a linear decay to ``FINAL_RATE * peak`` at the last step.

    >>> [round(rate_at(s, 1.0, 100, 10), 3) for s in (0, 9, 50, 79, 80, 99)]
    [0.1, 1.0, 1.0, 1.0, 0.951, 0.01]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    left = (steps - 1 - step) / (steps - decay_start(steps))
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * min(1.0, left))


def spikes_in(losses: list[float]) -> list[int]:
    """Steps whose loss is more than `SPIKE` deviations above the mean of the `SPIKE_WINDOW` before.

    >>> quiet = [1.0, 1.1] * 60
    >>> spikes_in([*quiet, 9.0, *quiet])
    [120]
    """
    found, recent = [], deque(losses[:SPIKE_WINDOW], maxlen=SPIKE_WINDOW)
    for step in range(SPIKE_WINDOW, len(losses)):
        limit = statistics.fmean(recent) + SPIKE * statistics.pstdev(recent)
        if losses[step] > limit:
            found.append(step)
        recent.append(losses[step])
    return found


def binned(values: list[float], size: int = BIN) -> list[float]:
    """Means of `size` neighbours; the last bin may be short."""
    return [round(statistics.fmean(values[i : i + size]), 5) for i in range(0, len(values), size)]


def train(point: dict[str, Any], at_end: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Train as a point says; returns its metrics, the same ones every time. `at_end` is shown the
    trained model.

    A run diverges when a training loss is not finite, where it stops, or when the held-out loss at
    the end is above that of knowing nothing; the loss is then None.
    """
    device, steps, size = point["device"], point["steps"], point["held_out"]
    context = point["model"]["context"]
    net: Any = build(point)
    plan = model.Training(steps=steps, batch=point["batch"], rate=point["rate"])
    adamw = model.optimizer(net, plan)
    scaler = torch.amp.GradScaler(
        device, init_scale=FIRST_SCALE, growth_interval=GROWTH_INTERVAL,
        enabled=point["scaler"] == "dynamic",
    )  # fmt: skip
    order = torch.Generator().manual_seed(point["seed"] + (1 << 32))
    data, _, digest = texts()
    losses: list[float] = []
    norms: list[float] = []
    scales: list[float] = []
    checkpoints: list[list[float]] = []
    every = max(1, steps // CHECKPOINTS)
    for step in range(steps):
        if step == decay_start(steps) and point["switch"] != "none":
            recipe = switched(studies.recipe(point["arm"]), point["switch"])
            fpemu.nn.convert(net.blocks, recipe, seed=point["rounding"] + 1, verbose=False)
        starts = torch.randint(len(data) - context, (point["batch"],), generator=order)
        inputs, targets = (t.to(device) for t in model.windows(data, starts, context))
        loss = model.next_byte_loss(net, inputs, targets)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
        scaler.scale(loss).backward()
        scaler.unscale_(adamw)
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), plan.clip)))
        for group in adamw.param_groups:
            group["lr"] = rate_at(step, point["rate"], steps, point["warmup"])
        scaler.step(adamw)
        scaler.update()
        scales.append(scaler.get_scale())
        adamw.zero_grad(set_to_none=True)
        if (step + 1) % every == 0 and step + 1 < steps:
            checkpoints.append([step + 1, judge(net, context, size, device, SUBSET)["loss"]])
    if at_end is not None:
        at_end(net)
    final = judge(net, context, size, device)
    exact = None
    if point["sums"] == "library":
        fpemu.nn.convert(net.blocks, "fp32", verbose=False)
        exact = judge(net, context, size, device)["loss"]
    whole = len(losses) == steps and math.isfinite(losses[-1])
    diverged = not (whole and final["loss"] <= NOTHING)
    finite = losses if whole else losses[:-1]
    return {
        "held_out": None if diverged else final["loss"],
        "held_out_fp32": exact,  # the same weights in a float32 forward pass
        "loss_by_kind": final["loss_by_kind"],
        "accuracy": final["accuracy"],
        "diverged": diverged,
        "diverged_at": None if whole else len(losses) - 1,
        "spikes": spikes_in(finite),
        "skipped": sum(b < a for a, b in zip([FIRST_SCALE, *scales], scales, strict=False))
        if scaler.is_enabled() else 0,
        "loss_scale": binned_last(scales) if scaler.is_enabled() else [],
        "train": binned(finite),
        "gradient_norm": binned([n for n in norms if math.isfinite(n)]),
        "checkpoints": checkpoints,
        "tokens": len(losses) * point["batch"] * context,
        "parameters": sum(p.numel() for p in net.parameters()),
        "text": digest,
    }  # fmt: skip


def binned_last(values: list[float], size: int = BIN) -> list[float]:
    """The last value of every `size`."""
    return values[size - 1 :: size]


def compute(point: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a point, whatever its task."""
    if point["task"] == "proxy":
        from experiments import proxy

        return proxy.train(point)
    if point["task"] == "qsnr":
        from experiments import prediction

        return prediction.measure(point)
    if point["task"] == "parts":
        from experiments import parts

        return parts.measure(point)
    return train(point)
