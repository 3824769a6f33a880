"""GEMM recipes against their definition in exact arithmetic and single float32 operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import FAST, assert_same_bits

import fpemu
from fpemu.gemm import get_recipe, get_unit, list_recipes, matmul, oracle

UNIT = "hopper.wgmma.e4m3"
F32 = np.float32


def operands(m: int = 3, k: int = 300, n: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(
        fpemu.quantize(rng.standard_normal(s).astype(F32), "e4m3") for s in ((m, k), (k, n))
    )  # type: ignore[return-value]


def chain(a: np.ndarray, b: np.ndarray, name: str = UNIT) -> np.ndarray:
    return oracle.matmul(get_unit(name), "fp32", a, b)


@pytest.mark.parametrize("backend", [*FAST, "oracle"])
def test_fast_is_one_chain_and_slow_promotes(backend: str) -> None:
    a, b = operands()
    fast = matmul(a, b, unit=UNIT, recipe="cublaslt.fp8_fast", backend=backend)
    assert_same_bits(fast, chain(a, b))
    slow = matmul(a, b, unit=UNIT, recipe="cublaslt.fp8_slow", backend=backend)
    want = np.zeros_like(slow)
    for k in (0, 128, 256):
        want = want + chain(a[:, k : k + 128], b[k : k + 128])
    assert_same_bits(slow, want)
    assert (fast != slow).any()


def test_epilogue_rounds_twice() -> None:
    a, b = operands()
    sa, sb, bias = F32(0.37), F32(1.91), np.linspace(-1, 1, 5).astype(F32)
    y = chain(a, b) * F32(sa * sb) + F32(0)
    options: dict[str, Any] = {
        "unit": UNIT,
        "recipe": "cublaslt.fp8_fast",
        "scale_a": sa,
        "scale_b": sb,
    }
    assert_same_bits(matmul(a, b, **options), y)
    assert_same_bits(matmul(a, b, **options, out="fp16"), y.astype(np.float16))
    assert_same_bits(
        matmul(a, b, **options, out="bf16", bias=bias), fpemu.quantize(y + bias, "bf16")
    )
    eight = fpemu.quantize(y * F32(300), "e4m3")
    assert_same_bits(matmul(a, b, **options, out="e4m3", scale_result=300.0), eight)
    assert np.abs(eight).max() == 448


def test_minus_zero_and_nan_leave_the_epilogue_canonical() -> None:
    a, b = np.float32([[0.0], [np.nan], [1.0]]), np.float32([[1.0]])
    for out, nan in (("fp32", 0x7FFFFFFF), ("bf16", 0x7FFF0000)):
        got = matmul(a, b, unit=UNIT, recipe="scaled", scale_a=-1.0, out=out).view(np.uint32)
        assert got.ravel().tolist() == [0, nan, 0xBF800000]
    got = matmul(a, b, unit=UNIT, recipe="scaled", out="fp16").view(np.uint16)
    assert got.ravel().tolist() == [0, 0x7FFF, 0x3C00]


@pytest.mark.parametrize("backend", [*FAST, "oracle"])
@pytest.mark.parametrize("name", ["deepgemm.1d2d", "deepgemm.1d1d", "cutlass.fp8_blocks"])
def test_block_scales_are_fused_into_the_promotion(name: str, backend: str) -> None:
    a, b = operands(n=130, k=260)
    a, b = a[:2], b[:, :130]
    rng = np.random.default_rng(2)
    sa = rng.uniform(0.1, 3, (2, 3)).astype(F32)
    sb = rng.uniform(0.1, 3, (3, 2) if name == "deepgemm.1d2d" else (3, 130)).astype(F32)
    got = matmul(a, b, unit=UNIT, recipe=name, scale_a=sa, scale_b=sb, backend=backend)
    full = np.repeat(sb, 128, 1)[:, :130] if name == "deepgemm.1d2d" else sb
    for i, j in ((0, 0), (1, 127), (0, 128), (1, 129)):
        factors = [float(sa[i, p] * full[p, j]) for p in range(3)]
        want = oracle.promoted(get_unit(UNIT), a[i].tolist(), b[:, j].tolist(), 0.0, 128, factors)
        assert got[i, j] == F32(want)


def test_fused_means_one_rounding() -> None:
    """1 + s*p where the product rounded first would give another sum."""
    one, p = 1.0, 4097 * 2.0**-13  # 14 bits: fits the unit's accumulator
    s = F32(1 + 2.0**-23)
    got = oracle.late("fp32", one, p, float(s))
    assert got == float(F32(np.float64(one) + np.float64(p) * np.float64(s)))


@pytest.mark.parametrize("twod", [False, True])
def test_encoded_blocks_carry_their_scales(twod: bool) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((4, 256)).astype(F32), rng.standard_normal((256, 140)).astype(F32)
    a = fpemu.encode(x, "fp8_block_e4m3/fp32")
    b = (
        fpemu.encode(w, "fp8_block_e4m3/2d/fp32")
        if twod
        else fpemu.encode(w, "fp8_block_e4m3/fp32", axis=0)
    )
    recipe = "deepgemm.1d2d" if twod else "deepgemm.1d1d"
    got = matmul(a, b, unit=UNIT, recipe=recipe)
    table = fpemu.get_format("e4m3").values().astype(F32)
    va, vb = table[a.codes], table[b.codes]
    assert_same_bits(
        got, matmul(va, vb, unit=UNIT, recipe=recipe, scale_a=a.scales, scale_b=b.scales)
    )
    assert np.abs(got - a.decode() @ b.decode()).max() < 0.1


def test_tensor_scales_are_applied_by_default() -> None:
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((3, 96)).astype(F32), rng.standard_normal((96, 4)).astype(F32)
    unit = "blackwell.tcgen05.nvfp4"
    a, b = fpemu.encode(x, "nvfp4"), fpemu.encode(w, "nvfp4", axis=0)
    got = matmul(a, b, unit=unit)
    assert_same_bits(got, matmul(a, b, unit=unit, recipe="cublaslt.nvfp4"))
    assert np.abs(got - a.decode() @ b.decode()).max() < 1e-5
    bare = [fpemu.Encoded(e.codes, e.scales, None, e.format, e.axis, e.dtype) for e in (a, b)]
    alpha = np.float32(a.tensor_scale) * np.float32(b.tensor_scale)
    assert_same_bits(got, matmul(*bare, unit=unit) * alpha)
    eight = fpemu.encode(x, "fp8_tensor_e4m3"), fpemu.encode(w, "fp8_tensor_e4m3")
    y = matmul(*eight, unit=UNIT, recipe="cublaslt.fp8_slow")
    assert np.abs(y - eight[0].decode() @ eight[1].decode()).max() < 0.01


@pytest.mark.parametrize("splits", [2, 3])
def test_split_k(splits: int) -> None:
    a, b = operands(k=640)
    got = matmul(a, b, unit=UNIT, recipe="cublaslt.fp8_fast", split_k=splits)
    run = -(-5 // splits) * 128
    want = chain(a[:, :run], b[:run])
    for k in range(run, 640, run):
        want = want + chain(a[:, k : k + run], b[k : k + run])
    assert_same_bits(got, want)


def test_split_k_on_ada_takes_tiles_in_turn() -> None:
    a, b = operands(k=600)
    tiles = np.arange(600) // 64
    parts = [chain(a[:, tiles % 3 == s], b[tiles % 3 == s], "ada.qmma.e4m3") for s in range(3)]
    got = matmul(a, b, unit="ada.qmma.e4m3", recipe="cublaslt.ada_fp8", split_k=3)
    assert_same_bits(got, (parts[0] + parts[1]) + parts[2])


def test_rows() -> None:
    a, b = operands()
    sa, sb = np.float32([0.3, 0.7, 1.1]), np.linspace(0.1, 2, 5).astype(F32)
    got = matmul(a, b, unit=UNIT, recipe="cutlass.fp8_rows", scale_a=sa, scale_b=sb)
    assert_same_bits(got, sa[:, None] * (sb * chain(a, b)))


def test_batches_of_a_recipe() -> None:
    a = np.stack([operands(seed=s)[0] for s in range(2)])
    b = operands(seed=9)[1]
    got = matmul(a, b, unit=UNIT, recipe="cublaslt.fp8_slow", scale_a=0.5)
    for i in range(2):
        assert_same_bits(
            got[i], matmul(a[i], b, unit=UNIT, recipe="cublaslt.fp8_slow", scale_a=0.5)
        )
    sa = np.random.default_rng(0).uniform(1, 2, (2, 3, 3)).astype(F32)
    sb = np.random.default_rng(1).uniform(1, 2, (3, 5)).astype(F32)
    got = matmul(a, b, unit=UNIT, recipe="deepgemm.1d1d", scale_a=sa, scale_b=sb)
    for i in range(2):
        want = matmul(a[i], b, unit=UNIT, recipe="deepgemm.1d1d", scale_a=sa[i], scale_b=sb)
        assert_same_bits(got[i], want)


def test_rows_of_the_table() -> None:
    assert {"cublaslt.fp8_fast", "cublaslt.fp8_slow", "deepgemm.1d2d", "deepgemm.1d1d"} <= set(
        list_recipes()
    )
    for name in list_recipes():
        assert get_recipe(name).evidence == "model"
