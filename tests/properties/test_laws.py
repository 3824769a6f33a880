"""Laws that hold for every input, searched by hypothesis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import BLOCKS, DETERMINISTIC, ELEMENTS, FAST, assert_same_bits, block_data, give
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fpemu

BACKEND = FAST[0] if FAST else "oracle"
MX = [name for name in BLOCKS if name.startswith("mx")]
MIRROR = {"rtp": "rtn", "rtn": "rtp"}

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
any_float = st.floats(width=32)
elements, roundings = st.sampled_from(ELEMENTS), st.sampled_from(DETERMINISTIC)
overflows = st.sampled_from(["sat", "nonsat"])
signed = st.sampled_from([n for n in ELEMENTS if fpemu.get_format(n).signed])
flat = [n for n in BLOCKS if "2d" not in n]


def arrays(values: Any = floats, least: int = 1, most: int = 70) -> Any:
    return hnp.arrays(np.float32, st.integers(least, most), elements=values)


def tables(values: Any = floats) -> Any:
    shape = st.tuples(st.integers(1, 5), st.integers(1, 70))
    return hnp.arrays(np.float32, shape, elements=values)


def clean(x: np.ndarray, fmt: str) -> np.ndarray:
    return np.where(np.isnan(x), np.float32(0), x) if fmt.startswith("int8") else x


@given(arrays(any_float), elements, roundings, overflows)
def test_quantize_is_decode_of_encode(
    x: np.ndarray, fmt: str, rounding: str, overflow: str
) -> None:
    x, options = clean(x, fmt), {"rounding": rounding, "overflow": overflow}
    want = fpemu.decode(fpemu.encode(x, fmt, **options))
    assert_same_bits(fpemu.quantize(x, fmt, **options), want, x)


@given(tables(any_float), st.sampled_from(BLOCKS), roundings)
def test_quantize_is_decode_of_encode_in_blocks(x: np.ndarray, fmt: str, rounding: str) -> None:
    x = clean(x, fmt)
    want = fpemu.decode(fpemu.encode(x, fmt, rounding=rounding))
    assert_same_bits(fpemu.quantize(x, fmt, rounding=rounding), want, x)


@given(arrays(any_float), elements, roundings)
def test_values_stay(x: np.ndarray, fmt: str, rounding: str) -> None:
    """What lies on the grid is a fixed point of every rounding, stochastic included; except NaN in
    formats without one."""
    first = fpemu.encode(clean(x, fmt), fmt, overflow="nonsat")
    values = first.decode()
    again = fpemu.encode(values, fmt, rounding=rounding, overflow="nonsat")
    assert_same_bits(again.codes, first.codes, x)
    drawn = fpemu.encode(values, fmt, rounding="sr", seed=1, overflow="nonsat")
    assert_same_bits(drawn.codes, first.codes, x)


@given(tables(), st.sampled_from([n for n in MX if n.count("/") == 0]))
def test_floor_scaled_blocks_stay(x: np.ndarray, fmt: str) -> None:
    """Under the OCP rule the amax keeps its binade, so a second pass changes nothing."""
    if fmt == "mxint8":  # rounding may carry 1.99 up to 2, which saturates; still one binade
        x = np.clip(x, -1e30, 1e30)
    once = fpemu.quantize(x, fmt)
    assert_same_bits(fpemu.quantize(once, fmt), once, x)


@given(arrays(floats, 2), elements, roundings, overflows)
def test_monotone(x: np.ndarray, fmt: str, rounding: str, overflow: str) -> None:
    x = np.sort(x)
    y = fpemu.quantize(x, fmt, rounding=rounding, overflow=overflow)
    y = y[~np.isnan(y)]  # overflow and negative values of unsigned formats
    assert (np.diff(y) >= 0).all() if np.isfinite(y).all() else (y[1:] >= y[:-1]).all()


@given(arrays(), signed, roundings, overflows)
def test_odd_symmetry(x: np.ndarray, fmt: str, rounding: str, overflow: str) -> None:
    plus = fpemu.quantize(x, fmt, rounding=rounding, overflow=overflow)
    minus = fpemu.quantize(-x, fmt, rounding=MIRROR.get(rounding, rounding), overflow=overflow)
    same = np.isnan(plus) & np.isnan(minus) | (plus == -minus)
    assert same.all()


@given(tables(), st.sampled_from(flat))
def test_odd_symmetry_in_blocks(x: np.ndarray, fmt: str) -> None:
    plus, minus = fpemu.encode(x, fmt), fpemu.encode(-x, fmt)
    if plus.scales is not None:
        assert_same_bits(minus.scales, plus.scales, x)
    assert (plus.decode() == -minus.decode()).all()


@given(arrays(st.floats(-1000, 1000, width=32)), elements, roundings)
def test_the_error_is_at_most_a_step(x: np.ndarray, fmt: str, rounding: str) -> None:
    row = fpemu.get_format(fmt)
    inside = x[(np.abs(x) <= row.max) & ((x > 0) if not row.signed else True)]
    inside = inside[inside >= row.min_normal] if not row.has_zero else inside
    y = fpemu.quantize(inside, fmt, rounding=rounding).astype(np.float64)
    size = np.maximum(np.abs(inside.astype(np.float64)), row.min_normal)
    step = np.exp2(np.floor(np.log2(size))) * row.eps if not row.is_integer else row.eps
    share = 0.5 if rounding.startswith("rn") and rounding != "rtn" else 1.0
    assert (np.abs(y - inside) <= share * step).all()


@given(tables(st.floats(-8, 8, width=32)), st.sampled_from(MX), st.integers(-60, 60))
def test_powers_of_two_pass_through_mx(x: np.ndarray, fmt: str, k: int) -> None:
    scaled = np.ldexp(x, k)
    x = np.ldexp(scaled, -k)  # drops what the scaling could not hold
    a, b = fpemu.encode(x, fmt), fpemu.encode(scaled, fmt)
    inside = (a.scales > 0) & (b.scales > 0)
    assert ((b.scales.astype(int) - a.scales == k) | ~inside).all()
    inside = np.repeat(inside, 32, axis=-1)[:, : x.shape[1]]
    assert_same_bits(np.where(inside, b.codes, 0), np.where(inside, a.codes, 0), x)


@given(arrays(any_float), elements, st.integers(0, 2**64 - 1), st.integers(1, 32), overflows)
def test_stochastic_gives_a_neighbour(
    x: np.ndarray, fmt: str, seed: int, sr_bits: int, overflow: str
) -> None:
    x = clean(x, fmt)
    options = {"overflow": "sat"}
    drawn = fpemu.quantize(x, fmt, rounding="sr", seed=seed, sr_bits=sr_bits, **options)
    down = fpemu.quantize(x, fmt, rounding="rtn", **options)
    up = fpemu.quantize(x, fmt, rounding="rtp", **options)
    assert ((drawn == down) | (drawn == up) | np.isnan(drawn) & np.isnan(down)).all()
    ends = fpemu.quantize(x, fmt, rounding="sr", seed=seed, overflow=overflow)
    assert (np.isnan(ends) | np.isinf(ends) | (ends == down) | (ends == up) | (seed >= 0)).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "fp16", "bf16", "int8"])
def test_stochastic_is_unbiased(fmt: str) -> None:
    """The mean of many draws is x, to five standard errors."""
    n = 1 << 18
    for value in (0.3, -1.07, 2.9, 5.001):
        x = np.full(n, value, np.float32)
        y = fpemu.quantize(x, fmt, rounding="sr", seed=7).astype(np.float64)
        spread = y.std() / math.sqrt(n)
        assert abs(y.mean() - float(x[0])) <= 5 * spread + 1e-12
        assert len(np.unique(y)) == 2


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_few_random_bits_bias_toward_zero(nbits: int) -> None:
    """With n bits the fraction is cut to n bits: exactly floor(f 2^n) of 2^n words move away."""
    words = (np.arange(1 << nbits, dtype=np.uint32) << np.uint32(32 - nbits)) | np.uint32(
        0xFFFFFF >> nbits
    )
    for eighths in range(8):
        x = np.full(len(words), 4 + eighths / 4, np.float32)  # E2M1: between 4 and 6
        y = fpemu.quantize(x, "e2m1", rounding="sr", random_bits=words, sr_bits=nbits)
        assert (y == 6).sum() == math.floor(eighths / 8 * 2**nbits)


@given(tables(any_float), st.sampled_from(flat), roundings)
def test_the_axis_moves_with_the_data(x: np.ndarray, fmt: str, rounding: str) -> None:
    x = clean(x, fmt)
    a = fpemu.encode(x, fmt, axis=1, rounding=rounding)
    b = fpemu.encode(np.ascontiguousarray(x.T), fmt, axis=0, rounding=rounding)
    c = fpemu.encode(x.T, fmt, axis=0, rounding=rounding)
    for other in (b, c):
        assert_same_bits(np.ascontiguousarray(other.codes.T), a.codes, x)
        if a.scales is not None:
            assert_same_bits(np.ascontiguousarray(other.scales.T), a.scales, x)


@given(tables(any_float), st.sampled_from(["e4m3", "mxfp4", "nvfp4/1level", "fp8_block_e4m3"]),
       st.integers(0, 2**40), st.integers(0, 2**64 - 1))  # fmt: skip
def test_shards_are_parts_of_the_whole(x: np.ndarray, fmt: str, offset: int, seed: int) -> None:
    """Rows as ranges of the flattened whole, and as shards: the bits of the whole."""
    options = {"rounding": "sr", "seed": seed}
    whole = fpemu.encode(x, fmt, offset=offset, **options)
    rows, cols = x.shape
    for row in range(rows):
        part = fpemu.encode(x[row], fmt, offset=offset + row * cols, **options)
        assert_same_bits(part.codes, whole.codes[row], x[row])
    whole = fpemu.encode(x, fmt, **options)
    half = fpemu.encode(x[rows // 2 :], fmt, offset=((rows, cols), (rows // 2, 0)), **options)
    assert_same_bits(half.codes, whole.codes[rows // 2 :])
    if fmt == "e4m3" and cols > 1:
        right = fpemu.encode(x[:, 1:], fmt, offset=((rows, cols), (0, 1)), **options)
        assert_same_bits(right.codes, np.ascontiguousarray(whole.codes[:, 1:]))


@given(tables(any_float), st.sampled_from(flat), st.integers(1, 69))
def test_zeros_beyond_the_end_change_nothing(x: np.ndarray, fmt: str, more: int) -> None:
    """A short block is exactly a zero-padded one."""
    x = clean(x, fmt)
    padded = np.concatenate([x, np.zeros((len(x), more), np.float32)], axis=1)
    a, b = fpemu.encode(x, fmt), fpemu.encode(padded, fmt)
    assert_same_bits(np.ascontiguousarray(b.codes[:, : x.shape[1]]), a.codes, x)
    if a.scales is not None:
        assert_same_bits(np.ascontiguousarray(b.scales[:, : a.scales.shape[1]]), a.scales)


@given(
    tables(any_float),
    st.sampled_from([*ELEMENTS, *BLOCKS]),
    st.sampled_from([*DETERMINISTIC, "sr"]),
)
def test_numpy_and_torch_agree(x: np.ndarray, fmt: str, rounding: str) -> None:
    pytest.importorskip("torch")
    x = clean(x, fmt)
    options = {"rounding": rounding} | ({"seed": 3} if rounding == "sr" else {})
    want = fpemu.encode(x, fmt, **options)
    for backend in FAST:
        got = fpemu.encode(give("torch", x), fmt, backend=backend, **options)
        assert_same_bits(got.codes, want.codes, x, f"{fmt} {backend}")
        if want.scales is not None:
            assert_same_bits(got.scales, want.scales, note=f"{fmt} {backend}")


def test_the_tensor_amax_may_be_given() -> None:
    """`amax` = the data's own changes nothing; a larger one gives another scale."""
    x = block_data(20, 64, 3, special=False)[:, :48].copy()
    own = float(np.abs(x).max())
    for fmt in ("nvfp4", "nvfp4/2d", "fp8_tensor_e4m3", "int8_tensor"):
        a, b = fpemu.encode(x, fmt), fpemu.encode(x, fmt, amax=own)
        assert_same_bits(b.codes, a.codes)
        assert_same_bits(b.tensor_scale, a.tensor_scale)
        wider = fpemu.encode(np.clip(x, -1e30, 1e30), fmt, amax=1e31)
        assert float(wider.tensor_scale) > 0
