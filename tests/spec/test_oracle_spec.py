"""The oracle against decisions worked out by hand from the text of the standards."""

from __future__ import annotations

from fractions import Fraction as Q

import numpy as np
import pytest
from helpers import DETERMINISTIC, ELEMENTS, OVERFLOWS, all16, request

from fpemu import formats
from fpemu.backends import oracle
from fpemu.backends.oracle import INF, NAN, Number, number, round_to

E4M3, E2M1, E5M2 = (formats.get_format(n) for n in ("e4m3", "e2m1", "e5m2"))
E8M0, INT8 = (formats.get_format(n) for n in ("e8m0", "int8"))

#: x, then the E2M1 code under rne rna rnz rtz rtp rtn rto (grid 0 .5 1 1.5 2 3 4 6)
E2M1_TABLE = [
    (Q(1, 4), (0, 1, 0, 0, 1, 0, 1)),
    (Q(3, 4), (2, 2, 1, 1, 2, 1, 1)),
    (Q(5, 2), (4, 5, 4, 4, 5, 4, 5)),
    (Q(7, 2), (6, 6, 5, 5, 6, 5, 5)),
    (Q(5), (6, 7, 6, 6, 7, 6, 7)),
    (Q(5) + Q(1, 10**30), (7, 7, 7, 6, 7, 6, 7)),
    (Q(1, 10**40), (0, 0, 0, 0, 1, 0, 1)),
    (Q(3), (5, 5, 5, 5, 5, 5, 5)),
    (-Q(1, 4), (8, 9, 8, 8, 8, 9, 9)),
    (-Q(5, 2), (0xC, 0xD, 0xC, 0xC, 0xC, 0xD, 0xD)),
    (-Q(1, 10**40), (8, 8, 8, 8, 8, 9, 9)),
    (Q(100), (7, 7, 7, 7, 7, 7, 7)),
]

#: fmt, x, rounding, overflow, code
SINGLE = [
    ("e4m3", 464, "rne", "nonsat", 0x7E),  # the tie 448 | 480 goes to the even 448
    ("e4m3", 464, "rna", "nonsat", 0x7F),
    ("e4m3", Q(46401, 100), "rne", "nonsat", 0x7F),
    ("e4m3", -1000, "rne", "nonsat", 0x7F),  # the canonical NaN is positive
    ("e4m3", -1000, "rne", "sat", 0xFE),
    ("e4m3", 1000, "rtz", "nonsat", 0x7E),
    ("e4m3", 1000, "rto", "nonsat", 0x7E),
    ("e4m3", 1000, "rtn", "nonsat", 0x7E),
    ("e4m3", 1000, "rtp", "nonsat", 0x7F),
    ("e4m3", -1000, "rtp", "nonsat", 0xFE),
    ("e4m3", 449, "rtp", "nonsat", 0x7F),
    ("e5m2", 61440, "rne", "nonsat", 0x7C),
    ("e5m2", 61439, "rne", "nonsat", 0x7B),
    ("e5m2", -61440, "rne", "nonsat", 0xFC),
    ("e5m2", 61440, "rtz", "nonsat", 0x7B),
    ("fp16", 65520, "rne", "nonsat", 0x7C00),
    ("fp16", 65520, "rne", "sat", 0x7BFF),
    ("fp16", Q(65519), "rne", "nonsat", 0x7BFF),
    ("e4m3fnuz", -Q(1, 10**9), "rne", "sat", 0x00),  # no minus zero
    ("e4m3fnuz", 1000, "rne", "nonsat", 0x80),
    ("e4m3_ieee", 248, "rne", "nonsat", 0x78),
    ("int8", Q(5, 2), "rne", "sat", 2),
    ("int8", -Q(1, 3), "rne", "sat", 0),
    ("int8", -300, "rne", "sat", 0x81),
    ("int8", -300, "rne", "nonsat", 0x81),
    ("int8", -Q(255, 2), "rna", "sat", 0x81),
    ("e8m0", Q(3, 2), "rne", "sat", 128),  # one digit: a tie goes to the larger, for every k
    ("e8m0", 3, "rne", "sat", 129),
    ("e8m0", Q(149, 100), "rne", "sat", 127),
    ("e8m0", Q(3, 2), "rnz", "sat", 127),
    ("e8m0", Q(19, 10), "rtz", "sat", 127),
    ("e8m0", Q(11, 10), "rtp", "sat", 128),
    ("e8m0", 0, "rne", "sat", 0),
    ("e8m0", -1, "rne", "sat", 0xFF),
    ("e8m0", Q(1, 2**200), "rtp", "nonsat", 0),  # there is no zero below 2**-127
    ("e8m0", Q(3, 2**128), "rne", "sat", 1),  # 1.5 * 2**-127 goes up as well
    ("e8m0", Q(299, 100) / 2**128, "rne", "sat", 0),
    ("e8m0", Q(3, 2) * 2**127, "rne", "sat", 0xFE),
    ("e8m0", Q(3, 2) * 2**127, "rne", "nonsat", 0xFF),
    ("ue4m3", -1, "rne", "sat", 0x7F),
    ("ue4m3", 0, "rne", "sat", 0),
    ("ue4m3", 1000, "rne", "sat", 0x7E),
    ("tf32", 1 + Q(1, 2048), "rne", "nonsat", 0x1FC00),
    ("tf32", 1 + Q(3, 2048), "rne", "nonsat", 0x1FC02),
    ("fp32", 1 + Q(1, 2**24), "rne", "nonsat", 0x3F800000),
    ("fp32", Q(1, 2**150), "rna", "nonsat", 1),
]


@pytest.mark.parametrize(("x", "codes"), E2M1_TABLE)
def test_e2m1_under_every_rounding(x: Q, codes: tuple[int, ...]) -> None:
    assert tuple(round_to(E2M1, number(x), r) for r in DETERMINISTIC) == codes


@pytest.mark.parametrize(("name", "x", "rounding", "overflow", "code"), SINGLE)
def test_single_decisions(name: str, x: Q, rounding: str, overflow: str, code: int) -> None:
    assert round_to(formats.get_format(name), number(x), rounding, overflow) == code


def test_infinity_and_nan() -> None:
    minus = Number(True, INF.size)
    assert [round_to(E4M3, v, overflow=o) for v in (INF, minus, NAN) for o in OVERFLOWS] == [
        0x7E, 0x7F, 0xFE, 0x7F, 0x7F, 0x7F,
    ]  # fmt: skip
    assert [round_to(E5M2, v, overflow=o) for v in (INF, minus, NAN) for o in OVERFLOWS] == [
        0x7B, 0x7C, 0xFB, 0xFC, 0x7F, 0x7F,
    ]  # fmt: skip
    assert [round_to(E2M1, v, overflow=o) for v in (INF, minus, NAN) for o in OVERFLOWS] == [
        7, 7, 0xF, 0xF, 7, 7,
    ]  # fmt: skip
    assert [round_to(E8M0, v, overflow=o) for v in (INF, minus, NAN) for o in OVERFLOWS] == [
        0xFE, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="NaN"):
        round_to(INT8, NAN)


@pytest.mark.parametrize("rounding", ["rtz", "rto", "rtn", "rtp"])
def test_an_infinity_is_no_finite_value(rounding: str) -> None:
    """Inward roundings keep finite values finite; an infinity stays one."""
    assert round_to(E5M2, INF, rounding, "nonsat") == 0x7C


def test_minus_zero() -> None:
    minus_zero = Number(True, Q(0))
    codes = {name: round_to(formats.get_format(name), minus_zero) for name in ELEMENTS}
    none = dict.fromkeys(["e8m0", "ue4m3", "int8", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz"], 0)
    kept = {n: 1 << formats.get_format(n).bits - 1 for n in ELEMENTS if n not in none}
    assert codes == none | kept


@pytest.mark.parametrize(
    ("word", "nbits", "away"),
    [(0xBFFFFFFF, 32, False), (0xC0000000, 32, True), (0xFFFFFFFF, 1, False), (0x80000000, 2, False),
     (0xC0000000, 2, True), (0xBFFFFFFF, 2, False), (0xFFFFFFFF, 32, True), (0, 32, False)],
)  # fmt: skip
def test_stochastic_words(word: int, nbits: int, away: bool) -> None:
    """f = 1/4 moves away from zero exactly where floor(f 2^n) + top bits reach 2^n."""
    for sign in (1, -1):
        code = round_to(E2M1, number(sign * Q(9, 4)), "sr", "sat", word, nbits)
        assert code == (8 if sign < 0 else 0) + 4 + away


def test_stochastic_never_moves_what_is_exact() -> None:
    for code in range(0x7F):
        assert round_to(E4M3, oracle.value_of(E4M3, code), "sr", "sat", 0xFFFFFFFF) == code


@pytest.mark.parametrize("kind", oracle.IEEE)
def test_ieee_patterns_come_back(kind: str) -> None:
    width = sum(oracle.IEEE[kind]) + 1
    rng = np.random.default_rng(0)
    for bits in rng.integers(0, 1 << width, 3000, np.uint64).tolist():
        x = oracle.from_bits(bits, kind)
        assert x.is_nan or oracle.to_bits(x, kind) == bits


def test_float32_rounding_is_numpys() -> None:
    rng = np.random.default_rng(1)
    exponents = rng.integers(-1075, 1023, 4000)
    exponents[1000:] = rng.integers(-155, 130, 3000)  # float32's range and its two ends
    for v in np.ldexp(rng.standard_normal(4000), exponents).tolist():
        with np.errstate(over="ignore"):
            want = int(np.float32(v).view(np.uint32))
        x = number(v)
        assert oracle.to_bits(Number(np.signbit(v), x.size), "float32") == want


@pytest.mark.parametrize("name", ELEMENTS)
def test_encode_matches_round_to(name: str) -> None:
    """The array form is the scalar form, element by element."""
    if name == "int8":  # refuses NaN
        x = np.array([1.5, -2.5, 1e9, -0.0], np.float16 if False else np.float32)
    else:
        x = all16(np.float16)[::97]
    codes = oracle.encode(request(x, name)).codes
    fmt = formats.get_format(name)
    want = [round_to(fmt, n, "rne", fmt.overflow) for n in oracle.numbers(x, x.dtype.name)]
    assert codes.tolist() == want and codes.dtype == fmt.code_dtype


# Block formats by hand ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "amax", "byte"),
    [
        # FLOOR, RCEIL, CEIL and EVEN part at these amaxes (block-scaling fact sheet, 0.4)
        ("mxfp4", 6, 127), ("mxfp4/rceil", 6, 127), ("mxfp4/ceil", 6, 128), ("mxfp4/even", 6, 127),
        ("mxfp4/rceil", np.nextafter(np.float32(6), np.float32(7)), 128), ("mxfp4", 7.99, 127),
        ("mxfp4/even", 7, 128), ("mxfp4/even", np.nextafter(np.float32(7), np.float32(0)), 127),
        ("mxfp4/ceil", 4, 127), ("mxfp4/ceil", np.nextafter(np.float32(4), np.float32(5)), 128),
        ("mxfp8_e4m3/rceil", 448, 127), ("mxfp8_e4m3/rceil", 449, 128), ("mxfp8_e4m3", 511, 127),
        ("mxfp8_e4m3/even", 495, 127), ("mxfp8_e4m3/even", 496, 128),
        ("mxfp8_e5m2/even", 57344, 128 - 1), ("mxfp8_e5m2/even", 61440, 128),
        ("mxint8", 1.99, 127), ("mxint8/even", 1.99, 127), ("mxint8/even", 255 / 128, 128),
        ("mxint8/rceil", 127 / 64, 127), ("mxint8/rceil", 1.985, 128),
        ("mxfp4", 2.0**-149, 0), ("mxfp8_e4m3", np.finfo(np.float32).max, 127 + 127 - 8),
        ("mxint8/ceil", np.finfo(np.float32).max, 254), ("mxfp4", 0, 0),
        ("mxfp4", np.inf, 255), ("mxfp4", np.nan, 255),
    ],
)  # fmt: skip
def test_mx_scales(name: str, amax: float, byte: int) -> None:
    x = np.array([0, amax, 0, 0], np.float32)
    assert oracle.encode(request(x, name)).scales.tolist() == [byte]


def test_nvfp4_by_hand() -> None:
    """G = 2688 makes S = 1: scale = A/6, elements x/scale."""
    x = np.zeros((2, 16), np.float32)
    x[0, :6] = [6, -6, 0.25, -0.0, 1.25, 5]
    x[1, :2] = [2688, -448]
    parts = oracle.encode(request(x, "nvfp4"))
    assert parts.scales.ravel().tolist() == [0x38, 0x7E]
    assert parts.codes[0, :6].tolist() == [7, 0xF, 0, 8, 2, 6]
    assert parts.codes[1, :2].tolist() == [7, 0xA] and parts.tensor_scale == 1


def test_nvfp4_ends() -> None:
    tiny = np.full(16, 1e-37, np.float32)  # 2688/G overflows: S is clamped to FLT_MAX
    parts = oracle.encode(request(tiny, "nvfp4"))
    assert parts.tensor_scale.view(np.uint32) == 0x00200000  # fl(1/FLT_MAX), a subnormal
    zero = oracle.encode(request(np.zeros(16, np.float32), "nvfp4"))
    assert (zero.tensor_scale, zero.scales.tolist()) == (1, [0])
    stale = oracle.encode(request(np.float32([100, -100]), "nvfp4", amax=1.0))
    assert stale.codes.tolist() == [7, 15] and stale.scales.tolist() == [0x7E]
    # A block far below the tensor's amax: scale 0, nonzero elements +-6, values 0.
    small = np.zeros((2, 16), np.float32)
    small[0, 0], small[1, :3] = 2688, (1e-6, -1e-6, 0)
    parts = oracle.encode(request(small, "nvfp4"))
    assert parts.scales.ravel().tolist() == [0x7E, 0] and parts.codes[1, :3].tolist() == [7, 15, 0]


def test_nan_is_never_hidden() -> None:
    x = np.ones((2, 32), np.float32)
    x[0, 3] = np.nan
    for name, byte in (("mxfp4", 255), ("nvfp4", 0x7F), ("nvfp4/1level", 0x7F)):
        parts, out = oracle.encode(request(x, name)), np.empty_like(x)
        oracle.quantize(request(x, name), out)
        width = 32 if name == "mxfp4" else 16
        assert parts.scales[0, 0] == byte and not parts.codes[0, :width].any()
        assert np.isnan(out[0, :width]).all() and not np.isnan(out[1]).any()
    out = np.empty_like(x)
    for name in ("fp8_tensor_e4m3", "fp8_block_e4m3"):
        oracle.quantize(request(x, name), out)
        assert np.isnan(out[0, 3]) and np.isnan(out).sum() == 1
    with pytest.raises(ValueError, match="NaN"):
        oracle.encode(request(x, "int8_tensor"))


def test_fp8_scales_by_hand() -> None:
    x = np.float32([[3, -0.5, 0.25]])
    parts = oracle.encode(request(x, "fp8_tensor_e4m3"))
    scale = np.float32(448) / np.float32(3)
    assert parts.tensor_scale == np.float32(1) / scale and parts.codes[0, 0] == 0x7E
    blocks = oracle.encode(request(x, "fp8_block_e4m3"))
    assert blocks.scales.tolist() == [[2.0**-7]]  # 149.33 rounded down to 128
    assert blocks.codes[0].tolist() == [0x7C, 0xE8, 0x60]  # 384, -64, 32
    infinite = oracle.encode(request(np.float32([np.inf, 2]), "fp8_tensor_e4m3"))
    assert infinite.tensor_scale == 1 and infinite.codes.tolist() == [0x7E, 0x40]


def test_within() -> None:
    x = np.float32([448, 448.1, -448, np.nan, np.inf, 0])
    assert oracle.within(request(x, "e4m3")).tolist() == [True, False, True, False, False, True]
    # mxfp4's floor scale leaves amaxes between 6 and 8 outside.
    assert oracle.within(request(np.float32([7, 6]), "mxfp4")).tolist() == [False, True]
    assert not oracle.within(request(np.float32([1, np.nan]), "nvfp4")).any()


def test_integers_and_float64_are_rounded_once() -> None:
    assert oracle.encode(request(np.int64([16973823]), "bf16")).codes == 0x4B81
    assert oracle.encode(request(np.int64([-(2**63)]), "bf16")).codes == 0xDF00
    assert oracle.encode(request(np.uint64([2**64 - 1]), "fp32")).codes == 0x5F800000
    assert oracle.encode(request(np.float64([431.99999999999994]), "e4m3")).codes == 0x7D
