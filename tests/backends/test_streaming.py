"""Results of 8 MiB and more are written past the caches: on rows that no vector is aligned with."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_same_bits

import fpemu
from fpemu.backends.numba_ import STREAM_BYTES


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4/2d"])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_odd_length(fmt: str, axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((2112, 1001), np.float32)
    assert x.nbytes > STREAM_BYTES
    amax = {"amax": float(np.abs(x).max())} if fmt.startswith("nvfp4") else {}
    got = fpemu.quantize(x, fmt, axis=axis, **amax)
    for row in range(0, len(x), 704):  # a third each: below the limit
        part = x[row : row + 704]
        assert_same_bits(got[row : row + 704], fpemu.quantize(part, fmt, axis=axis, **amax), part)


def test_result_at_an_odd_address() -> None:
    x = np.random.default_rng(0).standard_normal((2048, 1028), np.float32)
    out = np.empty(x.size + 1, np.float32)[1:].reshape(x.shape)
    assert out.ctypes.data % 16
    fpemu.quantize(x, "mxfp4", axis=0, out=out)
    assert_same_bits(out, fpemu.quantize(x, "mxfp4", axis=0), x)
