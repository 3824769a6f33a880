"""One body for every backend: codes, scales and values equal the oracle's, bit for bit.

The oracle is called directly, so the verbs' own handling of axes, shards and containers is checked
as well.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from helpers import (
    BF16,
    BLOCKS,
    DETERMINISTIC,
    ELEMENTS,
    FAST,
    OVERFLOWS,
    assert_same_bits,
    assert_same_parts,
    block_data,
    give,
    patterns,
    request,
    specials,
    ties,
    views,
)  # fmt: skip

import fpemu
from fpemu.backends import Parts, oracle
from fpemu.rng import Random

ONE_OF_EACH = ("e4m3", "e8m0", "int8", "mxfp4", "mxint8/even", "nvfp4", "nvfp4/2d",
               "fp8_tensor_e5m2", "fp8_block_e4m3", "fp8_block_e4m3/2d/fp32", "int8_tensor")  # fmt: skip
FLOATS = {"float16": np.float16, "bfloat16": BF16, "float32": np.float32, "float64": np.float64}
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def kind_of(dtype: np.dtype) -> str:
    return "bfloat16" if dtype == BF16 else dtype.name


def oracle_values(fmt: Any, parts: Parts, axis: int, dtype: Any) -> np.ndarray:
    out = np.empty(parts.codes.shape, dtype)
    bits = out.view(np.uint16) if dtype == BF16 else out
    oracle.decode(fpemu.get_format(fmt), parts, axis, bits, kind_of(np.dtype(dtype)))
    return out


def check(x: np.ndarray, fmt: Any, axis: int = -1, backends: Any = FAST, **options: Any) -> None:
    """encode, quantize and decode of every backend against one evaluation of the oracle."""
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
    want = oracle.encode(request(x, fmt, axis=place, **told))
    dtype = x.dtype if x.dtype.kind == "f" or x.dtype == BF16 else np.dtype(np.float32)
    values = oracle_values(fmt, want, place, dtype)
    for backend in backends:
        note = f"{fmt} {kind_of(x.dtype)}{x.shape} axis={axis} {backend}"
        given = give(backend, x)
        told = dict(options, axis=axis, backend=backend)
        if "random_bits" in told:
            told["random_bits"] = give(backend, told["random_bits"])
        got = fpemu.encode(given, fmt, **told)
        assert_same_parts(got, want, x, note)
        assert_same_bits(fpemu.quantize(given, fmt, **told), values, x, f"{note} quantize")
        assert_same_bits(fpemu.decode(got), values, x, f"{note} decode")


def clean(x: np.ndarray, fmt: str) -> np.ndarray:
    """Integers refuse NaN."""
    return np.where(np.isnan(x), x.dtype.type(1), x) if fmt.startswith("int8") else x


def sample(fmt: str, shape: tuple[int, ...], seed: int = 0, special: bool = True) -> np.ndarray:
    rows = math.prod(shape[:-1])
    return clean(block_data(rows, shape[-1], seed, special), fmt).reshape(shape)


@pytest.mark.parametrize("fmt", ELEMENTS)
def test_elements(fmt: str) -> None:
    near = ties(fmt if fmt not in ("fp32", "tf32") else "bf16")
    x = np.random.default_rng(0).choice(near, 200)
    x = clean(np.concatenate([x, specials(), patterns(np.float32, 60, 1)]), fmt)
    for rounding in DETERMINISTIC:
        for overflow in OVERFLOWS:
            check(x, fmt, rounding=rounding, overflow=overflow)
    check(x, fmt)


@pytest.mark.parametrize("fmt", BLOCKS)
def test_blocks(fmt: str) -> None:
    special = "tensor" not in fmt
    check(sample(fmt, (24, 70), 1, special), fmt)
    check(sample(fmt, (12, 33), 2, special), fmt, overflow="nonsat")
    for rounding in DETERMINISTIC[1:]:
        check(sample(fmt, (12, 33), 3, special), fmt, rounding=rounding)


@pytest.mark.parametrize("fmt", ["fp8_tensor_e4m3", "fp8_tensor_e5m2", "int8_tensor", "nvfp4"])
def test_tensor_scales(fmt: str) -> None:
    """Tensors whose amax is ordinary, tiny, huge, zero, infinite; NaN ignored; amax given."""
    x = sample(fmt, (3, 20), special=False)
    x = np.where(x == 0, 0, np.ldexp(np.float32(1), -3) * np.sign(x)) + x[:1] * 0
    base = np.float32([[1, -2.5, 3, 1e-3, 0, -0.0, 7, 448, -6, 0.3]])
    for scale in (1, 1e-30, 1e-38, 1e-44, 1e30, 7e35, 0):
        with np.errstate(over="ignore"):
            check(base * np.float32(scale), fmt)
    check(np.float32([[np.inf, 1, -np.inf, 500]]), fmt)
    if fmt != "int8_tensor":
        check(np.float32([[np.nan, 1, 3], [np.nan, np.nan, np.nan]]), fmt)
        check(np.full((2, 17), np.nan, np.float32), fmt)
    for amax in (2.0, 1e-38, 0.0, math.inf, 3e38, 0.1):
        check(base, fmt, amax=amax)
    check(x, fmt)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", ONE_OF_EACH)
def test_float_dtypes(fmt: str, dtype: str) -> None:
    with np.errstate(over="ignore"):
        x = sample(fmt, (10, 40), 4, special=False).astype(FLOATS[dtype])
    if dtype == "float64":
        x = np.concatenate([x, x * 1e-60, x + np.ldexp(x, -40)])
    x = np.concatenate([x, patterns(FLOATS[dtype], 80, 5).reshape(2, 40)])
    check(clean(x, fmt), fmt)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("fmt", (*ONE_OF_EACH, "fp32", "bf16", "fp16"))
def test_integer_dtypes(fmt: str, dtype: str) -> None:
    info = np.iinfo(dtype)
    x = np.random.default_rng(6).integers(info.min, info.max, (3, 35), dtype, endpoint=True)
    x[0] >>= info.bits // 2
    x[1, :5] = info.min, info.max, 0, 1, info.max // 2 + 1
    if info.bits == 64:  # ties of float32 and bfloat16 and their neighbours
        x[2, :6] = 16973823, 16973824, 16973825, 2**53 + 1, 2**62 + 2**38, 2**62 + 2**38 + 1
    check(x, fmt)
    check(x, fmt, rounding="rto")


@pytest.mark.parametrize("fmt", ONE_OF_EACH)
def test_axes_and_ranks(fmt: str) -> None:
    whole = fpemu.get_format(fmt)
    flat = getattr(whole, "block", None) is not None and len(whole.block) == 2
    shapes = [(2, 19, 3), (33, 2, 2), (2, 1, 2, 17)] if flat else [(37,), (2, 19, 3), (33, 2, 2, 1)]
    for shape in shapes:
        x = clean(block_data(math.prod(shape[:-1]), shape[-1], 7), fmt).reshape(shape)
        for axis in range(-x.ndim, x.ndim):
            check(x, fmt, axis)


@pytest.mark.parametrize("fmt", ONE_OF_EACH)
def test_short_blocks_and_empties(fmt: str) -> None:
    whole = fpemu.get_format(fmt)
    for shape in [(3, 1), (1, 15), (2, 17), (2, 129), (0, 8), (4, 0), (0, 0), (2, 0, 16), (1, 1)]:
        check(np.linspace(-3, 5, math.prod(shape), dtype=np.float32).reshape(shape), fmt)
    if getattr(whole, "is_2d", False):
        return
    for x in (np.float32(1.0625), np.float32(-0.0), np.zeros(0, np.float32), np.float32([2])):
        check(np.asarray(x), fmt)


@pytest.mark.parametrize("fmt", ONE_OF_EACH)
def test_memory_layouts(fmt: str) -> None:
    x = sample(fmt, (12, 34), 8)
    for name, view in views(x):
        before = view.copy()
        for backend in FAST:
            for axis in (0, 1):
                told = {"axis": axis, "backend": backend}
                note = f"{fmt} {name} axis={axis} {backend}"
                want = fpemu.encode(give(backend, before), fmt, **told)
                assert_same_parts(fpemu.encode(give(backend, view), fmt, **told), want, view, note)
                got = fpemu.quantize(give(backend, view), fmt, **told)
                assert_same_bits(got, want.decode(), view, note)
        assert_same_bits(view, before)  # x is never modified
    swapped = x.astype(">f4")
    got = fpemu.encode(swapped, fmt)
    assert_same_parts(got, fpemu.encode(x, fmt))
    assert_same_bits(fpemu.quantize(swapped, fmt).astype("<f4"), fpemu.quantize(x, fmt))


@pytest.mark.skipif("torch" not in FAST, reason="torch is not installed")
@pytest.mark.parametrize("fmt", ONE_OF_EACH)
def test_torch_layouts(fmt: str) -> None:
    import torch

    x = torch.from_numpy(sample(fmt, (12, 34), 9))
    want = fpemu.encode(x.numpy(), fmt, backend="oracle")
    wide = torch.zeros(12, 70)
    wide[:, 1:69:2] = x
    for view in (x, x.T.contiguous().T, wide[:, 1:69:2], x.clone().requires_grad_(True)):
        for backend in (None, *FAST):
            if backend == "numba" and view.requires_grad:
                continue
            got = fpemu.encode(view, fmt, backend=backend)
            assert_same_parts(got, want, x, f"{fmt} {backend}")
    check(x[:1].expand(5, 34).numpy(), fmt, backends=FAST)


@pytest.mark.parametrize("fmt", (*ONE_OF_EACH, "fp32", "fp16", "nvfp4/1level", "mxfp8_e5m2"))
def test_stochastic(fmt: str) -> None:
    x = sample(fmt, (5, 37), 10, special="tensor" not in fmt)
    check(x, fmt, rounding="sr", seed=0)
    check(x, fmt, rounding="sr", seed=2**64 - 1, stream=2**63 + 5, sr_bits=7)
    check(x, fmt, rounding="sr", seed=5, stream=1, offset=2**32 - 3)
    check(x, fmt, rounding="sr", seed=5, offset=2**34 - 7, overflow="nonsat")
    check(x, fmt, rounding="sr", seed=9, offset=((50, 100), (3, 61)))
    check(x.astype(np.float64) * (1 + 2.0**-30), fmt, rounding="sr", seed=3)
    with np.errstate(over="ignore"):
        check(x.astype(BF16), fmt, rounding="sr", seed=4)
    words = patterns(np.uint32, x.size, 11).reshape(x.shape)
    words[0] = 0xFFFFFFFF
    for sr_bits in (32, 16, 4, 1):
        check(x, fmt, rounding="sr", random_bits=words, sr_bits=sr_bits)
    check(np.arange(-60, 60).reshape(5, 24), fmt, rounding="sr", seed=8)
    check(x, fmt, axis=0, rounding="sr", seed=12)
    check(np.ascontiguousarray(x.T).T, fmt, rounding="sr", seed=13)


@pytest.mark.parametrize("fmt", ["e5m2", "mxfp8_e5m2", "nvfp4", "fp8_block_e4m3", "fp32"])
def test_output_dtypes(fmt: str) -> None:
    """Values are formed exactly and rounded once into the dtype asked for."""
    x = sample(fmt, (10, 40), 14)
    want = oracle.encode(request(x, fmt))
    for name, dtype in FLOATS.items():
        values = oracle_values(fmt, want, 1, dtype)
        for backend in FAST:
            given = give(backend, x)
            asked = dtype
            if backend == "torch":
                import torch

                asked = getattr(torch, name)
            got = fpemu.quantize(given, fmt, dtype=asked, backend=backend)
            assert_same_bits(got, values, x, f"{fmt} {name} {backend}")
            got = fpemu.encode(given, fmt, backend=backend).decode(asked)
            assert_same_bits(got, values, x, f"{fmt} {name} {backend} decode")


@pytest.mark.parametrize("fmt", [*ONE_OF_EACH, "nvfp4/1level", "mxfp8_e5m2/rceil"])
def test_decode_of_any_codes(fmt: str) -> None:
    """Codes and scales that no encoder writes decode too: NaN, infinities, every scale byte."""
    row = fpemu.get_format(fmt)
    if getattr(row, "is_2d", False) or row == fpemu.get_format("int8_tensor"):
        return
    rng = np.random.default_rng(15)
    x = np.zeros((256, 32), np.float32)
    for backend in FAST:
        encoded = fpemu.encode(give(backend, x), fmt, backend=backend)
        bits = getattr(row, "element", row).bits
        codes = rng.integers(0, 1 << bits, x.shape).astype(np.uint8)
        scales, tensor_scale = encoded.scales, encoded.tensor_scale
        host = None if scales is None else np.empty(tuple(scales.shape), np.uint8)
        if scales is not None and row.scale.bits <= 8:
            host[...] = np.arange(256).reshape(256, 1) % (1 << row.scale.bits)
            scales = give(backend, host)
        elif scales is not None:
            host = patterns(np.float32, 256, 16).reshape(tuple(scales.shape))
            scales = give(backend, host)
        parts = Parts(codes, host, None if tensor_scale is None else np.float32(0.37))
        given = fpemu.Encoded(
            give(backend, codes), scales,
            None if tensor_scale is None else give(backend, np.array(0.37, np.float32)),
            encoded.format, encoded.axis, encoded.dtype,
        )  # fmt: skip
        for name, dtype in FLOATS.items():
            asked = dtype
            if backend == "torch":
                import torch

                asked = getattr(torch, name)
            got = fpemu.decode(given, dtype=asked)
            assert_same_bits(
                got, oracle_values(fmt, parts, 1, dtype), codes, f"{fmt} {name} {backend}"
            )


def test_user_formats() -> None:
    """A row of one's own works everywhere: odd widths, biases, and every kind of special codes."""
    rows = [
        fpemu.Format("e3m2fn", 3, 2, special="fn"),
        fpemu.Format("e5m3", 5, 3, special="ieee"),
        fpemu.Format("e2m3fnuz", 2, 3, special="fnuz"),
        fpemu.Format("e4m0", 4, 0),
        fpemu.Format("e8m12", 8, 12, special="ieee"),
        fpemu.Format("e4m3b20", 4, 3, bias=20),
        fpemu.Format("ue5m3", 5, 3, special="fn", signed=False),
        fpemu.Format("int4", 0, 3, bias=-2),
        fpemu.Format("int12", 0, 11, bias=5),
        fpemu.Format("int24", 0, 23, bias=0),
        fpemu.Format("e1m0", 1, 0),
        fpemu.Format("e1m3", 1, 3, special="ieee"),
        fpemu.Format("e4m0fnuz", 4, 0, special="fnuz"),
        fpemu.Format("e5m10fnuz", 5, 10, special="fnuz"),
        fpemu.Format("ue2m1", 2, 1, signed=False),
        fpemu.Format("ue5m0", 5, 0, bias=20, special="fn", signed=False, has_zero=False),
    ]
    x = np.concatenate([ties("e4m3"), ties("e2m1"), patterns(np.float32, 200, 17)])
    x = x[np.random.default_rng(18).permutation(len(x))[:250]]
    for row in rows:
        data = x[~np.isnan(x)] if row.is_integer else x
        for rounding in DETERMINISTIC:
            check(data, row, rounding=rounding, overflow="nonsat")
        check(data, row, rounding="sr", seed=1)
        check(data.astype(np.float64), row)


def test_user_block_formats() -> None:
    get = fpemu.get_format
    rows = [
        fpemu.BlockFormat("mx8", get("e3m4"), (8,), get("e8m0"), "mx_rceil"),
        fpemu.BlockFormat("mx_tiles", get("e2m3"), (4, 6), get("e8m0"), "mx_even"),
        fpemu.BlockFormat("nv32", get("e2m1"), (32,), get("e4m3"), "nvfp4", tensor_scaled=True),
        fpemu.BlockFormat("fp8_7", get("e5m2"), (7,), get("fp32"), "fp8"),
        fpemu.BlockFormat("mx_fp16", get("fp16"), (16,), get("e8m0"), "mx_floor"),
        fpemu.BlockFormat("mx_bf16", get("bf16"), (16,), get("e8m0"), "mx_floor"),
        fpemu.BlockFormat("nv_e3m2", get("e3m2"), (16,), get("e5m2"), "nvfp4", tensor_scaled=True),
        fpemu.BlockFormat("nv_ue4m3", get("e2m1"), (16,), get("ue4m3"), "nvfp4_1level"),
    ]
    x = block_data(20, 45, 19)
    for row in rows:
        check(x, row)
        check(x, row, axis=0, rounding="rtn")
        check(x.astype(np.float64) * 1.0000001, row)
        with np.errstate(over="ignore"):
            check(x.astype(BF16), row)


def test_threads_and_chunks_do_not_matter() -> None:
    """Large enough for every backend to split the work; pieces equal the whole."""
    x = block_data(1500, 256, 20)
    words = {"rounding": "sr", "seed": 77, "stream": 3}
    for fmt in ("e4m3", "mxfp4", "nvfp4/1level", "fp8_block_e4m3"):
        for backend in FAST:
            given = give(backend, x)
            whole = fpemu.encode(given, fmt, backend=backend)
            parts = [
                fpemu.encode(given[i : i + 100], fmt, backend=backend) for i in range(0, 1500, 100)
            ]
            got = np.concatenate([np.asarray(p.codes) for p in parts])
            assert_same_bits(got, np.asarray(whole.codes), x, f"{fmt} {backend}")
            drawn = fpemu.encode(given, fmt, backend=backend, **words)
            shard = fpemu.encode(
                given[300:307, :], fmt, backend=backend, offset=(x.shape, (300, 0)), **words
            )
            assert_same_bits(np.asarray(shard.codes), np.asarray(drawn.codes)[300:307])
            ranged = fpemu.encode(
                given[300:307, :], fmt, backend=backend, offset=300 * 256, **words
            )
            assert_same_bits(np.asarray(ranged.codes), np.asarray(drawn.codes)[300:307])


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4", "nvfp4", "fp8_block_e4m3"])
def test_dense_arrays_in_any_axis_order(fmt: str) -> None:
    """Stored in another axis order, the words still follow the logical C order."""
    x = sample(fmt, (6, 19, 35), 21)
    words = patterns(np.uint32, x.size, 22).reshape(x.shape)
    for order in itertools.permutations(range(3)):
        back = np.argsort(order)
        view, drawn = (np.ascontiguousarray(a.transpose(order)).transpose(back) for a in (x, words))
        for backend in FAST:
            for axis, options in enumerate(
                ({}, {"rounding": "sr", "seed": 1}, {"rounding": "sr", "random_bits": words})
            ):
                told = dict(options, axis=axis, backend=backend)
                if "random_bits" in told:
                    told["random_bits"] = give(backend, told["random_bits"])
                want = fpemu.encode(give(backend, x), fmt, **told)
                if "random_bits" in told:
                    told["random_bits"] = give(backend, drawn)
                note = f"{fmt} {order} axis={axis} {backend} {[*options]}"
                assert_same_parts(fpemu.encode(give(backend, view), fmt, **told), want, x, note)
                got = fpemu.quantize(give(backend, view), fmt, **told)
                assert_same_bits(got, want.decode(), x, note)


@pytest.mark.parametrize("fmt", ONE_OF_EACH)
def test_the_oracle_serves_the_verbs(fmt: str) -> None:
    x = sample(fmt, (4, 34), 23)
    check(x, fmt, backends=("oracle",))
    check(x, fmt, 0, backends=("oracle",), rounding="sr", seed=1, offset=((9, 50), (2, 3)))
    check(x.astype(BF16), fmt, backends=("oracle",), overflow="nonsat")
