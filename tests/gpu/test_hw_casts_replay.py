"""`fpemu.hw.replay` against exact arithmetic that reads the instruction's name by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from helpers import assert_same_bits, ties

from fpemu import formats, hw

# The oracle --------------------------------------------------------------------------------------
# It shares the format table. What an instruction does, it takes from the name and the PTX ISA.

FORMATS = {
    "f32": formats.FP32, "f16": formats.FP16, "bf16": formats.BF16, "tf32": formats.TF32,
    "e4m3": formats.E4M3, "e5m2": formats.E5M2, "e2m3": formats.E2M3, "e3m2": formats.E3M2,
    "e2m1": formats.E2M1, "ue8m0": formats.E8M0,
}  # fmt: skip
MAX = {f: FORMATS[f].value_of_mag(FORMATS[f].max_mag) for f in FORMATS}


HALF = Fraction(1, 2)
#: Whether the part that is cut off takes the magnitude up: of it, the last bit kept, random bits.
ROUND_UP: dict[str, Callable[[Fraction, int, Fraction], bool]] = {
    "rn": lambda rest, odd, _: rest > HALF or (rest == HALF and odd == 1),
    "rna": lambda rest, *_: rest >= HALF,
    "toward 0": lambda *_: False,
    "away": lambda rest, *_: rest > 0,
    "rs": lambda rest, _, share: rest + share >= 1,
}


class Name(NamedTuple):
    rounding: str
    satfinite: bool
    relu: bool
    destination: str
    lanes: int
    source: str


def parse(ptx: str) -> Name:
    cvt, rounding, *modifiers, destination, source = ptx.split(".")
    assert cvt == "cvt" and set(modifiers) <= {"satfinite", "relu"}
    element, _, lanes = destination.partition("x")
    return Name(
        rounding, "satfinite" in modifiers, "relu" in modifiers, element, int(lanes or 1),
        source.partition("x")[0],
    )  # fmt: skip


@lru_cache(maxsize=1 << 22)
def magnitude(size: Fraction, rounding: str, element: str, share: Fraction) -> int:
    """Magnitude code of a positive number, rounded with an unbounded exponent."""
    fmt = FORMATS[element]
    exp = size.numerator.bit_length() - size.denominator.bit_length()
    exp -= size < Fraction(2) ** exp
    exp = max(exp, fmt.emin)
    steps = size / Fraction(2) ** (exp - fmt.man_bits)
    low = steps.numerator // steps.denominator
    low += ROUND_UP[rounding](steps - low, low % 2, share)
    if element == "ue8m0":  # codes are exponents, and there is no zero
        return max(exp - fmt.emin + low - 1, 0)
    return low + (exp - fmt.emin << fmt.man_bits)


def nan_of(name: Name, bits: int) -> int:
    if name.destination in ("e2m1", "e2m3", "e3m2"):
        return {"e2m1": 0x7, "e2m3": 0x1F, "e3m2": 0x1F}[name.destination]
    if name.destination == "tf32" and name.rounding == "rna":
        cut = bits & 0xFFFFE000
        return cut - 0x2000 if name.satfinite else cut
    nans = {"f16": 0x7FFF, "bf16": 0x7FFF, "tf32": 0x7FFFFFFF, "ue8m0": 0xFF}
    return nans.get(name.destination, 0x7F)


@cache
def values_of(source: str) -> list[Fraction | str]:
    """What each code of a source of at most 16 bits is, without its sign: a number, inf or nan."""
    fmt = FORMATS[source]
    out: list[Fraction | str] = []
    for mag in range(fmt.sign_bit or 1 << fmt.bits):
        if fmt.inf_code == mag:
            out.append("inf")
        else:
            out.append(fmt.value_of_mag(mag) if mag <= fmt.max_mag else "nan")
    return out


def classify(bits: int, source: str) -> Fraction | str:
    if source != "f32":
        fmt = FORMATS[source]
        return values_of(source)[bits & ((fmt.sign_bit or 1 << fmt.bits) - 1)]
    mag = bits & 0x7FFFFFFF
    if mag > 0x7F800000:
        return "nan"
    return "inf" if mag == 0x7F800000 else formats.FP32.value_of_mag(mag)


def expected(name: Name, bits: int, share: Fraction = Fraction(0)) -> int:
    """One result, as it stands in its lane."""
    fmt = FORMATS[name.destination]
    value = classify(bits, name.source)
    sign = FORMATS[name.source].sign_bit
    negative = bool(sign and bits & sign)
    if value == "nan":
        return nan_of(name, bits)
    if name.relu and negative:
        return 0
    if name.destination == "ue8m0":
        negative = False
    rounding = name.rounding
    if rounding in ("rz", "rm", "rp"):
        outward = {"rz": False, "rm": negative, "rp": not negative}[rounding]
        rounding = "away" if outward else "toward 0"
    if value == "inf":
        mag, inward = fmt.max_mag + 1, False
    else:
        mag = magnitude(value, rounding, name.destination, share) if value else 0
        inward = rounding == "toward 0"
    if mag > fmt.max_mag:
        mag = fmt.max_mag + (not name.satfinite and not inward)
    if name.destination == "tf32":
        return (negative << 31) | mag << 13
    return mag | (fmt.sign_bit if negative else 0)


def reversed16(n: int) -> int:
    return int(f"{n:016b}"[::-1], 2)


def shares(ptx: str, word: int) -> list[Fraction]:
    """What the random word adds to each lane, from the lowest, in steps."""
    form = ptx.split(".")[-2]
    high, low = word >> 16, word & 0xFFFF
    if form == "f16x2":
        return [Fraction(n & 0x1FFF, 1 << 13) for n in (low, high)]
    if form == "bf16x2":
        return [Fraction(n, 1 << 16) for n in (low, high)]
    if form == "e2m1x4":
        byte = [word >> 8 * i & 255 for i in range(4)]
        low, high = byte[2] << 8 | byte[0], byte[3] << 8 | byte[1]
    lanes = (low, reversed16(low), high, reversed16(high))
    return [Fraction(n, 1 << 16) for n in lanes]


def oracle(ptx: str, bits: np.ndarray, rbits: np.ndarray | None = None) -> np.ndarray:
    name = parse(ptx)
    if rbits is None:
        return np.array([expected(name, b) for b in bits.tolist()])
    share = [s for word in rbits.tolist() for s in shares(ptx, word)]
    return np.array([expected(name, b, s) for b, s in zip(bits.tolist(), share, strict=True)])


# Inputs ------------------------------------------------------------------------------------------


def integers(bits: int) -> np.dtype:
    return np.dtype({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])


@cache
def float32_patterns(element: str) -> np.ndarray:
    """Values and ties of the destination with their neighbours, NaN payloads, random patterns."""
    near = ties(FORMATS[element].name)
    if len(near) > 5_000:
        near = np.concatenate([near[:: len(near) // 4_000 + 1], near[-40:]])
    rng = np.random.default_rng(11)
    anywhere = rng.integers(0, 1 << 32, 2_000, np.uint32)
    exps = rng.integers(100, 146, 2_000).astype(np.uint32) << 23
    inside = anywhere & np.uint32(0x807FFFFF) | exps
    nans = [0x7F800001, 0x7F801FFF, 0x7F802000, 0x7FC00000, 0x7FFFFFFF]
    nans = np.array(nans + [n | 0x80000000 for n in nans], np.uint32)
    edge = np.array([0x7F7FFFFF, 0x7F7FF000, 0x7F7FEFFF, 0x7F000000, 0x7F000001, 0x7E800000,
                     0x00000001, 0x003FFFFF, 0x00400000, 0x00400001, 0x007FFFFF, 0x00800000,
                     0x00800001], np.uint32)  # fmt: skip
    every = [near.view(np.uint32), anywhere, inside, nans, edge, edge | np.uint32(0x80000000)]
    found = np.concatenate(every)
    return found[: len(found) // 4 * 4]


def inputs(row: hw.Instruction) -> np.ndarray:
    name = parse(row.ptx)
    if name.source == "f32":
        return float32_patterns(name.destination)
    size = 1 << FORMATS[name.source].bits
    return np.arange(size, dtype=integers(16 if size > 256 else 8))


DETERMINISTIC = [name for name, row in hw.INSTRUCTIONS.items() if not row.random]
RANDOM = [name for name, row in hw.INSTRUCTIONS.items() if row.random]


# Tests -------------------------------------------------------------------------------------------


def check(name: str, bits: np.ndarray, rbits: np.ndarray | None = None) -> None:
    got = hw.replay(name, bits, rbits)
    assert_same_bits(got, oracle(name, bits, rbits).astype(got.dtype), bits, name)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_replay_is_exact_arithmetic(name: str) -> None:
    """All patterns of sources of at most 16 bits, some 5,000 to 9,000 of float32."""
    check(name, inputs(hw.INSTRUCTIONS[name]))


@pytest.mark.parametrize("name", RANDOM)
def test_stochastic_replay_is_exact_arithmetic(name: str) -> None:
    row = hw.INSTRUCTIONS[name]
    bits = inputs(row)
    rng = np.random.default_rng(5)
    words = rng.integers(0, 1 << 32, len(bits) // row.lanes, np.uint32)
    words[:64] = [0, 0xFFFFFFFF, 1, 0x80000000, 0x00010000, 0x00008000, 0xFFFF, 0xFFFF0000] * 8
    if row.form == "f16x2":
        words &= np.uint32(0x1FFF1FFF)
    check(name, bits, words)


@pytest.mark.parametrize("name", RANDOM)
def test_each_bit_of_the_word_reaches_its_lane(name: str) -> None:
    """A cut-off part of ``1 - 2**-k`` steps goes up by bit n - k of the lane's slice or a higher."""
    row = hw.INSTRUCTIONS[name]
    width = 13 if row.form == "f16x2" else 16
    step = 2.0**-row.destination_format.man_bits
    x = np.float32([1 + (1 - 2.0**-k) * step for k in range(1, width + 1)])
    used = [bit for bit in range(32) if row.form != "f16x2" or bit % 16 < 13]
    words = np.repeat(np.array([1 << bit for bit in used], np.uint32), width)
    bits = np.repeat(np.tile(x.view(np.uint32), len(used)), row.lanes)
    check(name, bits, words)
    assert len(set(hw.replay(name, bits, words).tolist())) == 2


def test_the_oracle_sees_a_wrong_instruction() -> None:
    bits = float32_patterns("e4m3")
    wrong = hw.replay("cvt.rn.satfinite.relu.e4m3x2.f32", bits)
    right = oracle("cvt.rn.satfinite.e4m3x2.f32", bits).astype(np.uint8)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(wrong, right, bits)


def test_shapes_and_signed_bits() -> None:
    name = "cvt.rs.satfinite.e2m1x4.f32"
    bits = float32_patterns("e2m1")[:480].reshape(2, 3, 80)
    words = np.arange(120, dtype=np.uint32).reshape(2, 3, 20) * np.uint32(0x01010101)
    want = oracle(name, bits.reshape(-1), words.reshape(-1)).astype(np.uint8).reshape(bits.shape)
    assert_same_bits(hw.replay(name, bits, words), want)
    assert_same_bits(hw.replay(name, bits.view(np.int32), words.view(np.int32)), want)
    flipped = bits[:, ::-1]
    assert_same_bits(hw.replay(name, flipped, words[:, ::-1]), want[:, ::-1])
    empty = hw.replay(name, bits[:, :, :0], words[:, :, :0])
    assert empty.shape == (2, 3, 0) and empty.dtype == np.uint8
    assert hw.replay("cvt.rn.tf32.f32", np.uint32(0x3F800FFF)) == 0x3F800000


@pytest.mark.parametrize(
    ("name", "dtype", "count", "words", "message"),
    [
        ("cvt.rn.f16x2.f32", np.uint32, 3, None, "bits has shape .*takes 2 values at a time"),
        ("cvt.rn.f16x2.f32", np.uint16, 2, None, "bits has dtype uint16; .* as uint32 or int32"),
        ("cvt.rn.f16x2.f32", np.float32, 2, None, "bits has dtype float32"),
        ("cvt.rn.f16x2.f32", np.uint32, 2, 1, "rbits is given but .* takes no random words"),
        ("cvt.rs.f16x2.f32", np.uint32, 2, None, "rbits is missing but .* needs rbits"),
        ("cvt.rs.f16x2.f32", np.uint32, 4, 1, r"must be uint32 or int32 of shape \(2,\)"),
        ("cvt.rn.f16x3.f32", np.uint32, 2, None, "Did you mean 'cvt.rn.f16x2.f32'"),
    ],
)
def test_what_is_refused(
    name: str, dtype: type, count: int, words: int | None, message: str
) -> None:
    rbits = None if words is None else np.zeros(words, np.uint32)
    with pytest.raises(ValueError, match=message):
        hw.replay(name, np.zeros(count, dtype), rbits)


def test_random_words_beyond_13_bits_are_refused() -> None:
    bits = np.zeros(2, np.uint32)
    with pytest.raises(ValueError, match="bits set outside 0x1fff1fff"):
        hw.replay("cvt.rs.f16x2.f32", bits, np.array([0x2000], np.uint32))


def spelled_out(pattern: str) -> list[str]:
    """The names that ``cvt.{rn,rz}[.relu].f16.f32`` stands for."""
    parts = re.split(r"(\{[^}]*\}|\[[^\]]*\])", pattern)
    choices = [
        p[1:-1].split(",") if p[:1] == "{" else ["", p[1:-1]] if p[:1] == "[" else [p]
        for p in parts
    ]
    return ["".join(chosen) for chosen in product(*choices)]


def test_the_docs_have_the_table() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "hardware_casts.md").read_text()
    listed = {
        name: (needs, since)
        for pattern, needs, since in re.findall(r"^\| `(cvt\S+)` \| (.*) \| (.*) \|$", text, re.M)
        for name in spelled_out(pattern)
    }
    table = {
        row.ptx: (row.needs.removeprefix("compute capability "), row.since_ptx)
        for row in hw.INSTRUCTIONS.values()
    }
    assert listed == table
