"""Checkpoints of quantized models: read, write and compare every library's layout.

Weights are read one at a time from safetensors files, shards included. What a library stores, and
how, is a row of `LAYOUTS`; see ``docs/checkpoints.md``.

>>> import fpemu
>>> sorted(fpemu.checkpoints.LAYOUTS)[:3]
['deepseek-fp8', 'deepseek-fp8-ue8m0', 'float-quantized']
"""

from __future__ import annotations

from fpemu.checkpoints.comparing import Difference, diff
from fpemu.checkpoints.converting import UNQUANTIZED, Conversion, convert
from fpemu.checkpoints.layouts import LAYOUTS, Layout
from fpemu.checkpoints.reading import Checkpoint, Entry
from fpemu.checkpoints.reading import open_checkpoint as open

__all__ = [
    "LAYOUTS",
    "UNQUANTIZED",
    "Checkpoint",
    "Conversion",
    "Difference",
    "Entry",
    "Layout",
    "convert",
    "diff",
    "open",
]
