"""Rotation fused with quantization: the bits of the two steps, in every layout."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from helpers import BF16, assert_same_bits, assert_same_parts, block_data, give

import fpemu
from fpemu.rotation import encode_rotated, quantize_rotated, rotated_amax

#: A scale per tensor and per block, per block, per tile, per tensor, none; short blocks among them.
FORMATS = ("nvfp4", "nvfp4/2d", "mxfp4", "fp8_block_e4m3/2d/fp32", "fp8_tensor_e4m3", "e4m3")
SR: dict[str, Any] = {"rounding": "sr", "seed": 5, "stream": 2}


def two_steps(verb: Any, x: Any, fmt: str, axis: int, options: dict[str, Any], **how: Any) -> Any:
    rotated = fpemu.hadamard(x, axis=axis, **how)
    return verb(rotated, fmt, axis=axis, **options)


def check(x: Any, fmt: str, axis: int, options: dict[str, Any], note: str = "", **how: Any) -> None:
    want = two_steps(fpemu.quantize, x, fmt, axis, options, **how)
    assert_same_bits(quantize_rotated(x, fmt, axis=axis, **how, **options), want, note=note)
    parts = two_steps(fpemu.encode, x, fmt, axis, options, **how)
    got = encode_rotated(x, fmt, axis=axis, **how, **options)
    assert_same_parts(got, parts, note=note)
    assert (got.axis, got.dtype, got.format) == (parts.axis, parts.dtype, parts.format)


def data(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 6, (*shape[:-1], 1))
    return x.astype(dtype)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("options", [{}, SR], ids=["rne", "sr"])
def test_layouts(fmt: str, options: dict[str, Any]) -> None:
    for shape, axis in (((64, 40), 0), ((48, 5), 0), ((3, 48), 1), ((2, 32, 33), 1)):
        x = data(shape)
        check(x, fmt, axis, options, f"{shape} axis {axis}", signs="te")
        check(x.T, fmt, x.ndim - 1 - axis, options, f"{shape} axis {axis} transposed", signs="te")
    wide = data((32, 96))[:, ::2]
    check(wide, fmt, 1, options, "strided", signs="te")
    check(wide[::-1], fmt, 0, options, "reversed", signs="te")


@pytest.mark.slow  # compiles each dtype's kernels
@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [(BF16, "nvfp4"), (BF16, "mxfp4"), (np.float16, "nvfp4"), (np.float64, "mxfp4")],
)
def test_dtypes(dtype: Any, fmt: str) -> None:
    for axis in (0, 1):
        x = data((32, 64), dtype)
        check(x, fmt, axis, {}, signs=3)
        check(give("torch", x), fmt, axis, {}, signs=3)


def test_result_dtypes() -> None:
    x = data((64, 32), BF16)
    for dtype in ("float32", "float64", "float16"):
        want = fpemu.quantize(fpemu.hadamard(x, axis=0), "nvfp4", axis=0, dtype=dtype)
        assert_same_bits(quantize_rotated(x, "nvfp4", axis=0, dtype=dtype), want)


@pytest.mark.parametrize("size", [2, 64])
def test_sizes_that_are_not_the_blocks(size: int) -> None:
    for fmt in ("nvfp4", "mxfp4"):
        check(data((128, 20)), fmt, 0, SR, size=size)
        check(data((2, 128)), fmt, 1, {}, size=size)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_pieces(threads: int) -> None:
    x = data((1024, 400))
    fpemu.set_num_threads(threads)
    try:
        for fmt in ("nvfp4", "mxfp4"):
            check(x, fmt, 0, SR, signs="te")
            check(x.T, fmt, 1, SR, signs="te")
            check(x, fmt, 1, {}, signs="te")
    finally:
        fpemu.set_num_threads(None)


def test_random_words_shards_and_offsets() -> None:
    x = data((64, 48))
    words = np.random.default_rng(1).integers(0, 1 << 32, x.shape, np.uint32)
    given = {"rounding": "sr", "random_bits": words, "sr_bits": 16}
    for fmt in ("nvfp4", "mxfp4", "e4m3"):
        check(x, fmt, 0, given)
        check(x, fmt, 0, {**SR, "offset": 12345678901})
        top = rotated_amax(x, axis=0)
        amax = {"amax": top} if fmt == "nvfp4" else {}
        whole = quantize_rotated(x, fmt, axis=0, **SR, **amax)
        for rows in (slice(0, 32), slice(32, 64)):
            part = quantize_rotated(
                x[rows], fmt, axis=0, **SR, **amax, offset=((64, 48), (rows.start, 0))
            )
            assert_same_bits(part, whole[rows])


def test_specials() -> None:
    x = block_data(64, 48, 3)
    for fmt in FORMATS:
        check(x, fmt, 1, {}, fmt)
        check(x, fmt, 0, {}, fmt)


def test_dialects_and_integers_take_two_steps() -> None:
    x = data((32, 32))
    for fmt in ("int8_tensor", "nvfp4/torchao", "mxfp4/rceil"):
        check(x, fmt, 0, {})
    bad = x.copy()
    bad[0, 0], bad[1, 0] = np.inf, np.inf  # Inf - Inf: the rotated block holds NaN
    with pytest.raises(ValueError, match="x holds NaN and 'int8_tensor'"):
        quantize_rotated(bad, "int8_tensor", axis=0)


def test_empty() -> None:
    for shape, axis in (((0, 16), 0), ((16, 0), 0), ((0, 16), 1)):
        check(np.zeros(shape, np.float32), "nvfp4", axis, {})
    assert rotated_amax(np.zeros((0, 3), np.float32), axis=0) == 0


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, np.float64], ids=str)
def test_amax(dtype: Any) -> None:
    with np.errstate(invalid="ignore"):
        x = np.where(np.isfinite(block_data(64, 32, 2)), block_data(64, 32, 2), 0)
        x = np.clip(x, -6e4, 6e4).astype(dtype)
    x[3, 3] = np.nan
    for axis, view in ((0, x), (1, x), (0, x.T), (0, x[:, ::2])):
        rotated = fpemu.hadamard(view, axis=axis, signs="te").astype(np.float64)
        want = float(np.nanmax(np.abs(rotated)))
        assert rotated_amax(view, axis=axis, signs="te") == want
        assert rotated_amax(give("torch", view), axis=axis, signs="te") == want


def test_torch_draws_one_seed() -> None:
    import torch

    x = torch.randn(64, 8)
    results, states = [], []
    for call in (
        lambda: quantize_rotated(x, "nvfp4", axis=0, rounding="sr"),
        lambda: fpemu.quantize(fpemu.hadamard(x, axis=0), "nvfp4", axis=0, rounding="sr"),
    ):
        torch.manual_seed(3)
        results.append(call())
        states.append(torch.get_rng_state())
    assert_same_bits(*results)
    assert torch.equal(*states)


def test_torch_gradient_and_compile() -> None:
    import torch

    def cast(x: torch.Tensor) -> torch.Tensor:
        return quantize_rotated(x, "mxfp4", axis=0, signs="te", rounding="sr", seed=1)

    x = torch.randn(64, 3, requires_grad=True)
    gradient = torch.randn(64, 3)
    cast(x).backward(gradient)
    y = fpemu.hadamard(x.detach(), axis=0, signs="te").requires_grad_()
    fpemu.quantize(y, "mxfp4", axis=0, rounding="sr", seed=1).backward(gradient)
    assert_same_bits(x.grad, fpemu.hadamard(y.grad, axis=0, signs="te", inverse=True))
    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x.detach()), cast(x.detach()))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_no_rotated_copy(fmt: str) -> None:
    """Beside the result, less than a third of x is allocated."""
    x = data((4096, 512))
    fpemu.set_num_threads(1)
    quantize_rotated(x, fmt, axis=0)  # compiles
    tracemalloc.start()
    try:
        quantize_rotated(x, fmt, axis=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        fpemu.set_num_threads(None)
    assert x.nbytes < peak < 1.3 * x.nbytes


@pytest.mark.parametrize("call", [quantize_rotated, encode_rotated], ids=lambda c: c.__name__)
def test_errors(call: Any) -> None:
    x = np.ones((8, 32), np.float32)
    for sentence, options in (
        ("has length 8 along axis 0", {"axis": 0}),
        ("size must be one of", {"size": 3}),
        ("unknown rounding", {"rounding": "up"}),
        ("amax is given but 'mxfp4'", {"amax": 1.0}),
    ):
        with pytest.raises(ValueError, match=f"{call.__name__}: .*{sentence}|{sentence}"):
            call(x, "mxfp4", **options)
    with pytest.raises(ValueError, match="unknown format 'mxfp5'"):
        call(x, "mxfp5")
