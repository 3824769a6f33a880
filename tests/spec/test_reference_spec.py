"""The vectorised reference equals the oracle, so that large sweeps may use it."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from helpers import (
    BF16,
    BLOCKS,
    DETERMINISTIC,
    ELEMENTS,
    OVERFLOWS,
    all16,
    assert_same_bits,
    assert_same_parts,
    block_data,
    patterns,
    request,
    ties,
)  # fmt: skip

from fpemu import formats
from fpemu.backends import oracle


def _inputs(name: str) -> list[np.ndarray]:
    near = ties(name if name not in ("fp32", "tf32") else "bf16")
    near64 = ties(name if name not in ("fp32", "tf32") else "bf16", "float64")
    rng = np.random.default_rng(3)
    return [
        all16(np.float16)[:: 65536 // 499],
        all16(BF16)[:: 65536 // 499],
        rng.permutation(near)[:400],
        rng.permutation(near64)[:300],
        patterns(np.float32, 300, 1),
        patterns(np.float64, 100, 2),
    ]


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("rounding", (*DETERMINISTIC, "sr"))
@pytest.mark.parametrize("name", ELEMENTS)
def test_casts(name: str, rounding: str, overflow: str) -> None:
    fmt = formats.get_format(name)
    for x in _inputs(name):
        with np.errstate(invalid="ignore"):
            exact = x.astype(np.float64)
        if name == "int8":
            x, exact = x[~np.isnan(exact)], exact[~np.isnan(exact)]
        options = {"rounding": rounding, "overflow": overflow}
        words = None
        if rounding == "sr":
            words = patterns(np.uint32, len(x), 4)
            options |= {"random_bits": words, "sr_bits": 11}
        want = oracle.encode(request(x, name, **options)).codes
        assert_same_bits(reference.cast(exact, fmt, rounding, overflow, words, 11), want, x)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str) -> None:
    x = block_data(20, 70, seed=5, special="tensor" not in name)
    for data in (x, x[:3, :5].copy(), block_data(4, 150, seed=6, special=False)):
        for rounding in ("rne", "rtp"):
            want = oracle.encode(request(data, name, rounding=rounding))
            got = reference.encode(data, formats.get_format(name), rounding)
            assert_same_parts(got, want, data)
            values = np.empty_like(data)
            oracle.decode(formats.get_format(name), want, 1, values, "float32")
            assert_same_bits(reference.decode(got, formats.get_format(name)), values, data)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_casts_of_all_16_bit_inputs(name: str, kind: str) -> None:
    x = all16(BF16 if kind == "bfloat16" else np.float16)
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64)
    if name == "int8":
        x, exact = x[~np.isnan(exact)], exact[~np.isnan(exact)]
    for rounding in DETERMINISTIC:
        for overflow in OVERFLOWS:
            want = oracle.encode(request(x, name, rounding=rounding, overflow=overflow)).codes
            got = reference.cast(exact, formats.get_format(name), rounding, overflow)
            assert_same_bits(got, want, x, f"{rounding} {overflow}")
