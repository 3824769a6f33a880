"""Delayed scaling and loss scaling, against sequences worked by hand and by a second program."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import assert_same_bits
from torch import nn

import fpemu
from fpemu.nn import Delayed, Linear, Operand, convert, delayed
from fpemu.recipes import RECIPES, linear_recipe

INF = float("inf")
FLT_MAX = float(np.finfo(np.float32).max)

# The algorithm ------------------------------------------------------------------------------------

#: (Delayed, max), then per step: amax, history after it, scale after it. Worked by hand from
#: TransformerEngine's delayed_scaling.cu (kernel_bulk): a step of amax 0 moves nothing; the
#: entry that is zeroed still counts in its last step.
WORKED = [
    (
        Delayed(3, "max"), 448.0,
        [
            (0.0, [0, 0, 0], 1.0),
            (2.0, [0, 0, 2], 224.0),
            (8.0, [0, 2, 8], 56.0),
            (1.0, [0, 8, 1], 56.0),  # max(2, 8, 1)
            (0.0, [0, 8, 1], 56.0),
            (1.0, [0, 1, 1], 56.0),  # the 8 has moved to entry 0: counted, then zeroed
            (1.0, [0, 1, 1], 448.0),
        ],
    ),
    (
        Delayed(3, "most_recent"), 448.0,
        [(2.0, [0, 0, 2], 224.0), (8.0, [0, 2, 8], 56.0), (1.0, [0, 8, 1], 448.0)],
    ),
    (Delayed(1, "max"), 57344.0, [(7.0, [0], 8192.0), (14.0, [0], 4096.0), (0.0, [0], 4096.0)]),
    (Delayed(2, "max", margin=3), 448.0, [(7.0, [0, 7], 8.0), (56.0, [0, 56], 1.0)]),
    # 448 / 2**-140 is beyond float32; 448 / 3 is rounded.
    (Delayed(1), 448.0, [(2.0**-140, [0], FLT_MAX), (3.0, [0], float(np.float32(448) / np.float32(3)))]),
    # An amax that is not finite leaves no trace.
    (Delayed(2), 448.0, [(4.0, [0, 4], 112.0), (INF, [0, 4], 112.0), (float("nan"), [0, 4], 112.0)]),
]  # fmt: skip


@pytest.mark.parametrize(("how", "top", "steps"), WORKED)
def test_worked_sequences(how: Delayed, top: float, steps: list[tuple]) -> None:
    history = delayed.new_history(how, top)
    for amax, entries, scale in steps:
        delayed.stage(history, amax)
        delayed.update(history, how, top)
        assert history.amax_history.tolist() == entries
        assert history.scale.item() == scale


def te_bulk(history: list[float], scale: float, amax: float, algo: str, top: float) -> float:
    """`kernel_bulk` for one tensor, thread by thread as it is written there; history in place."""
    found = np.float32(0)
    n = len(history)
    if amax != 0:
        for i in range(n):
            a = history[i + 1] if i < n - 1 else amax
            found = max(found, np.float32(a))
            history[i] = a if i > 0 else 0.0
        if algo == "most_recent":
            found = np.float32(amax)
    if not (np.isfinite(found) and found > 0):
        return scale
    with np.errstate(over="ignore"):
        quotient = np.float32(top) / found
    return FLT_MAX if np.isinf(quotient) else float(quotient)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_random_sequences_equal_a_second_program(algo: str, length: int) -> None:
    rng = np.random.default_rng(length)
    how = Delayed(length, algo, margin=int(rng.integers(0, 4)))
    history = delayed.new_history(how, 448.0)
    entries, scale = [0.0] * length, 1.0
    for _ in range(60):
        amax = float(np.float32(rng.choice([0.0, 1.0]) * np.exp(rng.normal() * 20)))
        delayed.stage(history, amax)
        delayed.update(history, how, 448.0)
        scale = te_bulk(entries, scale, amax, algo, 448.0 * 2.0**-how.margin)
        assert history.amax_history.tolist() == entries
        assert history.scale.item() == scale
        # What the cast is given makes the same scale.
        assert_same_bits(
            np.minimum(np.float32(448) / history.amax.numpy(), np.float32(FLT_MAX)),
            history.scale.numpy(),
        )


# In a layer ---------------------------------------------------------------------------------------

SHORT = linear_recipe(
    "short",
    Operand("fp8_tensor_e4m3", scaling=Delayed(4)),
    Operand("fp8_tensor_e4m3", scaling=Delayed(4)),
    Operand("fp8_tensor_e5m2", scaling=Delayed(4)),
)


def fp8(x: torch.Tensor, scale: float, fmt: str) -> torch.Tensor:
    """TransformerEngine's cast: satfinite(fl(x * scale)) * fl(1 / scale)."""
    s = torch.tensor(scale)
    return fpemu.quantize(x * s, fmt) * (torch.tensor(1.0) / s)


def test_a_layer_follows_transformer_engine_step_by_step() -> None:
    """Y, dX and dW of ten steps, with the scales that the second program finds."""
    layer = Linear(32, 16, bias=False, recipe=SHORT)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(16, 32))
    state = {
        "x": ([0.0] * 4, 1.0, 448.0),
        "w": ([0.0] * 4, 1.0, 448.0),
        "dy": ([0.0] * 4, 1.0, 57344.0),
    }
    for step in range(10):
        x = (torch.randn(24, 32) * 10.0 ** (step % 4)).requires_grad_()
        dy = torch.randn(24, 16) * 10.0 ** -(step % 3)
        y = layer(x)
        y.backward(dy)
        w, xd = layer.weight.detach().clone(), x.detach()
        xq = fp8(xd, state["x"][1], "e4m3")
        wq = fp8(w, state["w"][1], "e4m3")
        dq = fp8(dy, state["dy"][1], "e5m2")
        assert_same_bits(y, torch.mm(xq, wq.t()))
        assert_same_bits(x.grad, torch.mm(dq, wq))
        assert_same_bits(layer.weight.grad, torch.mm(dq.t(), xq))
        layer.weight.grad = None
        with torch.no_grad():
            layer.weight.mul_(1.5)
        for name, t in (("x", xd), ("w", w), ("dy", dy)):
            history, scale, top = state[name]
            scale = te_bulk(history, scale, float(t.abs().max()), "max", top)
            state[name] = (history, scale, top)


@pytest.mark.parametrize("bad", [INF, -INF])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_gradient_that_is_not_finite_leaves_no_trace(bad: float, algo: str) -> None:
    recipe = SHORT.change("*", scaling=Delayed(4, algo))
    layers = [Linear(32, 16, recipe=recipe) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for step in range(6):
        x, dy = torch.randn(8, 32), torch.randn(8, 16)
        for k, layer in enumerate(layers):
            if step == 3 and k == 1:
                continue
            g = dy.clone()
            if step == 3:
                g[0, 0] = bad
            layer(x).backward(g)
    # x and w were seen once more by the first layer, dy was not.
    for field in ("dy_amax_history", "dy_scale", "dy_amax"):
        assert_same_bits(getattr(layers[0], field), getattr(layers[1], field))
    assert all(torch.isfinite(b).all() for b in layers[0].buffers())


def test_nan_is_skipped_as_the_kernel_does() -> None:
    layer = Linear(32, 16, recipe=SHORT)
    x = torch.randn(8, 32)
    x[0, 0] = float("nan")
    layer(x).sum().backward()
    assert layer.x_amax_history[0] == x.nan_to_num(0.0).abs().max()


def test_evaluation_and_scales_that_wait_for_a_backward_pass() -> None:
    layer = Linear(32, 16, recipe=SHORT)
    layer(torch.ones(4, 32)).sum().backward()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.eval()
    layer(torch.full((4, 32), 100.0))
    with torch.no_grad():
        layer(torch.full((4, 32), 100.0))
    for name, value in layer.state_dict().items():
        assert_same_bits(value, before[name], note=name)
    layer.train()
    first = layer(torch.ones(4, 32))
    scale = layer.x_scale.item()
    assert scale == 448.0
    second = layer(torch.full((4, 32), 8.0))  # the same step, as a shared layer
    assert layer.x_scale.item() == scale and layer.x_amax_history[0] == 8
    (first.sum() + second.sum()).backward()
    layer(torch.ones(4, 32))
    assert layer.x_scale.item() == 56.0


def test_a_frozen_layer_moves_its_scales_at_every_step() -> None:
    layer = Linear(32, 16, recipe=SHORT).requires_grad_(False)
    for amax in (2.0, 4.0, 8.0):
        layer(torch.full((4, 32), amax))
    assert layer.x_amax_history.tolist() == [8.0, 0.0, 2.0, 4.0]


# Loss scaling ------------------------------------------------------------------------------------


def scaled_steps(scaler: torch.amp.GradScaler, sizes: list[float]) -> list[tuple[float, bool]]:
    """Train one fp16 weight on losses ``size * y``; scale after, and whether the step was taken."""
    layer = convert(nn.Linear(1, 1, bias=False), "fp16", verbose=False)
    sgd = torch.optim.SGD(layer.parameters(), lr=2.0**-20)
    log = []
    for size in sizes:
        before = layer.weight.item()
        sgd.zero_grad()
        scaler.scale(size * layer(torch.ones(1, 1)).sum()).backward()
        scaler.step(sgd)
        scaler.update()
        log.append((scaler.get_scale(), layer.weight.item() != before))
    return log


def test_dynamic_loss_scaling_overflows_skips_and_grows() -> None:
    """65536 > 65504: FP16 has it as Inf, the step is skipped and the scale halved, by hand."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    sizes = [1.0, 1.0, 1.0, 1.0, 4.0, 0.5, 0.5]
    assert scaled_steps(scaler, sizes) == [
        (2.0**14, True), (2.0**15, True),  # 2 finite steps: doubled
        (2.0**15, True), (2.0**16, True),
        (2.0**15, False),  # 4 * 2**16 overflows
        (2.0**15, True), (2.0**16, True),
    ]  # fmt: skip


def test_static_loss_scaling() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**9)
    assert scaled_steps(scaler, [1.0, 1e30, 1.0]) == [
        (2.0**10, True), (2.0**9, False), (2.0**9, True),
    ]  # fmt: skip


def test_loss_scaling_keeps_small_gradients_from_underflow() -> None:
    """2**-26 is below half of FP16's least subnormal: lost, unless it is scaled."""
    layer = convert(nn.Linear(1, 1, bias=False), "fp16", verbose=False)
    x = torch.ones(1, 1)
    grads = []
    for scale in (1.0, 2.0**10):
        layer.weight.grad = None
        (layer(x) * (scale * 2.0**-26)).sum().backward()
        grads.append(layer.weight.grad.item() / scale)
    assert grads == [0.0, 2.0**-26]


def test_an_overflow_does_not_reach_a_history_under_dynamic_loss_scaling() -> None:
    """The saturating cast can hide it from dW; the bias, whose gradient is not cast, shows it."""
    layer = convert(nn.Linear(32, 4), "fp8_delayed", verbose=False)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(6):
        sgd.zero_grad()
        scaler.scale(layer(torch.ones(4, 32)).sum() * 4).backward()
        scaler.step(sgd)
        scaler.update()
    assert scaler.get_scale() == 2.0**123  # four gradients of 4 * scale make 2**127, which fits
    assert torch.isfinite(layer.dy_amax_history).all() and layer.dy_scale > 0
    assert torch.isfinite(layer.weight).all()


def test_rows_with_delayed_scaling_use_one_history_per_tensor() -> None:
    layer = Linear(8, 8, recipe="fp8_delayed")
    assert sorted(layer.state_names()) == sorted(
        f"{t}_{f}" for t in ("x", "w", "dy") for f in ("amax_history", "scale", "amax")
    )
    assert layer.dy_amax_history.shape == (1024,)
    assert RECIPES["fp8_delayed"].wgrad.a.fmt == "fp8_tensor_e5m2"
