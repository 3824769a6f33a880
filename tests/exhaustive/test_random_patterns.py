"""Random bit patterns, ties and their neighbours, integers and stochastic words, in bulk."""

from __future__ import annotations

import os
from functools import lru_cache

import numpy as np
import pytest
import reference
from helpers import (
    BF16,
    BLOCKS,
    DETERMINISTIC,
    ELEMENTS,
    FAST,
    OVERFLOWS,
    as_numpy,
    assert_same_bits,
    assert_same_parts,
    block_data,
    decoded,
    give,
    patterns,
    ties,
)  # fmt: skip

import fpemu
from fpemu.backends import Parts

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def _data(name: str, dtype: str) -> np.ndarray:
    near = ties(name if name not in ("fp32", "tf32") else "bf16", dtype)
    x = np.concatenate([patterns(dtype, 1 << 13, 11), near])
    return x[~np.isnan(x)] if name == "int8" else x


# What the reference says, once for all backends: they are the parameter that changes fastest.


@lru_cache(maxsize=16)
def _blocks(
    name: str, rows: int, cols: int, seed: int, rounding: str
) -> tuple[np.ndarray, Parts, np.ndarray]:
    fmt = fpemu.get_format(name)
    x = block_data(rows, cols, seed, special="tensor" not in name)
    want = reference.encode(x, fmt, rounding)
    return x, want, reference.decode(want, fmt)


@lru_cache(maxsize=4)
def _blocks_of_16_bits(name: str, row: str) -> tuple[np.ndarray, Parts, np.ndarray]:
    fmt, dtype = fpemu.get_format(name), {"fp16": np.dtype(np.float16), "bf16": BF16}[row]
    with np.errstate(over="ignore"):
        x = block_data(150, 100, 31, special="tensor" not in name)
        x = np.concatenate([x, np.ldexp(x[::3], -12)]).astype(dtype)
    if name == "int8_tensor":
        x = x[~np.isnan(x.astype(np.float32)).any(axis=1)]
    want = reference.encode(x.astype(np.float32), fmt)
    values = reference.decode(want, fmt, fpemu.get_format(row)).astype(np.uint16).view(dtype)
    return x, want, values


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_floats(name: str, dtype: str, backend: str) -> None:
    fmt, x = fpemu.get_format(name), _data(name, dtype)
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64)
    given = give(backend, x)
    for rounding in DETERMINISTIC:
        for overflow in OVERFLOWS:
            options = {"rounding": rounding, "overflow": overflow, "backend": backend}
            want = reference.cast(exact, fmt, rounding, overflow)
            note = f"{name} {rounding} {overflow}"
            assert_same_bits(fpemu.encode(given, name, **options).codes, want, x, note)
            got = fpemu.quantize(given, name, **options)
            assert_same_bits(got, decoded(fmt, want, dtype), x, note)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic(name: str, backend: str) -> None:
    fmt = fpemu.get_format(name)
    for dtype in ("float16", "float32", "float64"):
        x = _data(name, dtype)
        with np.errstate(invalid="ignore"):
            exact = x.astype(np.float64)
        words = patterns(np.uint32, len(x), 12)
        words[::5] = np.where(words[::5] & 1, 0xFFFFFFFF, 0)
        for nbits in (32, 31, 8, 1):
            for overflow in OVERFLOWS if nbits == 32 else ("sat",):
                want = reference.cast(exact, fmt, "sr", overflow, words, nbits)
                options = {"random_bits": give(backend, words), "sr_bits": nbits}
                options |= {"rounding": "sr", "overflow": overflow, "backend": backend}
                note = f"{name} {dtype} sr_bits={nbits} {overflow}"
                given = give(backend, x)
                assert_same_bits(fpemu.encode(given, name, **options).codes, want, x, note)
                got = fpemu.quantize(given, name, **options)
                assert_same_bits(got, decoded(fmt, want, dtype), x, note)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_integers(name: str, dtype: str, backend: str) -> None:
    """Up to 2**53 here; larger integers meet the oracle in `tests/backends`."""
    info = np.iinfo(dtype)
    low, high = max(info.min, -(2**53)), min(info.max, 2**53)
    rng = np.random.default_rng(13)
    x = rng.integers(low, high, 1000, dtype, endpoint=True)
    small = np.clip(rng.integers(-600, 600, 500), low, high).astype(dtype)
    x = np.concatenate([x, small, x >> rng.integers(0, info.bits, 1000).astype(dtype)])
    fmt, given = fpemu.get_format(name), give(backend, x)
    for rounding in DETERMINISTIC:
        for overflow in OVERFLOWS:
            options = {"rounding": rounding, "overflow": overflow, "backend": backend}
            want = reference.cast(x.astype(np.float64), fmt, rounding, overflow)
            note = f"{name} {rounding} {overflow}"
            assert_same_bits(fpemu.encode(given, name, **options).codes, want, x, note)
            got = fpemu.quantize(given, name, **options)
            assert_same_bits(got, decoded(fmt, want, np.float32), x, note)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, backend: str) -> None:
    for seed, (rows, cols) in enumerate([(200, 130), (33, 500), (2000, 16), (64, 256)]):
        for rounding in ("rne", "rtn", "rto"):
            x, want, values = _blocks(name, rows, cols, seed, rounding)
            given = give(backend, x)
            got = fpemu.encode(given, name, rounding=rounding, backend=backend)
            assert_same_parts(got, want, x, f"{name} {rounding}")
            assert_same_bits(fpemu.decode(got), values, x, f"{name} {rounding} decode")
            got = fpemu.quantize(given, name, rounding=rounding, backend=backend)
            assert_same_bits(got, values, x, f"{name} {rounding} quantize")


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_16_bit_floats(name: str, backend: str) -> None:
    """Ties that float32 noise misses; the exact value rounded once into x's own dtype."""
    for row in ("fp16", "bf16"):
        x, want, values = _blocks_of_16_bits(name, row)
        given = give(backend, x)
        assert_same_parts(fpemu.encode(given, name, backend=backend), want, x, name)
        assert_same_bits(fpemu.quantize(given, name, backend=backend), values, x, name)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", [n for n in BLOCKS if "2d" not in n])
def test_blocks_along_the_first_axis(name: str, backend: str) -> None:
    fmt = fpemu.get_format(name)
    for shape in ((90, 300), (500, 33)):
        x = block_data(*shape, 32, special="tensor" not in name)
        want = reference.encode(x, fmt)
        values = reference.decode(want, fmt)
        for turned in (np.ascontiguousarray(x.T), x.T):
            given = give(backend, turned)
            got = fpemu.encode(given, name, axis=0, backend=backend)
            assert_same_bits(as_numpy(got.codes).T, want.codes, x, name)
            if want.scales is not None:
                assert_same_bits(as_numpy(got.scales).T, want.scales, note=name)
            got = fpemu.quantize(given, name, axis=0, backend=backend)
            assert_same_bits(as_numpy(got).T, values, x, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_many_floats(name: str, dtype: str, backend: str) -> None:
    """Tens of millions of patterns, rounding to nearest."""
    fmt = fpemu.get_format(name)
    for seed in range(16):
        x = patterns(dtype, 1 << 20, 100 + seed)
        x = x[~np.isnan(x)] if name == "int8" else x
        with np.errstate(invalid="ignore"):
            want = reference.cast(x.astype(np.float64), fmt, "rne", fmt.overflow)
        given = give(backend, x)
        assert_same_bits(fpemu.encode(given, name, backend=backend).codes, want, x)
        got = fpemu.quantize(given, name, backend=backend)
        assert_same_bits(got, decoded(fmt, want, dtype), x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", BLOCKS)
def test_many_blocks(name: str, backend: str) -> None:
    fmt = fpemu.get_format(name)
    for seed in range(40):
        x = block_data(2048, 256, 200 + seed, special="tensor" not in name)
        want = reference.encode(x, fmt)
        assert_same_parts(fpemu.encode(give(backend, x), name, backend=backend), want, x)
        values = fpemu.quantize(give(backend, x), name, backend=backend)
        assert_same_bits(values, reference.decode(want, fmt), x)


@pytest.mark.exhaustive
@pytest.mark.skipif(
    os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 10 << 30,
    reason="needs 10 GB of free memory",
)
@pytest.mark.parametrize("backend", [b for b in FAST if b == "numba"])
def test_more_than_2_to_31_elements(backend: str) -> None:
    """Indices are 64-bit throughout (BC-179)."""
    n = (1 << 31) + 32
    x = np.tile(np.float16([1.0625, -3.3, 448, 0.001]), n // 4)
    codes = fpemu.encode(x, "e4m3", backend=backend).codes
    want = np.uint8([0x38, 0xC5, 0x7E, 0x01])
    for begin in range(0, n, 1 << 28):
        part = codes[begin : begin + (1 << 28)].reshape(-1, 4)
        assert (part == want).all(), begin
    del codes
    drawn = fpemu.encode(x[-64:], "e4m3", rounding="sr", seed=1, offset=n - 64, backend=backend)
    whole = fpemu.encode(x, "e4m3", rounding="sr", seed=1, backend=backend)
    assert_same_bits(whole.codes[-64:], drawn.codes)
