"""A small hybrid of Mamba-2, attention and feed-forward layers over bytes.

Mamba-2's recurrence, per head, with state H (state x head size) and a scalar decay::

    H[t] = exp(dt[t] a) H[t-1] + dt[t] B[t] x[t]^T,      y[t] = C[t]^T H[t]

is computed in chunks by matrix products ("state space duality", arXiv 2405.21060): within a chunk
as masked attention, between chunks through the state. `recurrence` is the same step by step.

The matrices `into` and `out` of a Mamba layer, its two linear layers, are what a recipe quantizes;
convolution, decay and scan stay float32. No positions are added: the order is in the recurrence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.model import VOCABULARY, RMSNorm


@dataclass(frozen=True)
class Shape:
    """Sizes; `pattern` has M for Mamba-2, A for attention, F for feed-forward.

    The width of `into`, 2 * expand * width + 2 * state + heads, should be a multiple of 32.
    """

    width: int = 128
    pattern: str = "MFMFAF"
    heads: int = 4  # of attention
    expand: int = 2
    head_size: int = 16  # of Mamba-2
    state: int = 24
    convolution: int = 4
    chunk: int = 32
    context: int = 128


# The scan ----------------------------------------------------------------------------------------


def recurrence(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The recurrence one step after the other, from a state of zeros.

    Parameters
    ----------
    x : Tensor (batch, time, heads, size)
        Already times dt.
    decay : Tensor (batch, time, heads)
        dt * a, the logarithm of what is kept of the state.
    b, c : Tensor (batch, time, state)
        One group: all heads share them.
    """
    state = x.new_zeros(x.shape[0], x.shape[2], b.shape[-1], x.shape[3])
    steps = []
    for t in range(x.shape[1]):
        state = decay[:, t].exp()[..., None, None] * state
        state = state + torch.einsum("bn,bhp->bhnp", b[:, t], x[:, t])
        steps.append(torch.einsum("bn,bhnp->bhp", c[:, t], state))
    return torch.stack(steps, dim=1)


def chunked(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """The same by matrix products over chunks of `chunk` steps, which must divide the time."""
    batch, time, heads, size = x.shape
    parts = time // chunk
    x = x.view(batch, parts, chunk, heads, size).transpose(2, 3)  # (batch, part, head, step, size)
    b, c = (m.view(batch, parts, 1, chunk, -1) for m in (b, c))
    log = (
        decay.view(batch, parts, chunk, heads).transpose(2, 3).cumsum(-1)
    )  # from the chunk's start
    # Within a chunk: step i reads step j <= i, decayed in between.
    between = log[..., :, None] - log[..., None, :]
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    within = (c @ b.mT) * between.masked_fill(future, -math.inf).exp()
    y = within @ x
    # Between chunks: what each adds to the state by its end, and what each reads of its start.
    added = (b * (log[..., -1:] - log).exp()[..., None]).mT @ x
    read = c * log.exp()[..., None]
    state = torch.zeros_like(added[:, 0])
    carried = []
    for part in range(parts):
        carried.append(read[:, part] @ state)
        state = log[:, part, :, -1].exp()[..., None, None] * state + added[:, part]
    y = y + torch.stack(carried, dim=1)
    return y.transpose(2, 3).reshape(batch, time, heads, size)


# Layers ------------------------------------------------------------------------------------------


class Mamba(nn.Module):
    """Mamba-2: projection, short convolution, scan, gate, norm, projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.inner = shape.expand * shape.width
        self.heads = self.inner // shape.head_size
        self.mixed = self.inner + 2 * shape.state  # x, B and C go through the convolution
        self.before = RMSNorm(shape.width)
        self.into = nn.Linear(shape.width, self.inner + self.mixed + self.heads, bias=False)
        self.convolution = nn.Conv1d(
            self.mixed, self.mixed, shape.convolution, groups=self.mixed, bias=False
        )
        # Step sizes from 0.001 to 0.1 and decays from 1 to 16, as Mamba-2 starts, but evenly spaced.
        steps = torch.logspace(-3, -1, self.heads)
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus's inverse
        self.log_a = nn.Parameter(torch.linspace(1, 16, self.heads).log())
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm = RMSNorm(self.inner)
        self.out = nn.Linear(self.inner, shape.width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        batch, time, _ = u.shape
        n = self.shape.state
        z, mixed, dt = self.into(self.before(u)).split((self.inner, self.mixed, self.heads), dim=-1)
        mixed = F.pad(mixed.mT, (self.shape.convolution - 1, 0))  # sees the past only
        mixed = F.silu(self.convolution(mixed)).mT
        x, b, c = mixed.split((self.inner, n, n), dim=-1)
        x = x.reshape(batch, time, self.heads, -1)
        dt = F.softplus(dt + self.dt_bias)
        y = chunked(
            x * dt[..., None], -dt * self.log_a.exp(), b.contiguous(), c.contiguous(),
            min(self.shape.chunk, time),
        )  # fmt: skip
        y = (y + self.skip[:, None] * x).reshape(batch, time, self.inner)
        return self.out(self.norm(y * F.silu(z)))


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before = RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        batch, time, d = u.shape
        heads = self.qkv(self.before(u)).view(batch, time, 3, self.heads, d // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, d))


class FeedForward(nn.Module):
    """Squared ReLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before = RMSNorm(shape.width)
        self.into = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.out = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        return self.out(F.relu(self.into(self.before(u))).square())


LAYERS = {"M": Mamba, "A": Attention, "F": FeedForward}


class Hybrid(nn.Module):
    """Logits of the next byte, for every position; each layer is added to the residual stream.

    Parameters
    ----------
    shape : Shape
    generator : torch.Generator
        Source of the initial matrices: N(0, 0.02), those that write to the residual stream smaller
        by the root of their number; convolutions uniform within 1 / root of their length.
    """

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(LAYERS[letter](shape) for letter in shape.pattern)
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                std = 0.02 / math.sqrt(len(shape.pattern)) if name.endswith("out.weight") else 0.02
                nn.init.normal_(weight, std=std, generator=generator)
            elif weight.ndim == 3:
                bound = 1 / math.sqrt(weight.shape[-1])
                nn.init.uniform_(weight, -bound, bound, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))
