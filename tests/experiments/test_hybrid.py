"""The hybrid: its scan in chunks is the recurrence, and it sees the past only."""

from __future__ import annotations

import pytest
import torch

import fpemu
from experiments import hybrid

TINY = hybrid.Shape(
    width=32, pattern="MFA", heads=2, head_size=8, state=8, chunk=8, context=32
)  # fmt: skip


def scan_inputs(time: int = 48) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, time, 3, 5, generator=g, dtype=torch.float64)
    decay = -3 * torch.rand(2, time, 3, generator=g, dtype=torch.float64)
    b, c = (torch.randn(2, time, 4, generator=g, dtype=torch.float64) for _ in range(2))
    return [x, decay, b, c]


@pytest.mark.parametrize("chunk", [1, 4, 16, 48])
def test_chunks_equal_the_recurrence(chunk: int) -> None:
    inputs = [t.requires_grad_() for t in scan_inputs()]
    want, got = hybrid.recurrence(*inputs), hybrid.chunked(*inputs, chunk)
    assert float((want - got).detach().abs().max()) < 1e-12
    weight = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view_as(want)
    for a, b in zip(
        torch.autograd.grad((want * weight).sum(), inputs),
        torch.autograd.grad((got * weight).sum(), inputs),
        strict=True,
    ):
        assert float((a - b).abs().max()) < 1e-11


def test_the_recurrence_by_hand() -> None:
    """One head, one state, size one: h = h/2 + 3 x, y = 2 h."""
    x = torch.tensor([1.0, 0.0, 4.0]).view(1, 3, 1, 1)
    decay = torch.full((1, 3, 1), 0.5).log()
    b, c = torch.full((1, 3, 1), 3.0), torch.full((1, 3, 1), 2.0)
    assert hybrid.recurrence(x, decay, b, c).flatten().tolist() == [6.0, 3.0, 25.5]


def test_strong_decay_has_finite_gradients() -> None:
    x, decay, b, c = scan_inputs()
    decay = (1000 * decay).requires_grad_()
    y = hybrid.chunked(x, decay, b, c, 16)
    y.sum().backward()
    assert decay.grad is not None
    assert bool(y.isfinite().all()) and bool(decay.grad.isfinite().all())


def test_a_later_byte_changes_nothing_before_it() -> None:
    net = hybrid.Hybrid(TINY, torch.Generator().manual_seed(0))
    tokens = torch.arange(32)[None]
    changed = tokens.clone()
    changed[0, 20] = 200
    with torch.no_grad():
        a, b = net(tokens), net(changed)
    assert torch.equal(a[:, :20], b[:, :20])
    assert bool((a[:, 20:] != b[:, 20:]).any(-1).all())


def test_the_seed_makes_every_weight() -> None:
    a, b, c = (hybrid.Hybrid(TINY, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    same = [n for (n, p), q in zip(a.named_parameters(), c.parameters(), strict=True) if torch.equal(p, q)]  # fmt: skip
    assert all(p.ndim == 1 for n, p in a.named_parameters() if n in same)


def test_two_linears_of_a_mamba_layer_are_quantized() -> None:
    net = hybrid.Hybrid(hybrid.Shape(), torch.Generator().manual_seed(0))
    fpemu.nn.convert(net.blocks, "mxfp8", verbose=False)
    kinds = {n: m for n, m in net.blocks[0].named_modules() if isinstance(m, fpemu.nn.Linear)}
    assert set(kinds) == {"into", "out"}
    assert all(m.out_features % 32 == m.in_features % 32 == 0 for m in kinds.values())
    assert type(net.head) is torch.nn.Linear
