"""The proxy of MX instability: a residual student imitates a teacher, its layer-norm weights in MX.

After "Characterization and Mitigation of Training Instabilities in Microscaling Formats" (arXiv
2506.20752): students and teachers are residual MLPs; the weights of a layer norm gather around 1,
so that a block shares one scale and many of them meet the element's largest code at once, where
they lose their last bits or saturate. Measured: spikes and divergences over seeds and learning
rates, with the layer-norm weights quantized and not. The arms are rows of `studies.PROXY_ARMS`.

A student of L layers, x + W2 gelu(W1 (norm(x) * g)) each, learns the teacher's outputs (plus a
little noise) on Gaussian inputs, by Adam at a constant rate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpemu
from experiments import studies

NOISE = 1e-3  # standard deviation of what is added to the teacher's outputs
BIN = 10
#: A spike: a loss this many times the lowest mean of ten steps before it, counted once until the
#: loss is below twice that mean again.
SPIKE = 10.0
#: Diverged: not finite, or at the end this many times the lowest mean.
DIVERGED = 100.0


class Quantized(torch.autograd.Function):
    """A layer norm's weights in a format; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: str) -> Tensor:
        return fpemu.quantize(x, fmt)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Layer(nn.Module):
    def __init__(self, width: int, norm_format: str | None) -> None:
        super().__init__()
        self.norm_format = norm_format
        self.gain = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain
        if self.norm_format is not None:
            gain = Quantized.apply(gain, self.norm_format)
        normed = F.layer_norm(x, gain.shape) * gain
        return x + self.down(F.gelu(self.up(normed)))


def mlp(width: int, layers: int, generator: torch.Generator, fmt: str | None = None) -> Any:
    """A residual MLP with matrices N(0, 1 / inputs)."""
    net = nn.Sequential(*(Layer(width, fmt) for _ in range(layers)))
    for weight in net.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
    return net


def spikes_in(losses: list[float]) -> list[int]:
    """Steps where a spike begins.

    >>> spikes_in([1.0] * 20 + [50.0] * 3 + [1.0] * 20 + [15.0])
    [20, 43]
    """
    found: list[int] = []
    lowest, above = math.inf, False
    for step, loss in enumerate(losses):
        if loss > SPIKE * lowest and not above:
            found.append(step)
            above = True
        elif loss < 2 * lowest:
            above = False
        if step + 1 >= BIN:
            lowest = min(lowest, sum(losses[step + 1 - BIN : step + 1]) / BIN)
    return found


def train(point: dict[str, Any]) -> dict[str, Any]:
    """Train one student; returns its metrics."""
    width, layers = point["model"]["width"], point["model"]["layers"]
    recipe, norm_format = studies.PROXY_ARMS[point["arm"]]
    device = point["device"]
    teacher = mlp(width, layers, torch.Generator().manual_seed(point["seed"] + (1 << 33)))
    student = mlp(width, layers, torch.Generator().manual_seed(point["seed"]), norm_format)
    teacher.to(device), student.to(device)
    fpemu.nn.convert(student, recipe, keep=(), seed=point["rounding"], verbose=False)
    adam = torch.optim.Adam(student.parameters(), lr=point["rate"])
    data = torch.Generator().manual_seed(point["seed"] + (1 << 32))
    losses: list[float] = []
    for _ in range(point["steps"]):
        x = torch.randn(point["batch"], width, generator=data)
        noise = NOISE * torch.randn(point["batch"], width, generator=data)
        with torch.no_grad():
            y = teacher(x.to(device)) + noise.to(device)
        loss = F.mse_loss(student(x.to(device)), y)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
    finite = [v for v in losses if math.isfinite(v)]
    means = [sum(finite[i : i + BIN]) / BIN for i in range(0, len(finite) - BIN + 1, BIN)]
    diverged = len(finite) < len(losses) or means[-1] > DIVERGED * min(means)
    gains = torch.cat([layer.gain.detach().cpu() for layer in student])
    clamped = None
    if norm_format is not None:
        clamped = float(fpemu.stats(gains, norm_format).saturated) / gains.numel()
    return {
        "final": None if diverged else means[-1],
        "diverged": diverged,
        "diverged_at": len(losses) - 1 if len(finite) < len(losses) else None,
        "spikes": spikes_in(finite),
        "train": means,
        "gains_saturated": clamped,
    }
