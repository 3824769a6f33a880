"""What must hold wherever the quantizer kernels run: interpreted in a process of their own, or on a
GPU.

Not collected by itself: `test_triton_interpreted.py` runs this file with ``TRITON_INTERPRET=1``, and
`test_triton_device.py` takes the same tests to a GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    BF16,
    BLOCKS,
    DETERMINISTIC,
    ELEMENTS,
    assert_same_bits,
    assert_same_parts,
    block_data,
    decoded,
    give,
    patterns,
    request,
    specials,
    ties,
    views,
)  # fmt: skip

import fpemu
from fpemu import formats
from fpemu.backends import Parts, oracle
from fpemu.backends import triton_ as backend
from fpemu.rng import Random

DEVICE = "cpu" if backend.INTERPRETED else "cuda"
FLOATS = {"float16": np.float16, "bfloat16": BF16, "float32": np.float32, "float64": np.float64}
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def to_device(x: np.ndarray) -> Any:
    """The array as a tensor on the device, strides kept where torch can have them."""
    t = give("torch", x)
    if DEVICE == "cpu":
        return t
    moved = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=DEVICE)
    if 0 in t.stride() and t.numel():
        return t.to(DEVICE)
    return moved.copy_(t)


def oracle_values(fmt: Any, parts: Parts, axis: int, dtype: Any) -> np.ndarray:
    out = np.empty(parts.codes.shape, dtype)
    bits = out.view(np.uint16) if dtype == BF16 else out
    kind = "bfloat16" if dtype == BF16 else np.dtype(dtype).name
    oracle.decode(fpemu.get_format(fmt), parts, axis, bits, kind)
    return out


def clean(x: np.ndarray, fmt: str) -> np.ndarray:
    """Integers refuse NaN."""
    return np.where(np.isnan(x), x.dtype.type(1), x) if fmt.startswith("int8") else x


def check(
    x: np.ndarray, fmt: Any, axis: int = -1, dtype: Any = None, more: bool = False, **options: Any
) -> None:
    """encode and quantize (`more`: decode and the mask) against one evaluation of the oracle."""
    told = dict(options)
    for name in ("seed", "stream", "offset"):
        told.pop(name, None)
    if "seed" in options:
        offset = options.get("offset", 0)
        whole, start = offset if isinstance(offset, tuple) else (None, None)
        told["random"] = Random(
            options["seed"], options.get("stream", 0), options.get("sr_bits", 32),
            0 if whole else offset, whole, start,
        )  # fmt: skip
    place = axis % max(x.ndim, 1)
    ask = request(x, fmt, axis=place, **told)
    want = oracle.encode(ask)
    if dtype is None:
        dtype = x.dtype if x.dtype.kind == "f" or x.dtype == BF16 else np.float32
    values = oracle_values(fmt, want, place, dtype)
    given, note = to_device(x), f"{fmt} {x.dtype}{x.shape} axis={axis} {options}"
    if "random_bits" in options:
        options["random_bits"] = torch.from_numpy(options["random_bits"].astype(np.int64)).to(
            DEVICE
        )
    told = dict(options, axis=axis, backend="triton")
    got = fpemu.encode(given, fmt, **told)
    assert got.codes.device.type == DEVICE
    assert_same_parts(got, want, x, note)
    kind = "bfloat16" if dtype == BF16 else np.dtype(dtype).name
    out = fpemu.quantize(given, fmt, **told, dtype=kind)
    assert_same_bits(out, values, x, f"{note} quantize")
    if more:
        out, row = torch.empty_like(out), fpemu.get_format(fmt)
        backend.decode(row, Parts(got.codes, got.scales, got.global_scale), place, out)
        assert_same_bits(out, values, x, f"{note} decode")
        inside = backend.within(replace(ask, x=given))
        assert_same_bits(inside, oracle.within(ask), x, f"{note} within")


def sample(fmt: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return clean(block_data(rows, cols, seed, "tensor" not in fmt), fmt)


# Formats and roundings ---------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ELEMENTS)
def test_elements(fmt: str) -> None:
    """All roundings on ties and their neighbours, specials and random patterns."""
    near = ties(fmt if fmt not in ("fp32", "tf32") else "bf16")
    rng = np.random.default_rng(len(fmt))
    x = np.concatenate([rng.choice(near, 110), specials(), patterns(np.float32, 50, 1)])
    x, row = clean(x, fmt), fpemu.get_format(fmt)
    given = to_device(x)
    roundings = (*DETERMINISTIC, "rne", "sr", "sr")
    for n, rounding in enumerate(roundings, len(fmt)):
        overflow = ("sat", "nonsat")[n % 2]
        bits = (32, 5)[n % 2]
        random = Random(n, 1 << 40, bits) if rounding == "sr" else None
        ask = request(
            x, fmt, rounding=rounding, overflow=overflow, random=random, sr_bits=bits
        )  # fmt: skip
        codes = oracle.encode(ask).codes
        note = f"{fmt} {rounding} {overflow}"
        ask = replace(ask, x=given)
        assert_same_bits(backend.encode(ask).codes, codes, x, note)
        dtype = ("float32", "bfloat16", "float16", "float64")[n % 4]
        out = torch.empty(x.shape, dtype=getattr(torch, dtype), device=DEVICE)
        backend.quantize(ask, out)
        assert_same_bits(out, decoded(row, codes, FLOATS[dtype]), x, f"{note} {dtype}")
    assert_same_bits(backend.within(ask), oracle.within(request(x, fmt)), x, f"{fmt} within")


@pytest.mark.parametrize("fmt", BLOCKS)
def test_blocks(fmt: str) -> None:
    n = BLOCKS.index(fmt)
    dtypes = list(FLOATS.values())
    check(sample(fmt, 10, 70, n), fmt, dtype=dtypes[n % 4], more=True)
    rounding = DETERMINISTIC[1:][n % 6]
    check(sample(fmt, 4, 33, n + 1), fmt, rounding=rounding, overflow="nonsat")
    check(sample(fmt, 4, 36, n + 2), fmt, rounding="sr", seed=n, dtype=dtypes[(n + 1) % 4])


@pytest.mark.parametrize("fmt", ["fp8_tensor_e4m3", "fp8_tensor_e5m2", "int8_tensor", "nvfp4"])
def test_tensor_scales(fmt: str) -> None:
    """Tensors whose amax is ordinary, tiny, huge, zero, infinite; NaN ignored; amax given."""
    base = np.float32([[1, -2.5, 3, 1e-3, 0, -0.0, 7, 448, -6, 0.3]])
    for scale in (1e-30, 1e-38, 1e-44, 7e35, 0):
        with np.errstate(over="ignore"):
            check(base * np.float32(scale), fmt)
    check(np.float32([[np.inf, 1, -np.inf, 500]]), fmt)
    if fmt != "int8_tensor":
        check(np.float32([[np.nan, 1, 3], [np.nan, np.nan, np.nan]]), fmt)
    for amax in (2.0, 1e-38, 0.0, math.inf):
        check(base, fmt, amax=amax)


@pytest.mark.parametrize("dtype", (*FLOATS, *INTEGERS))
@pytest.mark.parametrize("fmt", ["e4m3", "fp16", "mxfp4/even", "nvfp4"])
def test_dtypes(fmt: str, dtype: str) -> None:
    if dtype in FLOATS:
        with np.errstate(over="ignore"):
            x = sample(fmt, 3, 40, 4).astype(FLOATS[dtype])
        if dtype == "float64":
            x = np.concatenate([x, x * 1e-60, x + np.ldexp(x, -40)])
        x = np.concatenate([x, patterns(FLOATS[dtype], 80, 5).reshape(2, 40)])
    else:
        info = np.iinfo(dtype)
        x = np.random.default_rng(6).integers(info.min, info.max, (3, 35), dtype, endpoint=True)
        x[0] >>= info.bits // 2
        x[1, :5] = info.min, info.max, 0, 1, info.max // 2 + 1
        if info.bits == 64:  # ties of float32 and bfloat16 and their neighbours
            x[2, :6] = 16973823, 16973824, 16973825, 2**53 + 1, 2**62 + 2**38, 2**62 + 2**38 + 1
    check(x, fmt)
    if fmt in ("e4m3", "mxfp4/even") and dtype in ("float64", "int64"):
        check(x, fmt, rounding="sr", seed=1)
        check(x, fmt, rounding="rtp", more=True)


def test_all_bfloat16_inputs() -> None:
    """Every bfloat16 number, against the CPU kernels."""
    x = np.arange(1 << 16, dtype=np.uint16).view(BF16).reshape(256, 256)
    some = ("e4m3", "nvfp4/1level")  # the interpreter takes a second for each pass over them
    for fmt in some if backend.INTERPRETED else (*some, "e2m1", "e5m2", "mxfp4"):
        want = fpemu.encode(x, fmt)
        got = fpemu.encode(to_device(x), fmt, backend="triton")
        assert_same_parts(got, want, x, fmt)
        if fmt in some:
            got = fpemu.quantize(to_device(x), fmt, backend="triton")
            assert_same_bits(got, fpemu.quantize(x, fmt), x, fmt)


# A user's own formats ----------------------------------------------------------------------------

OWN = {
    "blocks of 24": formats.BlockFormat("a", formats.E2M1, (24,), formats.E8M0, "mx_floor"),
    "tiles of 3 x 5": formats.BlockFormat("b", formats.E4M3, (3, 5), formats.FP32, "fp8"),
    "unsigned scale": formats.BlockFormat(
        "c", formats.E2M1, (16,), formats.UE4M3, "nvfp4", tensor_scaled=True
    ),
    "wide element": formats.BlockFormat("d", formats.FP16, (8,), formats.E8M0, "mx_rceil"),
    "bfloat16 element": formats.BlockFormat("e", formats.BF16, (4,), formats.E8M0, "mx_even"),
    "one mantissa bit less": formats.Format("e3m0", 3, 0),
    "low exponents": formats.Format("e4m3low", 4, 3, bias=120, special="fn"),
}


@pytest.mark.parametrize("name", OWN)
def test_own_formats(name: str) -> None:
    x = block_data(9, 53, 2)
    check(x, OWN[name], more=True)
    check(x[:5], OWN[name], rounding="rtn", dtype=BF16)
    check(x[:5], OWN[name], rounding="sr", seed=3, overflow="nonsat")


# Stochastic rounding -----------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4", "nvfp4", "bf16", "fp8_block_e4m3/2d"])
def test_random_words(fmt: str) -> None:
    x = sample(fmt, 3, 48, 7)
    words = np.random.default_rng(8).integers(0, 1 << 32, x.shape, np.uint32)
    check(x, fmt, rounding="sr", random_bits=words)
    check(x, fmt, rounding="sr", seed=(1 << 64) - 1, stream=(1 << 63) + 5, offset=(1 << 34) + 4)
    check(x, fmt, rounding="sr", seed=5, offset=3, sr_bits=8)
    whole = ((40, 100), (30, 52))
    check(x, fmt, rounding="sr", seed=5, offset=whole, sr_bits=1)
    check(np.ascontiguousarray(x.T).T, fmt, rounding="sr", seed=5, offset=((9, 61), (3, 13)))


def test_shards_have_the_bits_of_the_whole() -> None:
    x = np.random.default_rng(1).standard_normal((4, 6, 64)).astype(np.float32)
    options = {"rounding": "sr", "seed": 11, "backend": "triton"}
    whole = fpemu.quantize(to_device(x), "mxfp4", **options)
    for start in ((0, 0, 0), (1, 2, 32), (3, 5, 0)):
        part = x[start[0] :, start[1] :, start[2] :]
        got = fpemu.quantize(to_device(part), "mxfp4", offset=(x.shape, start), **options)
        assert_same_bits(got, whole[start[0] :, start[1] :, start[2] :].contiguous())


# Layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4", "nvfp4/2d"])
def test_memory_layouts(fmt: str) -> None:
    x = sample(fmt, 12, 48, 3)
    for note, view in views(x):
        want = fpemu.encode(np.ascontiguousarray(view), fmt, axis=0)
        got = fpemu.encode(to_device(view), fmt, axis=0, backend="triton")
        assert_same_parts(got, want, note=note)
        want = fpemu.quantize(np.ascontiguousarray(view), fmt)
        got = fpemu.quantize(to_device(view), fmt, backend="triton")
        assert_same_bits(got, want, note=note)


@pytest.mark.parametrize("fmt", ["e2m1", "mxfp8_e4m3", "nvfp4", "fp8_block_e4m3/2d/fp32"])
def test_any_axis_any_order(fmt: str) -> None:
    x = np.random.default_rng(2).standard_normal((2, 2, 3, 18)).astype(np.float32)
    orders = ((2, 3, 1, 0), (3, 1, 0, 2), (0, 1, 2, 3))
    for order in orders[: 2 if backend.INTERPRETED else 3]:  # others see the plain order
        dense = np.ascontiguousarray(x.transpose(order))
        view = to_device(dense).permute([order.index(a) for a in range(4)])
        axes = range(order[0] % 2, 4, 2) if backend.INTERPRETED else range(4)
        for axis in axes[:1] if fmt == "e2m1" else axes:
            options = {"rounding": "sr", "seed": 4} if (axis // 2 + order[0]) % 2 else {}
            want = fpemu.encode(x, fmt, axis=axis, **options)
            got = fpemu.encode(view, fmt, axis=axis, backend="triton", **options)
            assert_same_parts(got, want, note=f"{fmt} {order} axis={axis}")


def test_more_axes_than_a_kernel_takes() -> None:
    """Every other element along six axes: a copy is made, of x and of the output."""
    x = np.random.default_rng(3).standard_normal((4, 4, 4, 4, 4, 6)).astype(np.float32)
    big = to_device(x)
    view = big[::2, ::2, ::2, ::2, ::2, ::2]
    dense = np.ascontiguousarray(x[::2, ::2, ::2, ::2, ::2, ::2])
    out = torch.zeros_like(big)
    for fmt in ("e4m3", "mxfp4"):
        for options in ({}, {"rounding": "sr", "seed": 9}):
            want = fpemu.quantize(dense, fmt, axis=2, **options)
            got = fpemu.quantize(view, fmt, axis=2, backend="triton", **options)
            assert_same_bits(got, want)
            target = out[::2, ::2, ::2, ::2, ::2, ::2]
            fpemu.quantize(view, fmt, axis=2, out=target, backend="triton", **options)
            assert_same_bits(target.contiguous(), want)
    offset = ((9,) * 6, (0,) * 6)
    with pytest.raises(fpemu.BackendError, match="more than four axes"):
        fpemu.quantize(view, "e4m3", rounding="sr", seed=1, offset=offset, backend="triton")


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4", "nvfp4", "nvfp4/2d", "fp8_tensor_e4m3"])
def test_empty_and_single(fmt: str) -> None:
    shapes = [(0,), (0, 5), (5, 0), (1, 1), (1, 33)]
    if "2d" in fmt:
        shapes = [s for s in shapes if len(s) == 2]
    else:
        check(np.float32(3.3).reshape(()), fmt)
    for shape in shapes:
        check(np.full(shape, 1.3, np.float32), fmt)


def test_in_place_and_overlapping() -> None:
    x = block_data(8, 64, 5)
    want = fpemu.quantize(x, "mxfp4")
    t = to_device(x)
    fpemu.quantize(t, "mxfp4", out=t, backend="triton")
    assert_same_bits(t, want)
    long = torch.zeros(600, device=DEVICE)
    long[:512] = to_device(x).view(-1)
    fpemu.quantize(long[:512].view(8, 64), "mxfp4", out=long[32:544].view(8, 64), backend="triton")
    assert_same_bits(long[32:544].view(8, 64), want)


def test_tiles_meet() -> None:
    """Sizes around those of a tile."""
    rng = np.random.default_rng(9)
    for shape in ((4097,), (2, 2047), (65, 33), (3, 2, 1030)):
        x = rng.standard_normal(shape).astype(np.float32)
        for fmt in ("e5m2", "nvfp4"):
            odd = (len(shape) + shape[0] + (fmt == "nvfp4")) % 2
            options = {"rounding": "sr", "seed": 1, "offset": 2} if odd else {}
            want = fpemu.encode(x, fmt, **options)
            got = fpemu.encode(to_device(x), fmt, backend="triton", **options)
            assert_same_parts(got, want, note=f"{fmt} {shape} {options}")


# Rotation ----------------------------------------------------------------------------------------


SIZES = [
    (2, "float16"), (16, "bfloat16"), (16, "float32"), (32, "float16"), (64, "bfloat16"), (128, "float32"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "dtype"), SIZES)
def test_rotated(size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    shape = (max(size, 16), max(size, 32))
    x = rng.standard_normal(shape).astype(FLOATS[dtype])
    x[0, :2] = np.nan, np.inf
    signs = fpemu.rotation.sign_vector("te" if size == 16 else "5", size)
    rotation = backend.Rotation(size, signs)
    ways = [(1, "nvfp4"), (0, "nvfp4"), (1, "nvfp4/2d"), (0, "mxfp4"), (1, "e4m3")]
    if backend.INTERPRETED:  # one of them for each size, and all over the sizes
        ways = [ways[SIZES.index((size, dtype)) % len(ways)]]
    for axis, fmt in ways:
        if fmt == "mxfp4" and size < 32:
            fmt = "nvfp4/1level"
        options = {"rounding": "sr", "seed": 3} if size == 16 else {}
        rotated = fpemu.hadamard(x, size=size, signs=signs, axis=axis)
        want = fpemu.encode(rotated, fmt, axis=axis, **options)
        ask = request(x, fmt, axis=axis, rounding=options.get("rounding", "rne"))
        ask.random = Random(3) if options else None
        given = to_device(x if axis == 1 else np.ascontiguousarray(x.T).T)
        assert_same_parts(backend.encode(replace(ask, x=given), rotation), want, note=fmt)
        out = torch.empty(shape, dtype=given.dtype, device=DEVICE)
        given = to_device(x if axis == 0 else np.ascontiguousarray(x.T).T)
        backend.quantize(replace(ask, x=given), out, rotation)
        assert_same_bits(out, fpemu.quantize(rotated, fmt, axis=axis, **options), note=fmt)


# Measures ----------------------------------------------------------------------------------------

_SUMS = ("sqnr_db", "rms_rel_error", "cosine", "bias")


@pytest.mark.parametrize(
    "fmt", ["e4m3", "e8m0", "nvfp4", "mxfp4", "fp8_block_e4m3/2d", "int8_tensor"]
)
def test_stats(fmt: str) -> None:
    """Counts and extremes are the CPU's; sums are added in another order."""
    for dtype in (np.float32, BF16, np.float64):
        with np.errstate(over="ignore"):
            x = sample(fmt, 20, 70, 3).astype(dtype)
        want = fpemu.stats(x, fmt).to_dict()
        got = fpemu.stats(to_device(x), fmt, backend="triton").to_dict()
        for name, value in want.items():
            if name in _SUMS:
                np.testing.assert_allclose(got[name], value, rtol=1e-9, err_msg=f"{fmt} {name}")
            else:
                assert got[name] == value or value != value, f"{fmt} {dtype} {name}"
    assert fpemu.stats(to_device(x[:0]), fmt, backend="triton").size == 0


# The verbs ---------------------------------------------------------------------------------------


def test_gradient() -> None:
    x = block_data(6, 64, 2, special=False)
    grads = []
    for t, name in ((give("torch", x), None), (to_device(x), "triton")):
        t = t.clone().requires_grad_()
        fpemu.quantize(t, "mxfp4", backend=name).backward(torch.ones(t.shape, device=t.device))
        grads.append(t.grad)
    assert_same_bits(grads[1], grads[0])
    assert 0 < int((grads[0] == 0).sum()) < grads[0].numel()


def test_negative_and_infinite_scales_decode() -> None:
    """Hand-made codes and scales: what no encoder writes has a value, too."""
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    row = fpemu.get_format("fp8_block_e4m3")
    for scale in (-1.7, np.inf, -np.inf, 1e-45, 3e38, np.nan):
        parts = Parts(codes, np.full((2, 1), scale, np.float32), None)
        tensors = Parts(to_device(parts.codes), to_device(parts.scales), None)
        for dtype in FLOATS:
            out = torch.empty((2, 128), dtype=getattr(torch, dtype), device=DEVICE)
            backend.decode(row, tensors, 1, out)
            want = oracle_values("fp8_block_e4m3", parts, 1, FLOATS[dtype])
            assert_same_bits(out, want, note=f"{scale} {dtype}")


def test_what_has_no_kernel_says_so() -> None:
    x = to_device(np.ones((2, 32), np.float32))
    row = formats.BlockFormat("long", formats.E2M1, (1 << 16,), formats.E8M0, "mx_floor")
    with pytest.raises(fpemu.BackendError, match="more than 32768 elements"):
        fpemu.quantize(x, row, backend="triton")


# These tests can fail ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "rounding", "field", "change"),
    [
        ("e4m3", "rne", "first", 1 << 23), ("e4m3", "rne", "limit", -(1 << 20)),
        ("e4m3", "sr", "step_bits", 1 << 23), ("e4m3", "rtp", "mask_positive", -1),
        ("bf16", "rne", "drop", -1), ("mxfp4", "rna", "minus_one", 1),
    ],
)  # fmt: skip
def test_a_planted_error_is_seen(
    fmt: str, rounding: str, field: str, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.concatenate([ties("e4m3")[:200], ties("bf16")[:200], specials()])[None]
    seeded = {"seed": 1} if rounding == "sr" else {}
    check(x, fmt, rounding=rounding, **seeded)
    honest = backend.row_of

    def planted(*args: Any, **rest: Any) -> Any:
        row = honest(*args, **rest)
        return row._replace(**{field: getattr(row, field) + change})

    monkeypatch.setattr(backend, "row_of", planted)
    with pytest.raises(AssertionError, match="differ"):
        check(x, fmt, rounding=rounding, **seeded)
