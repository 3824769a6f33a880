"""Tensor-core units as rows of a table.

Every NVIDIA unit from Volta to Blackwell is one primitive with other parameters: it takes `L`
products and the accumulator, shifts them to the largest exponent, cuts each off `F` bits below it,
adds what is left exactly, and rounds once (`rho`). A new unit is one more row.

Sources: PTX ISA 9.0 (instructions and formats); Khattak and Mikaitis, arXiv 2512.07004, and their
MATLAB-tensor-core repository (L, F, clamps, the recordings); MMA-Sim, arXiv 2511.10909 (block
scaling, `tcgen05`, Turing, sm_120).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fpemu.errors import unknown
from fpemu.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FP16,
    FP32,
    TF32,
    UE4M3,
    Format,
)

Order = Literal["chain", "pairs", "exact", "sequential", "pairwise", "fma"]
REFERENCES = ("exact", "sequential", "pairwise", "fma")
OUTPUTS = ("fp32", "fp16")


@dataclass(frozen=True)
class Unit:
    """One matrix unit: how a block of products is added to an accumulator.

    With ``s_k * 2**e_k`` the products of significands (exact, in [1, 4) for normal operands;
    subnormal operands keep their format's smallest exponent) and c the accumulator::

        E = max(e_k of nonzero products, e_c if c is nonzero, clamp)
        t = sum of trunc(s_k * 2**(e_k - E + F)), and the same of c      each toward zero, sum exact
        D = rho(t * 2**(E - F))                                        zero is always +0

    D is the accumulator of the next block of K. NaN (any NaN, Inf * 0, Inf - Inf) is 0x7FFFFFFF
    (0x7FFF in float16); an overflow is infinite, under truncation too.

    Parameters
    ----------
    name : str
        ``architecture.instruction.format``, or a reference (``exact``, ``fp32.fma``, ...).
    a, b : Format
        Element formats of the operands.
    L, F : int
        Block length (products per step) and fraction bits kept below the largest exponent.
    rho : {"rz32", "rz_e8m13"}
        Final rounding of a float32 result: toward zero at 23 or at 13 fraction bits. A float16
        result is rounded to nearest even, once, from the sum.
    outputs : tuple of {"fp32", "fp16"}
    clamp_fp32, clamp_fp16 : int or None
        Smallest alignment exponent for each output; None: none known, or out of reach.
    scale : Format or None
        Of the block scales; None for units without.
    scale_block : tuple of int
        Elements of K that share a scale: the sizes the instruction takes.
    group : int
        Products added exactly before they are aligned (16: FP4 block-scaled units, whose alignment
        looks at the scales' exponents only); 1: none.
    order : str
        ``chain``: D of one block is c of the next. ``pairs``: 32 of K are unpacked to float16 and
        go through two blocks of 16, alternating pairs, from +0; c is added last, rounded to
        nearest (how FP8 ``mma.sync`` is compiled where there is no FP8 unit behind it). The rest
        are references: ``exact`` (one rounding), ``sequential``, ``pairwise``, ``fma``.
    evidence : str
        ``hardware-verified: ...`` where recorded outputs replay, else ``model``.
    source : str
    """

    name: str
    a: Format
    b: Format
    L: int = 1
    F: int = 23
    rho: Literal["rz32", "rz_e8m13"] = "rz32"
    outputs: tuple[str, ...] = ("fp32",)
    clamp_fp32: int | None = None
    clamp_fp16: int | None = None
    scale: Format | None = None
    scale_block: tuple[int, ...] = ()
    group: int = 1
    order: Order = "chain"
    evidence: str = "model"
    source: str = "user"

    @property
    def architecture(self) -> str:
        return self.name.split(".")[0]

    @property
    def is_reference(self) -> bool:
        return self.order in REFERENCES

    @property
    def step(self) -> int:
        """Length of K that one step takes: K is zero-padded to a multiple of it."""
        return 32 if self.order == "pairs" else self.L

    def clamp(self, out: str) -> int | None:
        return self.clamp_fp32 if out == "fp32" else self.clamp_fp16

    def emin(self, fmt: Format) -> int:
        """Smallest exponent of an operand's significand: float16's where it is unpacked to that."""
        return FP16.emin if self.order == "pairs" else fmt.emin


def _recorded(fp32: Iterable[str], fp16: Iterable[str] = (), note: str = "", n: int = 1000) -> str:
    """The label of a row whose recordings replay (tests/gemm/test_recordings.py counts them)."""
    parts = [
        f"{kind} output on {', '.join(gpus)} ({n:,} each)"
        for kind, gpus in (("FP32", tuple(fp32)), ("FP16", tuple(fp16)))
        if gpus
    ]
    return "hardware-verified: " + "; ".join(parts) + (f"; {note}" if note else "")


_KM = "arXiv 2512.07004 and its recordings"
_SIM = "arXiv 2511.10909"
_BOTH = ("fp32", "fp16")
_F8F6F4 = (E4M3, E5M2, E3M2, E2M3, E2M1)
_MX_NAMES = {
    "mxfp8_e4m3": E4M3, "mxfp8_e5m2": E5M2, "mxfp6_e3m2": E3M2, "mxfp6_e2m3": E2M3, "mxfp4": E2M1,
}  # fmt: skip


def _floats(
    prefix: str, L: int, F: int, clamps: tuple[int, int], gpus: tuple[str, ...], note: str = ""
) -> list[Unit]:
    """FP16, BF16 and TF32 rows: TF32 takes half as many products, FP16 alone has FP16 output."""

    def label(fp16_output: bool) -> str:
        return _recorded(gpus, gpus if fp16_output else (), note) if gpus else "model"

    c32, c16 = clamps
    source = _KM if gpus else _SIM
    return [
        Unit(f"{prefix}.fp16", FP16, FP16, L, F, "rz32", _BOTH, c32, c16, evidence=label(True), source=source),
        Unit(f"{prefix}.bf16", BF16, BF16, L, F, "rz32", ("fp32",), c32, evidence=label(False), source=source),
        Unit(f"{prefix}.tf32", TF32, TF32, L // 2, F, "rz32", ("fp32",), c32, evidence=label(False), source=source),
    ]  # fmt: skip


def _pairs(formats: Iterable[Format]) -> list[tuple[str, Format, Format]]:
    """``e4m3``, ``e4m3xe5m2``, ...: every combination of operands."""
    formats = tuple(formats)
    return [(a.name if a is b else f"{a.name}x{b.name}", a, b) for a in formats for b in formats]


def _fp8(prefix: str, labels: dict[str, str], source: str, **row: object) -> list[Unit]:
    return [
        Unit(f"{prefix}.{name}", a, b, outputs=_BOTH, source=source,
             evidence=labels.get(name, "model"), **row)  # type: ignore[arg-type]
        for name, a, b in _pairs((E4M3, E5M2))
    ]  # fmt: skip


def _f8f6f4(prefix: str) -> list[Unit]:
    return [
        Unit(f"{prefix}.{name}", a, b, 32, 25, "rz32", _BOTH, source=f"{_SIM}; DeepGEMM issue 176")
        for name, a, b in _pairs(_F8F6F4)
    ]


def _block_scaled(prefix: str, fp4_prefix: str) -> list[Unit]:
    """MX rows with one scale exponent per 32 products, and the FP4 rows in groups of 16.

    Where both operands are FP4 the unit takes 64 of K (``kind::mxf4``); ``mxfp4_k32`` is FP4 through
    the 32-wide ``kind::mxf8f6f4``, as in every mixed pair.
    """
    rows = []
    for a_name, a in _MX_NAMES.items():
        for b_name, b in _MX_NAMES.items():
            name = a_name if a is b else f"{a_name}x{b_name}"
            name = "mxfp4_k32" if name == "mxfp4" else name
            rows.append(
                Unit(f"{prefix}.{name}", a, b, 32, 25, scale=E8M0, scale_block=(32,), source=_SIM)
            )
    fp4 = {"mxfp4": (E8M0, (32, 16)), "nvfp4": (UE4M3, (16,))}
    rows += [
        Unit(f"{fp4_prefix}.{name}", E2M1, E2M1, 64, 35, scale=scale, scale_block=blocks, group=16, source=_SIM)
        for name, (scale, blocks) in fp4.items()
    ]  # fmt: skip
    return rows


_E8M13 = "recorded with c = 0; FP16 output: model"
_ONE_HALF = "FP32 output: model (verified on B200)"

_ROWS: tuple[Unit, ...] = (
    Unit("volta.hmma.fp16", FP16, FP16, 4, 23, "rz32", _BOTH, None, -19,
         evidence=_recorded(["V100"], ["V100"]), source=_KM),
    Unit("turing.hmma.fp16", FP16, FP16, 8, 24, "rz32", _BOTH, None, -20, source=_SIM),
    *_floats("ampere.hmma", 8, 24, (-132, -20), ("A100",)),
    *_floats("ada.hmma", 8, 24, (-132, -20), ("Ada", "L40S")),
    *_fp8("ada.qmma", {"e4m3": _recorded(["Ada", "L40S"], ["Ada"]),
                       "e5m2": _recorded(["Ada", "L40S"], ["Ada"])}, _KM,
          L=16, F=13, rho="rz_e8m13"),
    *_floats("hopper.wgmma", 16, 25, (-133, -21), ("H100", "H200"), "recorded as mma, not wgmma"),
    *_fp8("hopper.wgmma", {"e4m3": _recorded(["H100", "H200"], note=_E8M13),
                           "e5m2": _recorded(["H100", "H200"], note=_E8M13)}, _KM,
          L=32, F=13, rho="rz_e8m13"),
    *_fp8("hopper.mma_sync", {"e4m3": _recorded([], ["H100", "H200"], _ONE_HALF),
                              "e5m2": _recorded([], ["H100", "H200"], _ONE_HALF)}, _KM,
          L=16, F=25, order="pairs", clamp_fp32=-133, clamp_fp16=-21),
    *_floats("blackwell.hmma", 16, 25, (-133, -21), ("B200",)),
    *_fp8("blackwell.mma_sync", {"e4m3": _recorded(["B200"], ["B200"]),
                                 "e5m2": _recorded(["B200"], ["B200"])}, _KM,
          L=16, F=25, order="pairs", clamp_fp32=-133, clamp_fp16=-21),
    *_floats("blackwell.tcgen05", 16, 25, (-133, -21), ()),
    *_f8f6f4("blackwell.tcgen05"),
    *_block_scaled("blackwell.tcgen05", "blackwell.tcgen05"),
    *_floats("rtx_blackwell.hmma", 16, 25, (-133, -21), ()),
    *_f8f6f4("rtx_blackwell.qmma"),
    *_block_scaled("rtx_blackwell.qmma", "rtx_blackwell.omma"),
    Unit("exact", FP32, FP32, outputs=_BOTH, order="exact", source="one rounding to nearest even",
         evidence="spec-verified: rational arithmetic"),
    Unit("fp32.sequential", FP32, FP32, order="sequential", source="IEEE 754 multiply, then add, in k order from c",
         evidence="spec-verified: rational arithmetic"),
    Unit("fp32.pairwise", FP32, FP32, order="pairwise", source="IEEE 754 products; neighbours added until one is left; then c",
         evidence="spec-verified: rational arithmetic"),
    Unit("fp32.fma", FP32, FP32, order="fma", source="IEEE 754 fusedMultiplyAdd in k order from c",
         evidence="spec-verified: rational arithmetic"),
)  # fmt: skip

UNITS: dict[str, Unit] = {row.name: row for row in _ROWS}


def get_unit(name: str | Unit, where: str = "get_unit") -> Unit:
    """The row called `name`; a `Unit` is returned as it is.

    sm_120 has one instruction, ``mma.sync``, in front of three units, so ``rtx_blackwell.mma_sync.X``
    (or ``.tcgen05.X``, the name of the same unit of sm_100) finds the unit that takes format X.

    Raises
    ------
    ValueError
        For a name that is not in the table, with the nearest known name.
    TypeError
        For anything that is neither a name nor a row.

    Examples
    --------
    >>> from fpemu.gemm import get_unit
    >>> unit = get_unit("hopper.wgmma.e4m3")
    >>> unit.L, unit.F, unit.rho
    (32, 13, 'rz_e8m13')
    """
    if isinstance(name, Unit):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"{where}: unit must be a name or a Unit, got {type(name).__name__}; for example"
            " unit='hopper.wgmma.e4m3'. fpemu.gemm.list_units() has the names."
        )
    if name in UNITS:
        return UNITS[name]
    architecture, instruction, operands = (*name.split(".", 2), "", "")[:3]
    if architecture == "rtx_blackwell" and instruction in ("mma_sync", "tcgen05"):
        for real in ("hmma", "qmma", "omma"):
            if f"{architecture}.{real}.{operands}" in UNITS:
                return UNITS[f"{architecture}.{real}.{operands}"]
    raise unknown(where, "unit", name, UNITS)


def list_units(pattern: str = "*") -> list[str]:
    """Names of the units that match a shell-style pattern, in table order.

    Examples
    --------
    >>> from fpemu.gemm import list_units
    >>> list_units("hopper.wgmma.e4*")
    ['hopper.wgmma.e4m3', 'hopper.wgmma.e4m3xe5m2']
    """
    import fnmatch

    return [name for name in UNITS if fnmatch.fnmatchcase(name, pattern)]
