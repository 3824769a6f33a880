"""`fpemu.cvt_rs`: each form against exact rationals, with the routing typed from its description."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from helpers import BF16, assert_same_bits, give, specials, ties

import fpemu
from fpemu.cvt import FORMS, TE_SOFTWARE, rs_words

PTX = ("f16x2", "bf16x2", "e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4", "e2m1x4")
MASK = {"f16x2": 0x1FFF1FFF}


def reverse(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


def slice_of(form: str, word: int, lane: int) -> tuple[int, int]:
    """The lane's random number and its bits; lane 0 is the lowest of the packed result."""
    half = word >> 16 if lane >= (1 if form in ("f16x2", "bf16x2") else 2) else word & 0xFFFF
    if form == "f16x2":
        return half & 0x1FFF, 13
    if form == "bf16x2":
        return half, 16
    if form == "e2m1x4":  # bytes 2 and 0 for the lower pair, 3 and 1 for the upper
        b = [word >> 8 * k & 0xFF for k in range(4)]
        half = b[3] << 8 | b[1] if lane >= 2 else b[2] << 8 | b[0]
    return (reverse(half, 16) if lane % 2 else half), 16


def grid(element: str) -> list[Fraction]:
    """Non-negative finite values, ascending."""
    values = fpemu.get_format(element).values()
    return [Fraction(float(v)) for v in np.unique(np.abs(values[np.isfinite(values)]))]


def rounded(element: str, values: list[Fraction], x: float, r: int, bits: int) -> float:
    """The magnitude goes away from zero iff fraction + r / 2**bits >= 1."""
    fmt = fpemu.get_format(element)
    if math.isnan(x):
        return math.nan if fmt.nan_code is not None else fmt.max
    top, saturates = values[-1], element not in ("fp16", "bf16")
    if math.isinf(x):
        return math.copysign(float(top) if saturates else math.inf, x)
    a = abs(Fraction(x))
    if saturates and a >= top:
        return math.copysign(float(top), x)
    position = 0 if a < values[1] else max(k for k, v in enumerate(values) if v <= a)
    low = values[position]
    step = values[position + 1] - low if low < top else low - values[position - 1]
    away = (a - low) / step + Fraction(r, 1 << bits) >= 1
    result = low + step if away else low
    if low == top and a >= top + step:
        result = top + step
    return math.copysign(math.inf if result > top else float(result), x)


def hard(element: str, seed: int) -> np.ndarray:
    """Grid points, midpoints and neighbours of a format, every exponent, specials."""
    rng = np.random.default_rng(seed)
    near = ties(element)
    few = near[rng.integers(0, len(near), 300)]
    wide = np.ldexp(rng.standard_normal(300), rng.integers(-30, 18, 300))
    inside = fpemu.get_format(element).max * rng.random(300) ** 4
    x = np.concatenate([few, wide, inside, specials()]).astype(np.float32)
    return x[: len(x) // 4 * 4]


# Against rationals -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", PTX[2:])
def test_against_rationals(form: str) -> None:
    element, group = FORMS[form].element, FORMS[form].group
    values = grid(element)
    x = hard(element, 1)
    words = np.random.default_rng(2).integers(0, 1 << 32, len(x) // group, np.uint32)
    got = fpemu.cvt_rs(x, form, words)
    want = [
        rounded(element, values, float(v), *slice_of(form, int(words[i // group]), i % group))
        for i, v in enumerate(x)
    ]
    assert_same_bits(got, np.float32(want), x)
    assert_same_bits(fpemu.cvt_rs(x, element, words), got, x, "by the element's name")


@pytest.mark.parametrize("form", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("overflow", ["sat", "nonsat"])
def test_sixteen_bit_forms_are_an_integer_addition(form: str, overflow: str) -> None:
    """PTX: add the random bits to the discarded mantissa bits; the carry rounds away from zero."""
    keep = 16 if form == "bf16x2" else 13
    rng = np.random.default_rng(3)
    x = np.ldexp(rng.standard_normal(4000), rng.integers(-13, 15, 4000)).astype(np.float32)
    x = np.concatenate([x, np.float32([65504, 65519, -65535.9, 1, -0.0, 0, 1.9999999, -3e-5 * 4])])
    x[np.abs(x) < 2.0**-14] = 0  # fp16's subnormals: the next test
    words = rng.integers(0, 1 << 32, len(x) // 2, np.uint32) & np.uint32(MASK.get(form, 0xFFFFFFFF))
    got = fpemu.cvt_rs(x, form, words, overflow=overflow)
    for i, (v, y) in enumerate(zip(x, got, strict=True)):
        bits, (r, n) = int(v.view(np.uint32)), slice_of(form, int(words[i // 2]), i % 2)
        assert n == keep
        total = np.uint32((bits + r) >> keep << keep).view(np.float32)
        top = fpemu.get_format(FORMS[form].element).max
        if abs(total) > top:
            total = np.copysign(np.float32(top if overflow == "sat" else np.inf), v)
        assert y.view(np.uint32) == total.view(np.uint32), (i, v, y, total)


def test_half_subnormals_use_the_top_bits() -> None:
    """2**-25 is half of fp16's smallest step: it goes up for slices of 2**12 and more."""
    x = np.full(4, 2.0**-25, np.float32)
    words = np.uint32([0x0FFF1000, 0x10000FFF])
    assert (fpemu.cvt_rs(x, "f16x2", words) == np.float32([2**-24, 0, 0, 2**-24])).all()


def test_one_bit_at_a_time() -> None:
    """Which lanes a set bit of the word reaches, and its weight there."""
    for form in PTX:
        for bit in range(32):
            if not MASK.get(form, 0xFFFFFFFF) >> bit & 1:
                continue
            lanes = rs_words(form, np.uint32([1 << bit])).tolist()
            for lane, word in enumerate(lanes):
                r, n = slice_of(form, 1 << bit, lane)
                assert word == r << (32 - n), (form, bit, lane)
            shared = 1 if form in ("f16x2", "bf16x2") else 2
            assert sum(word != 0 for word in lanes) == shared


def test_bf16_probability() -> None:
    """Over all 65,536 slices a value goes up exactly as often as its fraction says."""
    words = np.arange(1 << 16, dtype=np.uint32)
    x = np.full(2 << 16, np.uint32(0x3F80ABCD).view(np.float32), np.float32)
    low = fpemu.cvt_rs(x, "bf16x2", words)[0::2]
    assert int((low > 1).sum()) == 0xABCD


# TransformerEngine -------------------------------------------------------------------------------


def te_model(x: float, byte: int) -> float:
    """The four steps of the function, the fused multiply-add rounded once by exact comparison."""
    if math.isnan(x):
        return 6.0
    a = abs(x)
    if math.isinf(a):
        return math.copysign(6.0, x)
    step = Fraction(1, 2) if a < 2 else Fraction(1) if a < 4 else Fraction(2)
    total = Fraction(a) + Fraction(byte, 256) * step
    if a >= 6:
        return math.copysign(6.0, x)
    t = np.float32(float(total))  # then mend a double rounding
    for near in (t, np.nextafter(t, np.float32(0)), np.nextafter(t, np.float32(np.inf))):
        gap, best = abs(Fraction(float(near)) - total), abs(Fraction(float(t)) - total)
        even = int(near.view(np.uint32)) % 2 == 0
        if gap < best or (gap == best and even):
            t = near
    t_step = Fraction(1, 2) if t < 2 else Fraction(1) if t < 4 else Fraction(2)
    q = min(math.floor(Fraction(float(t)) / t_step) * t_step, Fraction(6))
    return math.copysign(float(q), x)


def test_te_software() -> None:
    x = np.concatenate([hard("e2m1", 5), hard("e2m1", 6)])
    rng = np.random.default_rng(7)
    # Just below the point where a byte carries: the sum then rounds, at times up to the grid.
    grid_points = np.array([0.5, 1, 1.5, 2, 3, 4, 6])
    byte = rng.integers(1, 256, 2000)
    high = grid_points[rng.integers(0, 7, 2000)]
    step = np.where(high <= 2, 0.5, np.where(high <= 4, 1, 2))
    edge = (high - byte / 256 * step).astype(np.float32)
    for _ in range(3):
        edge[::2] = np.nextafter(edge[::2], np.float32(0))
    x = np.concatenate([x, edge])
    bytes_ = np.concatenate([rng.integers(0, 256, len(x) - 2000), byte]).astype(np.uint8)
    words = np.ascontiguousarray(bytes_).view("<u4")
    got = fpemu.cvt_rs(x, TE_SOFTWARE, words)
    want = np.float32([te_model(float(v), int(b)) for v, b in zip(x, bytes_, strict=True)])
    assert_same_bits(got, want, x)
    plain = fpemu.quantize(
        x, "e2m1", rounding="sr", sr_bits=8, random_bits=rs_words(TE_SOFTWARE, words)
    )
    other = got != plain
    assert 0 < other.sum() < len(x) / 4  # the form is not the 8-bit rule, there
    assert (np.abs(got[other]) > np.abs(plain[other])).all()


def test_te_software_is_the_eight_bit_rule_on_16_bit_inputs_in_range() -> None:
    """Sums of 16-bit values of at least 2**-15 and a byte are exact in float32: no rounding up."""
    with np.errstate(invalid="ignore"):
        x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = x[np.isnan(x) | (np.abs(x) >= 2.0**-14) | (x == 0)]
    x = x[: len(x) // 4 * 4]
    for seed in range(4):
        words = np.random.default_rng(seed).integers(0, 1 << 32, len(x) // 4, np.uint32)
        plain = fpemu.quantize(
            x, "e2m1", rounding="sr", sr_bits=8, random_bits=rs_words(TE_SOFTWARE, words)
        )
        assert_same_bits(fpemu.cvt_rs(x, TE_SOFTWARE, words), plain, x)


# As the rounding of a block quantizer --------------------------------------------------------------


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8_e4m3"])
def test_words_for_a_block_format(name: str) -> None:
    """Codes of a block format are cvt.rs of the values that it casts."""
    fmt = fpemu.get_format(name)
    form = "e2m1x4" if "4" in name.split("_")[0] else "e4m3x4"
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    words = np.random.default_rng(1).integers(0, 1 << 32, (8, 16), np.uint32)
    got = fpemu.encode(x, name, rounding="sr", sr_bits=16, random_bits=rs_words(form, words))
    one = np.float32(1)
    scale = fmt.scale.values()[got.scales].astype(np.float32)
    if name == "nvfp4":
        s = np.float32(2688) / np.abs(x).max()
        scale = one / (scale * (one / s))
    else:
        scale = one / scale
    cast = x * np.repeat(scale, fmt.block[0], axis=-1)
    values = fmt.element.values()[got.codes].astype(np.float32)
    assert_same_bits(fpemu.cvt_rs(cast, form, words), values, cast)


# Containers and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*PTX, TE_SOFTWARE])
def test_containers(form: str) -> None:
    import torch

    x = hard(FORMS[form].element, 4).reshape(-1, 4)
    rng = np.random.default_rng(5)
    words = rng.integers(0, 1 << 32, (len(x), 4 // FORMS[form].group), np.uint32)
    words &= np.uint32(MASK.get(form, 0xFFFFFFFF))
    want = fpemu.cvt_rs(x, form, words)
    bits = torch.from_numpy(words.view(np.int32))
    for w in (bits, bits.to(torch.int64) & 0xFFFFFFFF, bits.view(torch.uint32)):
        assert_same_bits(fpemu.cvt_rs(torch.from_numpy(x), form, w), want, x)
    for dtype in (BF16, np.float16):
        with np.errstate(over="ignore"):
            narrow = x.astype(dtype)
        y = fpemu.cvt_rs(narrow, form, words)
        assert_same_bits(y, fpemu.cvt_rs(narrow.astype(np.float32), form, words).astype(dtype))
        assert_same_bits(fpemu.cvt_rs(give("torch", narrow), form, bits), y)
    empty = fpemu.cvt_rs(np.zeros((0, 4), np.float32), form, words[:0])
    assert empty.shape == (0, 4)


W = np.zeros(2, np.uint32)
X8 = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        (ValueError, "unknown form 'e4m3x2'; known: .*Did you mean 'e4m3x4'",
         lambda: fpemu.cvt_rs(X8, "e4m3x2", W)),
        (ValueError, "unknown form 'nvfp4'", lambda: fpemu.cvt_rs(X8, "nvfp4", W)),
        (TypeError, "x has dtype float64", lambda: fpemu.cvt_rs(X8.astype(float), "e4m3x4", W)),
        (ValueError, "shape \\(2,\\); it must be uint32 words, one per group of 2",
         lambda: fpemu.cvt_rs(X8, "bf16x2", W)),
        (ValueError, "dtype int64 and shape", lambda: fpemu.cvt_rs(X8, "e4m3x4", [0, 0])),
        (ValueError, "one per group of 4 .*whose shape is \\(7,\\)",
         lambda: fpemu.cvt_rs(X8[:7], "e4m3x4", W)),
        (ValueError, "bits set outside 0x1fff1fff",
         lambda: fpemu.cvt_rs(X8[:2], "f16x2", np.uint32([0x2000]))),
        (ValueError, "'e4m3' conversions always saturate",
         lambda: fpemu.cvt_rs(X8, "e4m3x4", W, overflow="nonsat")),
        (ValueError, "x has 0 dimensions", lambda: fpemu.cvt_rs(X8[0], "e4m3x4", W)),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], sentence: str, call: Any) -> None:
    with pytest.raises(error, match=f"cvt_rs: .*{sentence}"):
        call()
