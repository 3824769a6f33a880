"""All 65,536 float16 and bfloat16 inputs, every element format, rounding and overflow mode."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import reference
from helpers import (
    BF16,
    DETERMINISTIC,
    ELEMENTS,
    FAST,
    OVERFLOWS,
    all16,
    as_numpy,
    assert_same_bits,
    decoded,
    give,
)  # fmt: skip

import fpemu

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BF16}


@cache
def _inputs(name: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and their exact values; integers refuse NaN."""
    x = all16(DTYPES[kind])
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64)
    keep = ~np.isnan(exact) if name == "int8" else slice(None)
    return x[keep], exact[keep]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_input(name: str, kind: str, backend: str) -> None:
    fmt = fpemu.get_format(name)
    x, exact = _inputs(name, kind)
    given = give(backend, x)
    for rounding in DETERMINISTIC:
        for overflow in OVERFLOWS:
            options = {"rounding": rounding, "overflow": overflow, "backend": backend}
            want = reference.cast(exact, fmt, rounding, overflow)
            note = f"{name} {rounding} {overflow}"
            codes = as_numpy(fpemu.encode(given, name, **options).codes)
            assert_same_bits(codes, want, x, note)
            values = fpemu.quantize(given, name, **options)
            assert_same_bits(values, decoded(fmt, want, x.dtype), x, note)
