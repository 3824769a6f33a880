"""All 2**32 float32 patterns, by chunks, against breakpoints that the oracle confirms.

For one sign a cast is a step function of the bit pattern. The patterns at which it steps are found
by bisection on the vectorised reference, and each is confirmed by the oracle on both sides; between
two steps there is nothing to get wrong. So the expected codes of a chunk cost no more than a
`numpy.repeat`, and the sweep runs at the speed of the code it checks.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import reference
from helpers import DETERMINISTIC, FAST, as_numpy, assert_same_bits, decoded, give

import fpemu
from fpemu.backends import oracle
from fpemu.formats import Format

CHUNK = 1 << 24
INF_BITS = 0x7F800000
FORMATS = ("e4m3", "e5m2", "e2m1", "fp16", "bf16")


def _floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def breakpoints(fmt: Format, rounding: str, overflow: str, sign: int) -> tuple[np.ndarray, ...]:
    """Patterns (without sign) from which each code holds, infinity last; and the codes.

    Codes are compared by their order in size: the code without its sign, and NaN, which may stand
    for an overflow, past all of them.
    """
    nan = fmt.nan_code

    def order(code: np.ndarray) -> np.ndarray:
        past = 1 << fmt.bits
        return np.where(code == nan, past, code & ~fmt.sign_bit)

    def codes_at(bits: np.ndarray) -> np.ndarray:
        x = _floats(bits | sign).astype(np.float64)
        return reference.cast(x, fmt, rounding, overflow).astype(np.int64)

    levels = np.append(np.arange(1 << fmt.bits - 1), 1 << fmt.bits)
    first, last = order(codes_at(np.array([0, INF_BITS - 1])))
    levels = levels[(levels >= first) & (levels <= last)]
    low, high = np.zeros_like(levels), np.full_like(levels, INF_BITS - 1)
    while (low < high).any():  # the first pattern that has reached each level
        middle = (low + high) // 2
        reached = order(codes_at(middle)) >= levels
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    for start, level in zip(low.tolist(), levels.tolist(), strict=True):
        for bits in {start, max(start - 1, 0)}:
            x = oracle.from_bits(bits | sign, "float32")
            code = oracle.round_to(fmt, x, rounding, overflow)
            assert (order(np.array(code)) >= level) == (bits >= start)
    starts = np.append(low, INF_BITS)
    infinity = oracle.round_to(
        fmt, oracle.from_bits(INF_BITS | sign, "float32"), rounding, overflow
    )
    return starts, np.append(codes_at(low), infinity)


def expected(fmt: Format, steps: tuple[np.ndarray, ...], begin: int, end: int) -> np.ndarray:
    """Codes of the patterns begin..end-1 (without sign)."""
    starts, codes = steps
    nan = reference.cast(np.array([np.nan]), fmt)
    starts = np.append(starts, [INF_BITS + 1, 1 << 31])
    codes = np.append(codes, nan).astype(fmt.code_dtype)
    counts = np.diff(np.clip(starts, begin, end))
    return np.repeat(codes, counts)


def sweep(fmt: Format, rounding: str, overflow: str, backend: str) -> float:
    start, table = time.perf_counter(), None
    if fmt.bits <= 16:
        table = decoded(fmt, np.arange(1 << fmt.bits), np.float32)
    for sign in (0, 1 << 31):
        steps = breakpoints(fmt, rounding, overflow, sign)
        for begin in range(0, 1 << 31, CHUNK):
            want = expected(fmt, steps, begin, begin + CHUNK)
            x = np.arange(sign + begin, sign + begin + CHUNK, dtype=np.uint32).view(np.float32)
            given, options = give(backend, x), {"rounding": rounding, "overflow": overflow}
            got = as_numpy(fpemu.encode(given, fmt, backend=backend, **options).codes)
            assert_same_bits(got, want, x, f"{fmt.name} {rounding} {overflow}")
            got = fpemu.quantize(given, fmt, backend=backend, **options)
            assert_same_bits(got, table[want], x, f"{fmt.name} {rounding} {overflow}")
    return time.perf_counter() - start


#: The fast backend under every rounding; the portable one, slower by far, for one format.
RUNS = [
    *((name, "numba", "rne", overflow) for name in FORMATS for overflow in ("sat", "nonsat")),
    *((name, "numba", rounding, "nonsat") for name in FORMATS for rounding in DETERMINISTIC[1:]),
    ("e4m3", "torch", "rne", "sat"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "backend", "rounding", "overflow"), [r for r in RUNS if r[1] in FAST]
)
def test_all_float32(
    name: str, backend: str, rounding: str, overflow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = sweep(fpemu.get_format(name), rounding, overflow, backend)
    with capsys.disabled():
        print(
            f"\n{name} {rounding} {overflow} {backend}: all 2**32 float32 inputs, {seconds:.0f} s"
        )


@pytest.mark.parametrize("name", FORMATS[:3])
def test_the_sweep_itself_on_a_slice(name: str) -> None:
    """The expected codes equal the reference on patterns around infinity and around 1."""
    fmt = fpemu.get_format(name)
    for sign in (0, 1 << 31):
        for rounding, overflow in (("rne", fmt.overflow), ("rtn", "nonsat")):
            steps = breakpoints(fmt, rounding, overflow, sign)
            for begin in (0x3F7FFF00, 0x7F7FF000, 0):
                x = _floats(np.arange(begin, begin + 8192) | sign)
                with np.errstate(invalid="ignore"):
                    want = reference.cast(x.astype(np.float64), fmt, rounding, overflow)
                assert_same_bits(expected(fmt, steps, begin, begin + 8192), want, x)
