"""The PTX ``cvt`` instructions that make and read low-precision formats, as rows of a table.

A row is what an assembler and an emulator must know of an instruction: its operands, its rounding
and which GPUs have it. Nothing here needs a GPU, and nothing here computes.

Sources: PTX ISA 9.1, cvt. Every row was assembled by ptxas 12.8 (sm_90) or 13.1 (sm_100a), and
refused where the table says that there is no such instruction; tests do both again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from fpemu.cvt import FORMS
from fpemu.errors import unknown
from fpemu.formats import Format, get_format

#: Rounding modifier -> rounding of `fpemu.encode`.
ROUNDINGS = {"rn": "rne", "rna": "rna", "rz": "rtz", "rm": "rtn", "rp": "rtp", "rs": "sr"}
#: PTX type of one value -> format of `fpemu`, where the names differ.
_FORMATS = {"f32": "fp32", "f16": "fp16", "ue8m0": "e8m0"}
#: Bits that one value of a format takes in an operand, where the format has fewer.
_SLOTS = {"tf32": 32, "e2m3": 8, "e3m2": 8}


@dataclass(frozen=True)
class Instruction:
    """One ``cvt``.

    Parameters
    ----------
    ptx : str
        The instruction with its modifiers, in the order that the PTX ISA writes them.
    source : str
        Type of a source register: ``f32`` (one per value), or packed: ``f16x2``, ``e4m3x2``, ...
    destination : str
        Name of the format of the results.
    lanes : int
        Values per instruction: 1, 2 or 4. Value 0 is the lowest lane.
    rounding : str
        PTX modifier: rn, rna, rz, rm, rp or rs.
    satfinite, relu, random : bool
        Whether overflow gives the largest finite value, negative results give 0, and a 32-bit
        random word is an operand.
    targets : tuple of str
        Which of ``sm_90`` and ``sm_100a`` have it.
    capability : (int, int)
        The least compute capability that has it.
    only : tuple of (int, int)
        The compute capabilities that have it, where not every later one does.
    since_ptx : str
        PTX ISA version.
    source_note : str
        What the emulator's answer rests on where the PTX ISA does not say it.
    """

    ptx: str
    source: str
    destination: str
    lanes: int
    rounding: str
    satfinite: bool
    relu: bool
    random: bool
    targets: tuple[str, ...]
    capability: tuple[int, int]
    since_ptx: str
    only: tuple[tuple[int, int], ...] = ()
    source_note: str = ""

    @property
    def packed(self) -> bool:
        """Whether one register holds all source values."""
        return self.source != "f32"

    @property
    def source_format(self) -> Format:
        return _format(self.source.split("x")[0])

    @property
    def source_bits(self) -> int:
        """Bits of one source value where it lies in its register."""
        return _slot(self.source_format)

    @property
    def destination_format(self) -> Format:
        return _format(self.destination)

    @property
    def result_bits(self) -> int:
        """Bits of one result where it lies in the destination register."""
        return _slot(self.destination_format)

    @property
    def form(self) -> str | None:
        """Name of the form in `fpemu.cvt.FORMS`, where the rounding is stochastic."""
        return self.ptx.split(".")[-2] if self.random else None

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of a compute capability has the instruction."""
        return capability in self.only if self.only else capability >= self.capability

    @property
    def needs(self) -> str:
        """The GPUs that have it, in words.

        Examples
        --------
        >>> from fpemu.hw import INSTRUCTIONS
        >>> INSTRUCTIONS["cvt.rn.satfinite.e4m3x2.f32"].needs
        'compute capability 8.9 or later'
        >>> INSTRUCTIONS["cvt.rs.satfinite.e2m1x4.f32"].needs
        'compute capability 10.0 or 10.3'
        """
        if self.only:
            return "compute capability " + " or ".join(f"{a}.{b}" for a, b in self.only)
        return "compute capability {}.{} or later".format(*self.capability)


def _format(ptx_type: str) -> Format:
    row = get_format(_FORMATS.get(ptx_type, ptx_type))
    assert isinstance(row, Format)
    return row


def _slot(fmt: Format) -> int:
    return _SLOTS.get(fmt.name, fmt.bits)


# The families ------------------------------------------------------------------------------------


class Needs(NamedTuple):
    """Which GPUs have a family, and which PTX ISA; fields as in `Instruction`."""

    targets: tuple[str, ...]
    capability: tuple[int, int]
    since_ptx: str
    only: tuple[tuple[int, int], ...] = ()


_BOTH, _BLACKWELL = ("sm_90", "sm_100a"), ("sm_100a",)
_AMPERE, _AMPERE_SATFINITE = Needs(_BOTH, (8, 0), "7.0"), Needs(_BOTH, (8, 0), "8.1")
_FP8 = Needs(_BOTH, (8, 9), "7.8")
_HOPPER = Needs(_BOTH, (9, 0), "7.8")
_FP4 = Needs(_BLACKWELL, (10, 0), "8.6")
_FROM_HALF = Needs(_BLACKWELL, (10, 0), "9.1")
_RS = Needs(_BLACKWELL, (10, 0), "8.7", only=((10, 0), (10, 3)))

_RELU = "-0 under .relu gives +0: model, not said by the PTX ISA"
_NAN = f"NaN gives the canonical NaN 0x7fff, and {_RELU}"
_TF32_NAN = f"NaN gives 0x7fffffff, low 13 bits set, and {_RELU}"
_TF32_RNA = (
    "ptxas 12.8, 12.9 and 13.1 write it out in integers, as read in their SASS: NaN loses its"
    " low 13 bits (and .satfinite subtracts 0x2000 from what is left), so it can become infinite"
)
_UE8M0 = (
    "the sign is dropped; zero and what is smaller than 2**-127 give 0x00: model, as the host code"
    " of CUDA 13.0's cuda_fp8.hpp"
)
_READ = "NaN gives 0x7fff: model, as the host code of CUDA 13.0's cuda_fp8.hpp"
_EITHER = (False, True)


def _row(
    form: str,
    rounding: str,
    satfinite: bool,
    relu: bool,
    needs: Needs,
    source_note: str,
    relu_first: bool = False,
) -> Instruction:
    """A row from its types, ``e4m3x2.f32``; PTX writes ``.relu`` first in some forms."""
    modifiers = [".satfinite" * satfinite, ".relu" * relu]
    middle = "".join(reversed(modifiers) if relu_first else modifiers)
    destination, source = form.split(".")
    element, _, lanes = destination.partition("x")
    return Instruction(
        f"cvt.{rounding}{middle}.{form}", source, _format(element).name, int(lanes or 1),
        rounding, satfinite, relu, rounding == "rs", *needs, source_note,
    )  # fmt: skip


def _half() -> Iterator[Instruction]:
    """float32 to float16 and bfloat16."""
    for element, lanes in product(("f16", "bf16"), ("", "x2")):
        form = f"{element}{lanes}.f32"
        for rounding, sat, relu in product(("rn", "rz"), _EITHER, _EITHER):
            needs = _AMPERE_SATFINITE if sat else _AMPERE
            yield _row(form, rounding, sat, relu, needs, _NAN, relu_first=True)
        if not lanes:
            for rounding in ("rm", "rp"):
                yield _row(form, rounding, False, False, _AMPERE, _NAN)


def _tf32() -> Iterator[Instruction]:
    """float32 to TF32; ``.rna`` is its alone."""
    for sat in _EITHER:
        needs = _AMPERE_SATFINITE if sat else _AMPERE
        yield _row("tf32.f32", "rna", sat, False, needs, _TF32_RNA)
    for rounding, sat, relu in product(("rn", "rz"), _EITHER, _EITHER):
        yield _row("tf32.f32", rounding, sat, relu, _FP4 if sat else _HOPPER, _TF32_NAN)


def _narrow() -> Iterator[Instruction]:
    """To FP8, FP6 and FP4, which always saturate, and back to float16, which is exact."""
    for element in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"):
        first = _FP8 if element in ("e4m3", "e5m2") else _FP4
        halves = {"f16x2": _FP8 if first is _FP8 else _FROM_HALF, "bf16x2": _FROM_HALF}
        for source, needs in {"f32": first, **halves}.items():
            for relu in _EITHER:
                yield _row(f"{element}x2.{source}", "rn", True, relu, needs, _RELU * relu)
        for relu in _EITHER:
            yield _row(f"f16x2.{element}x2", "rn", False, relu, first, _READ)


def _ue8m0() -> Iterator[Instruction]:
    """To the scales of MX blocks, and back."""
    for source, rounding, sat in product(("f32", "bf16x2"), ("rz", "rp"), _EITHER):
        yield _row(f"ue8m0x2.{source}", rounding, sat, False, _FP4, _UE8M0)
    yield _row("bf16x2.ue8m0x2", "rn", False, False, _FP4, _READ)


def _stochastic() -> Iterator[Instruction]:
    """float32 to all of them with random bits."""
    for form, row in FORMS.items():
        if "/" in form:  # software
            continue
        saturates = (True,) if form.endswith("x4") else _EITHER
        for sat, relu in product(saturates, _EITHER):
            yield _row(f"{form}.f32", "rs", sat, relu, _RS, row.evidence, relu_first=True)


#: Every instruction by its PTX name.
INSTRUCTIONS: dict[str, Instruction] = {
    row.ptx: row for family in (_half, _tf32, _narrow, _ue8m0, _stochastic) for row in family()
}


def get_instruction(name: str, where: str = "get_instruction") -> Instruction:
    """The row of a PTX name.

    Raises
    ------
    ValueError
        For a name that is not in the table, with the nearest one that is.

    Examples
    --------
    >>> from fpemu.hw import get_instruction
    >>> row = get_instruction("cvt.rn.satfinite.e2m1x2.f32")
    >>> row.destination, row.lanes, row.targets
    ('e2m1', 2, ('sm_100a',))
    """
    if name not in INSTRUCTIONS:
        raise unknown(where, "instruction", name, INSTRUCTIONS)
    return INSTRUCTIONS[name]
