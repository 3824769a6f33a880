"""`explain` shows the numbers that `matmul` computes with."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from gemm.cases import cases

import fpemu
from fpemu.gemm import explain, get_unit, matmul


@pytest.mark.parametrize(
    "name",
    ["hopper.wgmma.e4m3", "ampere.hmma.bf16", "blackwell.mma_sync.e5m2", "hopper.wgmma.fp16"],
)
def test_it_is_the_same_computation(name: str) -> None:
    unit = get_unit(name)
    for out in unit.outputs:
        for k in cases(unit, 1, 70, 1):
            got = explain(k.a[0], k.b[:, 0], unit, float(k.c[0, 0]), out)
            d = matmul(k.a, k.b, unit=unit, c=k.c, out=out)[0, 0]
            assert np.float64(got.result) == d or np.isnan([got.result, d]).all()
            for line in str(got).splitlines():
                assert len(line) <= 80


def test_terms_add_up() -> None:
    rng = np.random.default_rng(0)
    a, b = (fpemu.quantize(rng.standard_normal(96).astype(np.float32), "e4m3") for _ in "ab")
    e = explain(a, b, "hopper.wgmma.e4m3", c=1.0)
    assert e.exact == 1 + sum(
        Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)
    )
    assert e.error == float(Fraction(e.result) - e.exact)
    assert len(e.blocks) == 3
    for block in e.blocks:
        assert block.total == sum(t.kept for t in block.terms)
        assert block.E is not None
        assert block.quantum == Fraction(2) ** (block.E - 13)
        for t in block.terms:
            assert (t.kept / block.quantum).denominator == 1
            assert abs(t.cut) < block.quantum
            assert t.cut * t.exact >= 0
    assert e.cut != 0


def test_scaled_and_special() -> None:
    x = np.linspace(-3, 3, 80).astype(np.float32)
    a, b = fpemu.encode(x, "nvfp4/1level"), fpemu.encode(x[::-1].copy(), "nvfp4/1level")
    e = explain(a, b, "blackwell.tcgen05.nvfp4")
    assert [len(block.terms) for block in e.blocks] == [5, 2]
    left = fpemu.encode(x[None], "nvfp4/1level")
    right = fpemu.encode(x[::-1, None].copy(), "nvfp4/1level", axis=0)
    assert e.result == matmul(left, right, unit="blackwell.tcgen05.nvfp4")[0, 0]
    special = explain([np.inf, 1.0], [1.0, 1.0], "hopper.wgmma.e5m2")
    assert (special.result, special.exact, special.error) == (np.inf, None, None)
    assert "special values" in str(special)
    assert "0x7FFFFFFF" in str(explain([np.nan], [1.0], "hopper.wgmma.e5m2"))
    assert "rounded to nearest" in str(explain([1.0], [1.0], "blackwell.mma_sync.e4m3"))
