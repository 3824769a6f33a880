"""What each name rests on: `evidence` says what was compared with what, and how much.

The table is ``evidence.json`` beside this file. ``docs/make_evidence.py`` makes it, and the page
``docs/evidence.md``, from the format, unit and recipe tables and from the records of comparisons;
tests fail where it claims more than those show.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fpemu.errors import unknown

Label = Literal["hardware-verified", "library-verified", "spec-verified", "model"]
LABELS: tuple[Label, ...] = ("hardware-verified", "library-verified", "spec-verified", "model")


@dataclass(frozen=True)
class Evidence:
    """What one name rests on.

    Parameters
    ----------
    name : str
        Of a format, a dialect, a tensor-core unit, a GEMM recipe or a cast instruction.
    label : {"hardware-verified", "library-verified", "spec-verified", "model"}
        Equal to recorded outputs of a GPU; to a library that was run; to exact arithmetic by the
        published definition; or a formula that was read and not run.
    what : str
        Which GPU, library and version, or definition.
    count : int
        How many were compared, all of them equal; 0 where nothing was.
    of : str
        Of what: ``blocks``, ``outputs``, ``inputs``.
    source : str
        Where the arithmetic comes from.
    note : str
        What the label does not cover, for example special values that deviate.

    Examples
    --------
    >>> import fpemu
    >>> print(fpemu.evidence("hopper.wgmma.e4m3"))
    hopper.wgmma.e4m3: hardware-verified. FP32 output on H100, H200: 2,000 outputs equal. Recorded with c = 0; FP16 output: model. Source: arXiv 2512.07004 and its recordings.
    """

    name: str
    label: Label
    what: str
    count: int = 0
    of: str = ""
    source: str = ""
    note: str = ""

    def __str__(self) -> str:
        counted = f": {self.count:,} {self.of} equal" if self.count else ""
        parts = [f"{self.name}: {self.label}", self.what + counted]
        parts += [self.note[:1].upper() + self.note[1:]] if self.note else []
        parts += [f"Source: {self.source}"] if self.source else []
        return ". ".join(parts) + "."


@lru_cache(maxsize=1)
def table() -> dict[str, Evidence]:
    """Every name and its evidence."""
    rows = json.loads(Path(__file__).with_name("evidence.json").read_text(encoding="utf-8"))
    return {name: Evidence(name, **row) for name, row in rows.items()}


def evidence(name: Any) -> Evidence:
    """What the bits of `name` rest on.

    Parameters
    ----------
    name : str, Format, BlockFormat, Unit or Recipe
        A format or dialect (``"nvfp4/torchao"``), a tensor-core unit (``"hopper.wgmma.e4m3"``), a
        GEMM recipe (``"deepgemm.1d2d"``) or a cast instruction (``"cvt.rn.satfinite.e4m3x2.f32"``,
        ``"cvt.rs.e2m1x4"``), or a row of those tables.

    Returns
    -------
    Evidence

    Raises
    ------
    ValueError
        For a name that is in no table: a row of your own has no evidence.

    Examples
    --------
    >>> import fpemu
    >>> e = fpemu.evidence("nvfp4/torchao")
    >>> e.label, e.what, e.of
    ('library-verified', 'torchao 0.18.0', 'blocks')
    >>> fpemu.evidence("nvfp4/te-fast").label
    'model'
    """
    rows = table()
    key = name if isinstance(name, str) else getattr(name, "name", name)
    if key not in rows and isinstance(key, str) and key.startswith("rtx_blackwell."):
        from fpemu.gemm.units import get_unit  # one instruction in front of three units

        key = get_unit(key, "evidence").name
    if key not in rows or not isinstance(key, str):
        raise unknown("evidence", "name", key, rows)
    return rows[key]
