"""Y, dX, dW and db of the layer: operands equal to the oracle's bit for bit, products within the
bound of a float32 sum of them in any order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_bits
from torch import nn

import fpemu
from fpemu.nn import Gemm, Hadamard, Linear, Operand, Recipe, layer, linear
from fpemu.recipes import OPERANDS, RECIPES, linear_recipe
from fpemu.rng import philox

TOKENS, INS, OUTS = 32, 48, 16
UNIT_ROUNDOFF = 2.0**-24

#: The axis that each GEMM contracts: X is (tokens, in), dY (tokens, out), W (out, in).
CONTRACTED = {
    "fprop.x": 1, "fprop.w": 1, "dgrad.dy": 1, "dgrad.w": 0, "wgrad.dy": 0, "wgrad.x": 0,
}  # fmt: skip
#: Recipes whose every operand is compared with the oracle.
ROWS = [
    "bf16", "fp16", "fp8_current", "fp8_block", "mxfp8", "mxfp4", "mxfp4_sr_rht", "nvfp4",
    "nvfp4_4over6", "int8",
]  # fmt: skip
VARIANTS = {
    **{name: RECIPES[name] for name in ROWS},
    "nvfp4 one dimensional": RECIPES["nvfp4"].without("2d"),
    "nvfp4 stochastic everywhere": RECIPES["nvfp4"].change("*", rounding="sr"),
    "nvfp4 along the other axis": RECIPES["nvfp4"].without("2d").change("*.w", blocks="other"),
    "rotated everywhere": linear_recipe("r", *(Operand("mxfp6_e2m3", transform=Hadamard(32, 7)),) * 3),
    "one gemm": RECIPES["mxfp4"].without("fprop", "dgrad"),
}  # fmt: skip


def tensors(tokens: int = TOKENS, ins: int = INS, outs: int = OUTS) -> tuple[torch.Tensor, ...]:
    """X, W, dY and b with outliers and rows of small values."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, ins, generator=g) * torch.logspace(-2, 1, ins)
    w = torch.randn(outs, ins, generator=g) / 10
    dy = torch.randn(tokens, outs, generator=g) * torch.logspace(-6, -2, tokens)[:, None]
    return x, w, dy, torch.randn(outs, generator=g)


def oracle_operand(
    recipe: Recipe, name: str, x: torch.Tensor, seed: int, stream: int
) -> np.ndarray:
    """An operand by the oracle backend; the rotation by its definition, checked elsewhere."""
    row, axis = recipe.operand(name), CONTRACTED[name]
    data = x.numpy()
    if row.transform is not None:
        size = row.transform.size
        pad = -data.shape[axis] % size
        widths = [(0, pad), (0, 0)] if axis == 0 else [(0, 0), (0, pad)]
        data = fpemu.hadamard(np.pad(data, widths), size=size, signs=row.transform.signs, axis=axis)
    if row.fmt is None:
        return data
    fmt = fpemu.get_format(row.fmt)
    how: dict[str, Any] = {"rounding": row.rounding}
    if getattr(fmt, "block", None) is not None and not fmt.is_2d:  # type: ignore[union-attr]
        how["axis"] = axis if row.blocks == "contraction" else 1 - axis
    if row.rounding == "sr":
        # The operand's number is that of the first equal one of its tensor.
        number = next(
            k for k, other in enumerate(OPERANDS)
            if other.split(".")[1] == name.split(".")[1]
            and layer.make_plan(recipe).first[name] == other
        )  # fmt: skip
        how.update(seed=seed, stream=stream << 16 | number)
    return oracle(data.tobytes(), data.shape, fmt, tuple(how.items()))


@cache
def oracle(data: bytes, shape: tuple[int, ...], fmt: Any, how: tuple[Any, ...]) -> np.ndarray:
    """`fpemu.quantize` of the oracle; equal calls once, it is slow."""
    x = np.frombuffer(data, np.float32).reshape(shape)
    return fpemu.quantize(x, fmt, backend="oracle", dtype=np.float32, **dict(how))


def check_product(got: torch.Tensor, a: np.ndarray, b: np.ndarray, bias: Any = None) -> None:
    """|got - a @ b| <= (n - 1) u (|a| @ |b|) (1 + small): any order of float32 additions."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    exact, size = a64 @ b64, np.abs(a64) @ np.abs(b64)
    terms = a.shape[1]
    if bias is not None:
        exact, size, terms = exact + bias, size + np.abs(bias), terms + 1
    bound = terms * UNIT_ROUNDOFF * 1.01 * size + 2.0**-140
    error = np.abs(got.detach().numpy().astype(np.float64) - exact)
    assert (error <= bound).all(), f"{(error / bound).max():.3g} times the bound"


class Spy:
    """Records what `cast` returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        inner = layer.cast

        def cast(core: Any, name: str, *rest: Any, **more: Any) -> torch.Tensor:
            result = inner(core, name, *rest, **more)
            self.seen[name] = result.clone()
            return result

        monkeypatch.setattr(layer, "cast", cast)


#: With a token count that no block divides: 1D blocks of every size, and rotations.
ODD = ["mxfp8", "mxfp4_sr_rht", "nvfp4", "fp8_block"]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [*((n, TOKENS) for n in VARIANTS), *((n, 21) for n in ODD)],
)
def test_operands_and_products(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = VARIANTS[name]
    plan = layer.make_plan(recipe)
    x, w, dy, b = tensors(*((17, 33, 16) if "4over6" in name else (tokens,)))  # its oracle is slow
    seed, stream = 1234567, 5
    spy = Spy(monkeypatch)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    layer._stateless_cores.clear()
    y = linear(*leaves, recipe=recipe, seed=seed, stream=stream)
    y.backward(dy)
    dx, dw, db = (t.grad for t in leaves)
    data = {"x": x, "w": w, "dy": dy}
    want = {n: oracle_operand(recipe, n, data[n.split(".")[1]], seed, stream) for n in OPERANDS}
    for operand, first in plan.first.items():
        assert_same_bits(spy.seen[first], want[operand], note=f"{name} {operand}")
    for operand, got in spy.seen.items():
        assert_same_bits(got, want[operand], note=f"{name} {operand}")
    results = {"fprop": y, "dgrad": dx, "wgrad": dw}
    if recipe.fprop.out is not None:  # rounded: compare the values before
        for gemm, got in results.items():
            assert_same_bits(fpemu.quantize(got, getattr(recipe, gemm).out), got)
        return
    check_product(y, want["fprop.x"], want["fprop.w"].T, b.numpy().astype(np.float64))
    check_product(dx, want["dgrad.dy"], want["dgrad.w"])
    check_product(dw, want["wgrad.dy"].T, want["wgrad.x"])
    exact = dy.numpy().astype(np.float64).sum(0)
    slack = len(dy) * UNIT_ROUNDOFF * 1.01 * dy.abs().double().sum(0).numpy()
    assert (np.abs(db.numpy() - exact) <= slack).all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_results_of_16_bits_are_the_float32_results_rounded(name: str) -> None:
    x, w, dy, _ = tensors()
    row = RECIPES[name]
    wide = Recipe("wide", *(Gemm(Operand(name), Operand(name)) for _ in range(3)))
    got, want = [], []
    for recipe, results in ((row, got), (wide, want)):
        xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = linear(xs, ws, recipe=recipe)
        y.backward(dy)
        results += [y.detach(), xs.grad, ws.grad]
    for g, w_ in zip(got, want, strict=True):
        assert_same_bits(g, fpemu.quantize(w_, name))


def test_fp32_is_torchs_own_linear() -> None:
    x, w, dy, b = tensors()
    got, want = [], []
    for function, results in (
        (lambda *t: linear(*t, recipe="fp32"), got),
        (nn.functional.linear, want),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        function(*leaves).backward(dy)
        results += [t.grad for t in leaves]
    for g, w_ in zip(got, want, strict=True):
        assert_same_bits(g, w_)


def test_a_rotation_alone_cancels() -> None:
    """Without quantization the rotated wgrad is the plain one, up to float32's rounding."""
    turned = Operand(transform=Hadamard(16, "te"))
    x, w, dy, _ = tensors(37)
    ws = w.clone().requires_grad_()
    linear(x, ws, recipe=Recipe("turned", wgrad=Gemm(turned, turned))).backward(dy)
    exact = dy.double().t() @ x.double()
    size = dy.double().norm(dim=0)[:, None] * x.double().norm(dim=0)
    assert ((ws.grad.double() - exact).abs() <= 64 * UNIT_ROUNDOFF * size).all()
    assert (ws.grad.double() != exact).any()


@pytest.mark.parametrize(
    ("recipe", "unit"),
    [
        ("bf16", "hopper.wgmma"), ("fp16", "ampere.hmma.fp16"), ("fp8_current", "hopper.wgmma"),
        ("mxfp8", "blackwell.tcgen05"), ("nvfp4", "blackwell.tcgen05"),
    ],
)  # fmt: skip
def test_products_on_a_tensor_core_unit(recipe: str, unit: str) -> None:
    """The layer hands the unit what `fpemu.matmul` takes, each operand along K."""
    row = replace(RECIPES[recipe].without("rht"), unit=unit)
    x, w, dy, _ = tensors()
    xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = linear(xs, ws, recipe=row, seed=3)
    y.backward(dy)

    def code(name: str, t: torch.Tensor, axis: int) -> Any:
        operand = row.operand(name)
        how: dict[str, Any] = {"rounding": operand.rounding}
        if operand.rounding == "sr":
            number = list(OPERANDS).index(name)
            how.update(seed=3, stream=number)
        return fpemu.encode(t, operand.fmt, axis=axis, **how)

    elements = {"e4m3": "e4m3", "e5m2": "e5m2"}

    def name_of(a: str, b: str) -> str:
        if unit.count(".") == 2:
            return unit
        short = [
            elements.get(f[11:], f.split("/")[0]) if f.startswith("fp8_tensor") else f.split("/")[0]
            for f in (row.operand(a).fmt, row.operand(b).fmt)
        ]
        return f"{unit}.{short[0]}" if short[0] == short[1] else f"{unit}.{'x'.join(short)}"

    want_y = fpemu.matmul(
        code("fprop.x", x, -1), code("fprop.w", w.t().contiguous(), 0),
        unit=name_of("fprop.x", "fprop.w"),
    )  # fmt: skip
    want_dx = fpemu.matmul(
        code("dgrad.dy", dy, -1), code("dgrad.w", w, 0), unit=name_of("dgrad.dy", "dgrad.w")
    )
    if row.fprop.out:
        want_y, want_dx = (fpemu.quantize(t, row.fprop.out) for t in (want_y, want_dx))
    assert_same_bits(y, want_y)
    assert_same_bits(xs.grad, want_dx)
    if row.operand("wgrad.dy").rounding == "rne":
        want_dw = fpemu.matmul(
            code("wgrad.dy", dy.t().contiguous(), -1), code("wgrad.x", x, 0),
            unit=name_of("wgrad.dy", "wgrad.x"),
        )  # fmt: skip
        want_dw = fpemu.quantize(want_dw, row.wgrad.out) if row.wgrad.out else want_dw
        assert_same_bits(ws.grad, want_dw)


def test_a_unit_has_the_operands_of_the_float32_product() -> None:
    """`exact` accumulates without error: its result is the float32 one within a float32 sum."""
    x, w, dy, _ = tensors(37)
    results = []
    for recipe in (RECIPES["nvfp4"], replace(RECIPES["nvfp4"], unit="blackwell.tcgen05")):
        xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
        linear(xs, ws, recipe=recipe, seed=3).backward(dy)
        results.append((xs.grad, ws.grad))
    for a, b in zip(*results, strict=True):
        assert ((a - b).norm() / b.norm()) < 1e-6


def test_float32_block_scales_fit_no_unit() -> None:
    x, w, _, _ = tensors()
    with pytest.raises(ValueError, match="float32 block scales, which no unit takes"):
        linear(x, w, recipe=replace(RECIPES["fp8_block"], unit="hopper.wgmma"))


# dtypes, shapes, devices --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_results_are_those_of_the_tensors(dtype: torch.dtype) -> None:
    module = Linear(32, 16, recipe="mxfp8").to(dtype)
    x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == module.weight.grad.dtype == module.bias.grad.dtype == dtype
    single = Linear(32, 16, recipe="mxfp8")
    single.load_state_dict(module.float().state_dict())
    assert_same_bits(y.float(), single(x.detach().float()).to(dtype).float())


@pytest.mark.parametrize("shape", [(32,), (1, 32), (0, 32), (3, 5, 32), (2, 3, 5, 32)])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
def test_shapes(shape: tuple[int, ...], recipe: str) -> None:
    module = Linear(32, 16, recipe=recipe)
    x = torch.randn(shape, requires_grad=True)
    y = module(x)
    assert y.shape == (*shape[:-1], 16)
    y.sum().backward()
    assert x.grad.shape == x.shape and module.weight.grad.shape == (16, 32)
    if x.numel() == 0:
        assert not module.weight.grad.any()


def test_leading_dimensions_and_strides_do_not_matter() -> None:
    x, w, _, b = tensors()
    flat = linear(x, w, b, recipe="nvfp4")
    assert_same_bits(linear(x.view(4, 8, INS), w, b, recipe="nvfp4").flatten(0, 1), flat)
    strided = x.t().contiguous().t()
    assert_same_bits(linear(strided, w.t().contiguous().t(), b, recipe="nvfp4"), flat)


def test_gradients_that_are_expanded_or_strided() -> None:
    x, w, _, _ = tensors()
    grads = []
    for make in (lambda y: y.sum(), lambda y: (y * torch.ones_like(y)).sum()):
        ws = w.clone().requires_grad_()
        make(linear(x, ws, recipe="mxfp4")).backward()
        grads.append(ws.grad)
    assert_same_bits(*grads)


def test_int8_passes_on_that_something_was_nan() -> None:
    x, w, _, _ = tensors()
    x[0, 0] = float("nan")
    assert linear(x, w, recipe="int8").isnan().all()


def test_denormals_survive_torchs_flushing() -> None:
    x = tensors()[0]
    tiny = x * 2.0**-130
    want = layer.cast(layer._stateless(RECIPES["mxfp8"], None), "fprop.x", tiny, torch.empty(0))
    torch.set_flush_denormal(True)
    try:
        got = layer.cast(layer._stateless(RECIPES["mxfp8"], None), "fprop.x", tiny, torch.empty(0))
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(got, want)


# NVFP4, worked by hand -----------------------------------------------------------------------------


def decoded(codes: Any, amax: float) -> np.ndarray:
    """E2M1 values of blocks of scale 448 in a tensor of that amax: code * 448 * fl(amax / 2688)."""
    tensor_scale = float(np.float32(amax) / np.float32(2688))
    return (np.asarray(codes, np.float64) * 448 * tensor_scale).astype(np.float32)


def test_nvfp4_operands_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile, chosen so that codes can be read off.

    The amax of X is 6, so S = fl(2688/6) = 448, and a block with amax 6 has scale 448 and
    multiplier 1: its codes are the E2M1 roundings of x itself.
    """
    spy = Spy(monkeypatch)
    net = Linear(16, 16, bias=False, recipe="nvfp4", seed=77)
    w = torch.full((16, 16), 0.25)
    w[0, 0], w[3, 7], w[5, 5] = 6.0, 2.4, -1.3
    with torch.no_grad():
        net.weight.copy_(w)
    x = torch.zeros(16, 16)
    x[3] = torch.tensor([6.0, 5.1, 2.5, 1.75, 0.25, 0.75, -0.7, -0.0] * 2)
    x.requires_grad_()
    dy = torch.full((16, 16), 0.75)
    dy[:, 0] = 6.0
    for call in range(2):
        net(x).backward(dy)
        # fprop: 5.1 lies above the tie of 4 and 6; 2.5, 1.75, 0.25 and 0.75 are ties, to even codes.
        codes = [6.0, 6.0, 2.0, 2.0, 0.0, 1.0, -0.5, -0.0] * 2
        assert_same_bits(spy.seen["fprop.x"][3], decoded(codes, 6))
        assert_same_bits(spy.seen["fprop.x"][4], torch.zeros(16))
        # One scale per 16 x 16 tile: 0.25 ties to 0, 2.4 goes to 2, -1.3 to -1.5.
        tile = np.zeros((16, 16))
        tile[0, 0], tile[3, 7], tile[5, 5] = 6.0, 2.0, -1.5
        assert_same_bits(spy.seen["fprop.w"], decoded(tile, 6))
        # dgrad: 0.75 lies halfway between 0.5 and 1: up where the word's top bit is set.
        # Stream: backward call, layer 0, rank 0, operand 2.
        words = philox(np.arange(256, dtype=np.uint64), 77, call << 32 | 2).reshape(16, 16)
        want = np.where(words >> 31, 1.0, 0.5)
        want[:, 0] = 6
        assert_same_bits(spy.seen["dgrad.dy"], decoded(want, 6))
        # wgrad: column 0 of X is 6 at token 3 alone; the rotation of 16 makes it
        # 6 * sign[3] * H[3, :] / 4 = -+1.5, and 1.5 is the rotated tensor's amax: codes -+6.
        signs = [1 if (3 & k).bit_count() % 2 == 0 else -1 for k in range(16)]
        assert_same_bits(spy.seen["wgrad.x"][:, 0], decoded([-6 * s for s in signs], 1.5))
