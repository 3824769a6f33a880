"""The oracle's exact floor and ceiling of a rounded logarithm are those of torch's ``log2``."""

from __future__ import annotations

import numpy as np
import pytest

from fpemu.backends import oracle_dialects

torch = pytest.importorskip("torch", reason="torch is not installed")


def _bits(kind: str) -> np.ndarray:
    """Positive finite patterns: a sample of all in 16 bits, those near powers of two in 32."""
    if kind == "float32":
        powers = [*range(1 << 23, 255 << 23, 1 << 23), *(1 << s for s in range(23))]
        near = np.arange(-24, 25)
        found = np.unique(np.concatenate([power + near for power in powers[::4]]))
        return found[(found > 0) & (found < 0x7F800000)].astype(np.int32)
    return np.arange(1, {"bfloat16": 0x7F80, "float16": 0x7C00}[kind], 7, dtype=np.int16)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_floor_and_ceiling(kind: str) -> None:
    bits = _bits(kind)
    log2 = torch.log2(torch.from_numpy(bits).view(getattr(torch, kind))).double().numpy()
    floors = [oracle_dialects.floor_log2(b, kind) for b in bits.tolist()]
    ceilings = [oracle_dialects.ceil_log2(b, kind) for b in bits.tolist()]
    assert floors == np.floor(log2).tolist()
    assert ceilings == np.ceil(log2).tolist()


def test_a_rounded_logarithm_reaches_the_next_power_early() -> None:
    """255 in bfloat16, and the float32 before 8."""
    assert oracle_dialects.floor_log2(0x437F, "bfloat16") == 8
    assert oracle_dialects.floor_log2(0x40FFFFFF) == 3
    assert oracle_dialects.ceil_log2(0x47600001) == 16
    assert oracle_dialects.ceil_log2(0x43000001) == 7  # just above 128, rounded to 7
