"""A small GPT over bytes, and real text to train it on.

The model is a current decoder in plain PyTorch: learned positions, RMSNorm before each half,
causal attention, squared-ReLU feed-forward, no biases, AdamW with warm-up and a cosine. It reads
bytes, so it needs no tokenizer; it trains on the Python language reference, which ships with every
Python (`pydoc_data.topics`, about 466 kB), so it needs no download.

Everything is float32: these runs are the reference whose tensors the experiments then cast.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT. Multiples of 128, so that no format's blocks are cut short."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 128


@dataclass(frozen=True)
class Training:
    """How it is trained.

    Batches are ``batch`` windows of ``context`` bytes; the loss is their mean, so the size of every
    activation gradient goes with 1 / (batch * context).
    """

    steps: int = 300
    batch: int = 8
    rate: float = 1e-3
    warmup: int = 20
    final_rate: float = 0.1  # of `rate`, where the cosine ends
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-6)


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = RMSNorm(d), RMSNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, d = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, d // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, d / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, d))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    """Logits of the next byte, for every position.

    Parameters
    ----------
    shape : Shape
    generator : torch.Generator
        Source of the initial weights, N(0, 0.02) as in GPT-2, the two matrices that write to the
        residual stream smaller by sqrt(2 * layers).
    """

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                writes = name.endswith(("proj.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * shape.layers) if writes else 0.02
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def linears(self) -> dict[str, nn.Linear]:
        """The linear layers in the order of the forward pass, by short names (``"3.up"``)."""
        return {
            name.removeprefix("blocks."): module
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear)
        }


# Text --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes (a tenth, the last), with the hash of the whole."""

    name: str
    train: Tensor
    held_out: Tensor
    sha256: str


def corpus() -> Corpus:
    """The Python language reference as bytes.

    Its text differs a little between Python versions, so records carry its hash.

    Raises
    ------
    RuntimeError
        Where this Python was installed without `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "corpus: this Python lacks the module pydoc_data.topics, the text to train on; a full"
            " standard library has it. Install it (Debian: libpython3-stdlib) or use another Python."
        ) from error
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(data) - len(data) // 10
    digest = hashlib.sha256(text).hexdigest()
    return Corpus("pydoc_data.topics", data[:cut], data[cut:], digest)


def windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and next bytes, both int64 of shape (len(starts), context)."""
    index = starts[:, None] + torch.arange(context + 1)
    chosen = data[index].long()
    return chosen[:, :-1], chosen[:, 1:]


def next_byte_loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: GPT, data: Tensor, device: str, batch: int, limit: int = 1 << 16) -> float:
    """Mean loss over the first `limit` held-out bytes, in windows that do not overlap."""
    context = model.shape.context
    starts = torch.arange(0, min(limit, len(data)) - context, context)
    total = 0.0
    for part in starts.split(batch):
        inputs, targets = (t.to(device) for t in windows(data, part, context))
        total += float(next_byte_loss(model, inputs, targets)) * len(part)
    return total / len(starts)


# Training ----------------------------------------------------------------------------------------


def rate_at(step: int, plan: Training) -> float:
    """Learning rate: linear warm-up, then a cosine down to ``final_rate * rate``."""
    if step < plan.warmup:
        return plan.rate * (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.rate * (
        plan.final_rate + (1 - plan.final_rate) * (1 + math.cos(math.pi * done)) / 2
    )


def optimizer(model: GPT, plan: Training) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": plan.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=plan.rate,
        betas=plan.betas,
    )


def train(
    shape: Shape,
    plan: Training,
    text: Corpus,
    seed: int,
    device: str = "cpu",
    before_step: Callable[[int, GPT], None] | None = None,
    after_step: Callable[[int, float], None] | None = None,
) -> tuple[GPT, list[float]]:
    """Train a GPT from scratch; the same seed gives the same run.

    Weights and data order come from two generators of their own, so neither depends on how often
    the other, or anything else, draws.

    Parameters
    ----------
    before_step : callable, optional
        ``(step, model)``, just before the forward pass: the place to switch captures on or off.
    after_step : callable, optional
        ``(step, loss)``, after the optimizer has moved the weights.

    Returns
    -------
    GPT, list of float
        The trained model and the training loss of every step, in nats per byte.
    """
    initial = torch.Generator().manual_seed(seed)
    order = torch.Generator().manual_seed(seed + (1 << 32))
    model = GPT(shape, initial).to(device)
    adamw = optimizer(model, plan)
    losses: list[float] = []
    for step in range(plan.steps):
        if before_step is not None:
            before_step(step, model)
        last = len(text.train) - shape.context
        starts = torch.randint(last, (plan.batch,), generator=order)
        inputs, targets = (t.to(device) for t in windows(text.train, starts, shape.context))
        loss = next_byte_loss(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        for group in adamw.param_groups:
            group["lr"] = rate_at(step, plan)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if after_step is not None:
            after_step(step, losses[-1])
    return model, losses
