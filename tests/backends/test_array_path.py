"""The fused scale rules equal `fpemu.scaling`, the array form of the same rules, bit for bit."""

import numpy as np
import pytest
from helpers import assert_same_bits

import fpemu
from fpemu import formats
from fpemu.backends import numba_
from fpemu.dialects import dialect_of
from fpemu.scaling import EXPONENT_RULES

MULTIPLIED = [
    name
    for name, row in formats.TABLE.items()
    if isinstance(row, formats.BlockFormat)
    and row.block
    and row.rule not in EXPONENT_RULES
    and dialect_of(row) is None
]


@pytest.fixture
def array_path(monkeypatch):
    """Calls take the array path while this is on."""

    def switch(on):
        numba_._plan.cache_clear()
        monkeypatch.setattr(numba_, "_fused_rule", (lambda fmt: None) if on else fused)

    fused = numba_._fused_rule
    yield switch
    numba_._plan.cache_clear()


def blocks(rng, shape):
    """Blocks at many scales, with zero, NaN, infinite and subnormal ones among them."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-40, 40, (shape[0], 1))
    x[0], x[1], x[2, 3], x[3, 5] = 0, x[1] * 1e-36, np.nan, np.inf
    return x.astype(np.float32)


CASES = [
    (name, amax)
    for name in MULTIPLIED
    for amax in ((None, 3.0, 1e-38, 0.0) if formats.TABLE[name].tensor_scaled else (None,))
]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("name", "amax"), CASES)
def test_fused_rules_equal_the_array_rules(name, axis, amax, array_path):
    x = blocks(np.random.default_rng(5), (144, 300))
    array_path(False)
    fused = fpemu.encode(x, name, axis=axis, amax=amax)
    values = fpemu.quantize(x, name, axis=axis, amax=amax)
    array_path(True)
    plain = fpemu.encode(x, name, axis=axis, amax=amax)
    assert_same_bits(fused.codes, plain.codes, x)
    assert_same_bits(fused.scales, plain.scales)
    assert_same_bits(values, fpemu.quantize(x, name, axis=axis, amax=amax), x)


def test_a_rule_of_ones_own_scale_format_takes_the_array_path():
    row = formats.BlockFormat("fp4_e5m2", formats.E2M1, (16,), formats.E5M2, "nvfp4", True)
    x = blocks(np.random.default_rng(6), (64, 40))
    got = fpemu.encode(x, row, backend="numba")
    want = fpemu.encode(x, row, backend="torch")
    assert_same_bits(got.codes, want.codes, x)
    assert_same_bits(got.scales, want.scales)
