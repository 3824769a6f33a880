"""Every comparator must be able to fail: plant an error in each and require that it is seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
from helpers import BF16, ELEMENTS, all16, assert_same_bits, assert_same_parts, request

import fpemu
from fpemu import formats
from fpemu.backends import oracle


def flip(a: np.ndarray, index: int = -1, bit: int = 0) -> np.ndarray:
    """A copy with one bit of one element flipped."""
    a = np.array(a)
    flat = a.reshape(-1).view(f"u{a.dtype.itemsize}")
    flat[index] ^= flat.dtype.type(1 << bit)
    return a


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.uint16, np.uint32, np.float16, BF16, np.float32, np.float64]
)
def test_one_flipped_bit_is_seen(dtype: Any) -> None:
    a = np.arange(24).reshape(4, 6).astype(dtype)
    assert_same_bits(a.copy(), a)
    for bit in (0, a.dtype.itemsize * 8 - 1):
        with pytest.raises(AssertionError, match=r"1 of 24 differ"):
            assert_same_bits(flip(a, bit=bit), a)


def test_what_equality_of_values_would_miss() -> None:
    zero, nan = np.float32([0.0]), np.float32([np.nan])
    with pytest.raises(AssertionError, match="0x80000000"):
        assert_same_bits(-zero, zero)
    with pytest.raises(AssertionError, match="0x7fc00001"):
        assert_same_bits(flip(nan), nan)
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_bits(np.float64([1]), np.float32([1]))
    with pytest.raises(AssertionError, match="shape"):
        assert_same_bits(np.zeros((2, 1)), np.zeros(2))
    assert_same_bits(nan, nan.copy())


def test_the_message_shows_the_input_in_hex() -> None:
    x = np.float32([1, 448.5])
    with pytest.raises(AssertionError, match=r"got 0x7f, want 0x7e, input 0x43e04000"):
        assert_same_bits(np.uint8([56, 0x7F]), np.uint8([56, 0x7E]), x)


def test_parts_are_compared_one_by_one() -> None:
    x = np.linspace(-4, 4, 64, dtype=np.float32).reshape(2, 32)
    good = oracle.encode(request(x, "nvfp4"))
    assert_same_parts(good, good)
    for name in ("codes", "scales", "tensor_scale"):
        bad = SimpleNamespace(**good._asdict() | {name: flip(getattr(good, name))})
        with pytest.raises(AssertionError, match=name):
            assert_same_parts(bad, good)
    with pytest.raises(AssertionError, match="tensor_scale"):
        assert_same_parts(good._replace(tensor_scale=None), good)


#: A wrong decision in the oracle's rounding -> what must be noticed by the reference.
WRONG = {
    "rne": lambda f, odd, negative: f >= 0.5,  # ties away
    "rna": lambda f, odd, negative: f > 0.5,
    "rnz": lambda f, odd, negative: f >= 0.5,
    "rtz": lambda f, odd, negative: f > 0,
    "rtp": lambda f, odd, negative: f > 0,
    "rtn": lambda f, odd, negative: False,
    "rto": lambda f, odd, negative: f > 0,
}


@pytest.mark.parametrize("rounding", WRONG)
def test_oracle_and_reference_check_one_another(
    rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = all16(BF16)[0x3E00:0x4100:3]
    x = np.concatenate([x, -x])
    fmt = formats.get_format("e2m1")

    def compare() -> None:
        want = oracle.encode(request(x, fmt, rounding=rounding)).codes
        assert_same_bits(reference.cast(x.astype(np.float64), fmt, rounding), want, x)

    compare()
    monkeypatch.setitem(oracle.AWAY, rounding, WRONG[rounding])
    with pytest.raises(AssertionError, match="differ"):
        compare()


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3/rceil", "mxfp8_e4m3/even", "nvfp4"])
def test_a_scale_off_by_one_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    fmt = formats.get_format(name)
    target = "mx_scale" if name.startswith("mx") else "nvfp4_scale"
    right = getattr(oracle, target)
    monkeypatch.setattr(oracle, target, lambda *a: (s := right(*a))._replace(stored=s.stored + 1))
    with pytest.raises(AssertionError, match="scales"):
        assert_same_parts(reference.encode(x, fmt), oracle.encode(request(x, fmt)))


def test_a_wrong_random_word_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Philox comparison notices one wrong round constant."""
    import fpemu.rng

    index = np.arange(8, dtype=np.uint64)
    want = np.array([oracle.random_word(1, 2, int(i)) for i in index], np.uint32)
    assert_same_bits(fpemu.rng.philox(index, 1, 2), want)
    monkeypatch.setattr(fpemu.rng, "PHILOX_W", (0x9E3779B9, 0xBB67AE86))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(fpemu.rng.philox(index, 1, 2), want)


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_format_is_told_from_its_neighbour(name: str) -> None:
    """A sweep that mixed two formats up would fail: no two of them agree on all 16-bit inputs."""
    x = all16(np.float16)
    x = x[np.isfinite(x)].astype(np.float64)
    mine = reference.cast(x, formats.get_format(name), "rne", "nonsat")
    for other in ELEMENTS:
        theirs = reference.cast(x, formats.get_format(other), "rne", "nonsat")
        same = mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        assert same == (other == name)


@pytest.mark.parametrize("rounding", ["rne", "rna", "rnz", "rtz", "rtp", "rtn", "rto"])
def test_every_rounding_is_told_from_the_others(rounding: str) -> None:
    x = all16(BF16)
    x = x[np.isfinite(x.astype(np.float32))].astype(np.float64)
    for name in ("e4m3", "e2m1", "fp16", "e8m0"):
        fmt = formats.get_format(name)
        mine = reference.cast(x, fmt, rounding)
        for other in WRONG:
            if name == "e8m0":  # unsigned and one digit: some roundings coincide by definition
                continue
            assert np.array_equal(mine, reference.cast(x, fmt, other)) == (other == rounding)


def test_the_full_sweep_sees_one_wrong_pattern() -> None:
    """A breakpoint moved by one float32 pattern changes one expected code."""
    from exhaustive.test_float32_full import breakpoints, expected  # type: ignore[import-not-found]

    fmt = formats.get_format("e2m1")
    starts, codes = breakpoints(fmt, "rne", "sat", 0)
    begin = int(starts[3]) - 50
    right = expected(fmt, (starts, codes), begin, begin + 100)
    moved = starts.copy()
    moved[3] += 1
    with pytest.raises(AssertionError, match="1 of 100 differ"):
        assert_same_bits(expected(fmt, (moved, codes), begin, begin + 100), right)


def test_a_planted_kernel_error_reaches_the_one_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of `tests/backends` fails when the verbs return one wrong code, scale or value."""
    from backends.test_one_body import check  # type: ignore[import-not-found]

    x = np.linspace(-4, 4, 64, dtype=np.float32).reshape(2, 32)
    check(x, "nvfp4", backends=("oracle",))
    encode, quantize = fpemu.encode, fpemu.quantize

    def bad_encode(*args: Any, **options: Any) -> Any:
        encoded = encode(*args, **options)
        encoded.codes = flip(encoded.codes)
        return encoded

    for name, bad in (
        ("encode", bad_encode),
        ("quantize", lambda *a, **k: flip(quantize(*a, **k))),
    ):
        monkeypatch.setattr(fpemu, name, bad)
        with pytest.raises(AssertionError, match="differ"):
            check(x, "nvfp4", backends=("oracle",))
        monkeypatch.undo()
