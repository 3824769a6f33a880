"""What must hold wherever the GEMM kernels run: interpreted in a process of their own, or on a GPU.

Not collected by itself: `test_gemm_interpreted.py` runs this file with ``TRITON_INTERPRET=1``, and
`test_gemm_device.py` takes the same tests to a GPU. Operands go in as tensors, so that the steps
around the product are torch's; the expected bits come from arrays.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gemm.cases import KINDS, Case, accumulator, case, nearest
from helpers import assert_same_bits

import fpemu
from fpemu.encoded import Encoded
from fpemu.formats import E2M1
from fpemu.gemm import Unit, get_unit, matmul, oracle, triton_

DEVICE = "cpu" if triton_.interpreted() else "cuda"
#: One of every family: block length, fraction bits, rounding, order, groups, scales, wide exponents.
FAMILIES = (
    "volta.hmma.fp16", "turing.hmma.fp16", "ampere.hmma.tf32", "ada.qmma.e5m2", "hopper.wgmma.fp16",
    "hopper.wgmma.bf16", "hopper.wgmma.e4m3", "hopper.wgmma.e5m2xe4m3", "hopper.mma_sync.e4m3",
    "blackwell.tcgen05.e4m3", "blackwell.tcgen05.e2m3xe2m1", "blackwell.tcgen05.mxfp8_e5m2",
    "blackwell.tcgen05.mxfp6_e3m2xmxfp4", "blackwell.tcgen05.mxfp4", "blackwell.tcgen05.nvfp4",
    "fp32.sequential", "fp32.fma",
)  # fmt: skip


def give(x: Any) -> Any:
    """An operand on the device that is tested."""
    if isinstance(x, Encoded):
        codes, scales = (torch.from_numpy(np.array(y)).to(DEVICE) for y in (x.codes, x.scales))
        return dataclasses.replace(x, codes=codes, scales=scales)
    return torch.from_numpy(np.array(x)).to(DEVICE)


def run(a: Any, b: Any, unit: Any, **options: Any) -> np.ndarray:
    options = {k: give(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    d = matmul(give(a), give(b), unit=unit, backend="triton", **options)
    assert d.device.type == DEVICE
    return d.cpu().numpy()


def _joined(parts: list[Any], axis: int) -> Any:
    if not isinstance(parts[0], Encoded):
        return np.concatenate(parts, axis)
    codes, scales = (
        np.concatenate([getattr(p, field) for p in parts], axis) for field in ("codes", "scales")
    )
    return dataclasses.replace(parts[0], codes=codes, scales=scales)


def _cut(x: Any, index: tuple[Any, ...]) -> Any:
    if not isinstance(x, Encoded):
        return x[index]
    return dataclasses.replace(x, codes=x.codes[index], scales=x.scales[index])


def crossed(unit: Unit, depth: int, out: str, rows: int = 2, cols: int = 5) -> Case:
    """Rows of every kind by columns of every kind, each with a c of some kind: one tile of D.

    Rows that meet a tiny c are zero, every other one, so that c alone sets the exponent.
    """
    rng = np.random.default_rng(depth)
    if unit.scale_block:  # operands agree on one of the sizes
        unit = dataclasses.replace(unit, scale_block=(unit.scale_block[depth % 2 - 1],))
    kinds = [case(kind, unit, rows, depth, cols, depth) for kind in KINDS]
    c = np.concatenate([accumulator(k, (rows, cols * len(KINDS)), rng) for k in KINDS])
    a, b = _joined([k.a for k in kinds], 0), _joined([k.b for k in kinds], 1)
    for kind in ("subnormal", "tiny c"):
        (a.codes if isinstance(a, Encoded) else a)[rows * KINDS.index(kind)] = 0
    return Case("crossed", a, b, c)


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_oracle(name: str) -> None:
    """Cancellation, subnormals, overflow, zeros, NaN, Inf, c: some by exact arithmetic, all by the
    CPU kernels."""
    unit = get_unit(name)
    for n, out in enumerate(unit.outputs):
        depth = unit.step + 5 + n
        k = crossed(unit, depth, out)
        got = run(k.a, k.b, unit, c=k.c, out=out)
        assert_same_bits(got, matmul(k.a, k.b, unit=unit, c=k.c, out=out), note=f"{out}:")
        i, j = np.arange(22), np.arange(n, 55, 5)
        a, b = _cut(k.a, (i,)), _cut(k.b, (slice(None), j))
        want = matmul(a, b, unit=unit, c=k.c[np.ix_(i, j)], out=out, backend="oracle")
        assert_same_bits(got[np.ix_(i, j)], want, note=f"oracle, {out}:")


@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 32, 1), (2, 70, 65), (65, 7, 130)])
def test_shapes(shape: tuple[int, int, int]) -> None:
    rows, depth, cols = shape
    for name in ("hopper.wgmma.e4m3", "fp32.sequential"):
        unit = get_unit(name)
        k = case("normal", unit, rows, depth, cols)
        assert_same_bits(run(k.a, k.b, unit, c=k.c), matmul(k.a, k.b, unit=unit, c=k.c))


def test_nothing_to_multiply() -> None:
    c = np.float32([[1.5, -0.0, np.nan]])
    got = run(np.zeros((1, 0)), np.zeros((0, 3)), "hopper.wgmma.e4m3", c=c)
    assert_same_bits(got, oracle.as_result(c, "fp32"))
    for a, b in (((0, 4), (4, 3)), ((2, 4), (4, 0)), ((0, 3, 4), (4, 2))):
        got = run(np.zeros(a), np.zeros(b), "hopper.wgmma.e4m3")
        assert got.shape == (*a[:-1], b[-1])


@pytest.mark.parametrize("lead", [((2,), ()), ((), (2,)), ((2, 1), (1, 2))])
@pytest.mark.parametrize("name", ["hopper.wgmma.fp16", "fp32.fma"])
def test_batches(name: str, lead: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    unit, rng = get_unit(name), np.random.default_rng(0)
    a = nearest(rng.standard_normal((*lead[0], 5, 40)), unit.a)
    b = nearest(rng.standard_normal((*lead[1], 40, 7)), unit.b)
    c = rng.standard_normal((*np.broadcast_shapes(*lead), 5, 7)).astype(np.float32)
    assert_same_bits(run(a, b, unit, c=c), matmul(a, b, unit=unit, c=c))


def test_strides_and_dtypes() -> None:
    k = case("normal", get_unit("hopper.wgmma.e4m3"), 9, 50, 21)
    want = matmul(k.a, k.b, unit="hopper.wgmma.e4m3", c=k.c)
    a, b, c = give(k.a), give(k.b), give(k.c)
    for x in (a.mT.contiguous().mT, a.repeat_interleave(2, 1)[:, ::2], a.double(), a.bfloat16()):
        for y in (b.mT.contiguous().mT, b.to(torch.float8_e4m3fn), b.half().requires_grad_()):
            got = matmul(x, y, unit="hopper.wgmma.e4m3", c=c, backend="triton")
            assert_same_bits(got.cpu().numpy(), want)
    whole = [(3 * x).int().float() for x in (a, b)]
    got = matmul(whole[0].int(), whole[1].long(), unit="hopper.wgmma.e4m3", backend="triton")
    assert_same_bits(
        got.cpu().numpy(), matmul(*(x.cpu().numpy() for x in whole), unit="hopper.wgmma.e4m3")
    )
    arrays = matmul(k.a, k.b, unit="hopper.wgmma.e4m3", c=k.c, backend="triton")
    assert isinstance(arrays, np.ndarray)
    assert_same_bits(arrays, want)


def test_scales_of_every_layout() -> None:
    rng, encode = np.random.default_rng(0), partial(fpemu.encode, backend="oracle")
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((5, 70), (70, 37)))
    for fmt, unit in (("nvfp4", "nvfp4"), ("mxfp8_e4m3", "mxfp8_e4m3")):
        a, b = encode(x, fmt), encode(w, fmt, axis=0)
        want = matmul(a, b, unit=f"blackwell.tcgen05.{unit}")
        assert_same_bits(run(a, b, f"blackwell.tcgen05.{unit}"), want, note=fmt)
    a, tiles = encode(x, "nvfp4/1level"), encode(w, "nvfp4/2d")
    want = matmul(a, tiles, unit="blackwell.tcgen05.nvfp4")
    assert_same_bits(run(a, tiles, "blackwell.tcgen05.nvfp4"), want)
    values = nearest(x, E2M1), nearest(w, E2M1)
    for unit in ("nvfp4", "mxfp4_k32"):  # scales of 1
        want = matmul(*values, unit=f"blackwell.tcgen05.{unit}")
        assert_same_bits(run(*values, f"blackwell.tcgen05.{unit}"), want)


RECIPES: dict[str, dict[str, Any]] = {
    "scaled": {"scale_a": 0.37, "scale_b": -1.91},
    "cublaslt.fp8_fast": {"out": "bf16", "scale_a": 0.3, "split_k": 2},
    "cublaslt.fp8_slow": {"out": "e4m3", "scale_result": 30.0},
    "cutlass.fp8_promoted": {"out": "fp16", "bias": np.linspace(-1, 1, 55, dtype=np.float32)},
    "cutlass.fp8_rows": {
        "scale_a": np.linspace(0.1, 2, 22, dtype=np.float32)[:, None],
        "scale_b": np.linspace(3, -2, 55, dtype=np.float32),
    },
    "deepgemm.1d1d": {
        "scale_a": np.geomspace(1e-3, 1e3, 44).astype(np.float32).reshape(22, 2),
        "scale_b": np.geomspace(1e2, 1e-3, 110).astype(np.float32).reshape(2, 55),
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str) -> None:
    """Promotion with and without factors, split-K, epilogues."""
    unit, options = get_unit("hopper.wgmma.e4m3"), RECIPES[recipe]
    k = crossed(unit, 140, "fp32")
    want = matmul(k.a, k.b, unit=unit, recipe=recipe, **options)
    assert_same_bits(run(k.a, k.b, unit, recipe=recipe, **options), want)


def test_a_user_adds_a_row() -> None:
    for change in ({"L": 2, "F": 20, "clamp_fp32": -3}, {"L": 64, "F": 13}):
        unit = dataclasses.replace(get_unit("hopper.wgmma.e4m3"), name="mine", **change)
        k = crossed(unit, 40, "fp32")
        assert_same_bits(run(k.a, k.b, unit, c=k.c), matmul(k.a, k.b, unit=unit, c=k.c))


def test_values_that_are_none_of_the_format() -> None:
    a = np.float32([[1, 0.3, 2.0**-10, 500, np.inf, np.nan, -0.0, 2.0**-149]])
    with pytest.raises(ValueError, match="5 of 8 values of a are not e4m3"):
        run(a, np.ones((8, 1), np.float32), "hopper.wgmma.e4m3")
    with pytest.raises(ValueError, match="1 of 1 values of b are not tf32"):
        run(np.ones((1, 1)), np.full((1, 1), 1 + 2.0**-11), "hopper.wgmma.tf32")
    with pytest.raises(ValueError, match="1 of 2 values of a are not e4m3"):
        run(np.float64([[1, 1 + 2.0**-40]]), np.ones((2, 1)), "hopper.wgmma.e4m3")
    with pytest.raises(TypeError, match="bool"):
        run(np.ones((1, 1), bool), np.ones((1, 1)), "hopper.wgmma.e4m3")
    with pytest.raises(ValueError, match="c has shape"):
        run(np.ones((1, 1)), np.ones((1, 1)), "hopper.wgmma.e4m3", c=np.ones((2, 1), np.float32))


@pytest.mark.parametrize("name", ["exact", "fp32.pairwise"])
def test_what_is_not_served_says_so(name: str) -> None:
    ones = np.ones((2, 2), np.float32)
    with pytest.raises(fpemu.BackendError, match=r"'triton' cannot compute.*registers"):
        run(ones, ones, name)
    got = matmul(give(ones), give(ones), unit=name)
    assert_same_bits(got.cpu().numpy(), 2 * ones)


@pytest.mark.parametrize(
    "error",
    [
        {"F": 12}, {"F": 14}, {"KEEP": -1}, {"CLAMP": 5}, {"C_EMIN": -120}, {"SPECIAL": False},
        {"L": 16},
    ],
)  # fmt: skip
def test_a_planted_error_is_seen(error: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    unit, right = get_unit("hopper.wgmma.e4m3"), triton_.constants
    k = crossed(unit, 69, "fp32")
    monkeypatch.setattr(triton_, "constants", lambda *a: right(*a) | error)
    got, want = run(k.a, k.b, unit, c=k.c), matmul(k.a, k.b, unit=unit, c=k.c)
    assert (got.view(np.uint32) != want.view(np.uint32)).any()
