"""The real instructions: raw bits in, raw bits out, and what the emulator says they give.

>>> import numpy as np
>>> from fpemu import hw
>>> x = np.float32([1.0, 3.3]).view(np.uint32)
>>> hw.replay("cvt.rn.satfinite.e2m1x2.f32", x)     # on the CPU; hw.run(...) is the GPU itself
array([2, 5], dtype=uint8)
"""

from __future__ import annotations

from fpemu.hw.casts import run
from fpemu.hw.emulation import replay
from fpemu.hw.instructions import INSTRUCTIONS, Instruction, get_instruction

__all__ = ["INSTRUCTIONS", "Instruction", "get_instruction", "replay", "run"]
