"""Element formats by what shares a scale: a tensor, a row, 128, 32 or 16 values, two levels."""

from __future__ import annotations

from typing import NamedTuple

import fpemu
from fpemu.formats import E2M1, E4M3, FP32, INT8, BlockFormat, Format


class Quantizer(NamedTuple):
    """One cell of the study: a family, what shares a scale, and the format."""

    family: str
    scaling: str
    fmt: BlockFormat

    @property
    def name(self) -> str:
        return f"{self.family} {self.scaling}"


SCALINGS = ("tensor", "row", "128", "32", "16", "two-level")
FAMILIES: dict[str, Format] = {"FP8": E4M3, "FP4": E2M1, "INT8": INT8}
#: Longest row; a block of a row format that is longer than the row is cut to it.
LONGEST = 1 << 16


def by_scale(name: str, element: Format, block: tuple[int, ...] | None) -> BlockFormat:
    """An element format with a float32 scale fl(max / amax) for each block, or for the tensor."""
    return BlockFormat(
        name, element, block, None if block is None else FP32, "fp8", tensor_scaled=block is None
    )


def named(name: str) -> BlockFormat:
    fmt = fpemu.get_format(name)
    assert isinstance(fmt, BlockFormat)
    return fmt


def quantizers() -> list[Quantizer]:
    """Every family by every scaling that a format has; MX scales are rounded up, so nothing clips."""
    made = []
    for family, element in FAMILIES.items():
        made += [
            Quantizer(family, "tensor", by_scale(f"{family} tensor", element, None)),
            Quantizer(family, "row", by_scale(f"{family} row", element, (LONGEST,))),
            Quantizer(family, "128", by_scale(f"{family} 128", element, (128,))),
        ]
        mx = {"FP8": "mxfp8_e4m3/rceil", "FP4": "mxfp4/rceil", "INT8": "mxint8/rceil"}[family]
        made.append(Quantizer(family, "32", named(mx)))
        if family == "FP4":
            made.append(Quantizer(family, "16", named("nvfp4/1level")))
            made.append(Quantizer(family, "two-level", named("nvfp4")))
    return made


def shortened(fmt: BlockFormat, length: int) -> BlockFormat:
    """A row format with the block of this row length; others as they are."""
    if fmt.block == (LONGEST,):
        return by_scale(fmt.name, fmt.element, (length,))
    return fmt
