"""IEEE mode for the float32 steps: subnormals are neither flushed nor read as zero.

``torch.set_flush_denormal(True)`` sets the processor's flush bits for its thread (and threads
started from it). Bits must not depend on that, so every call clears them and puts them back.
"""

from __future__ import annotations

import platform
from types import TracebackType

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fpemu.backends.jit import jit

_MACHINE = platform.machine().lower()
_X86 = _MACHINE in ("x86_64", "amd64", "i686", "i386")
_ARM = _MACHINE in ("aarch64", "arm64")
# MXCSR: flush-to-zero is bit 15, denormals-are-zero bit 6. FPCR: FZ is bit 24, FIZ bit 0.
_FLUSH_BITS = (1 << 15 | 1 << 6) if _X86 else (1 << 24 | 1)

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()


def _call(b, name, result, arguments):  # type: ignore[no-untyped-def]
    kind = ir.FunctionType(result, [a.type for a in arguments])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    return b.call(function, arguments)


@intrinsic
def _control(typingctx):  # type: ignore[no-untyped-def]
    """The thread's floating-point control register."""

    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        if _X86:
            slot = b.alloca(_I32)
            _call(b, "llvm.x86.sse.stmxcsr", ir.VoidType(), [b.bitcast(slot, _BYTES)])
            return b.zext(b.load(slot), _I64)
        if _ARM:
            return _call(b, "llvm.aarch64.get.fpcr", _I64, [])
        return ir.Constant(_I64, 0)

    return types.int64(), codegen


@intrinsic
def _set_control(typingctx, value):  # type: ignore[no-untyped-def]
    def codegen(context, b, signature, values):  # type: ignore[no-untyped-def]
        if _X86:
            slot = b.alloca(_I32)
            b.store(b.trunc(values[0], _I32), slot)
            _call(b, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [b.bitcast(slot, _BYTES)])
        elif _ARM:
            _call(b, "llvm.aarch64.set.fpcr", ir.VoidType(), [values[0]])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@jit
def _clear(bits):  # type: ignore[no-untyped-def]
    """Clear `bits` of the control register; returns what it was."""
    old = _control()
    if old & bits:
        _set_control(old & ~bits)
    return old


@jit
def _restore(old):  # type: ignore[no-untyped-def]
    _set_control(old)


class ieee_mode:
    """Context in which this thread neither flushes nor ignores subnormals."""

    __slots__ = ("old",)

    def __enter__(self) -> None:
        self.old = _clear(_FLUSH_BITS)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.old & _FLUSH_BITS:
            _restore(self.old)


def flushes() -> bool:
    """Whether this thread flushes subnormals now (for tests)."""
    tiny = np.array([1e-45], np.float32)
    return bool((tiny * np.float32(1)).view(np.uint32)[0] == 0)
