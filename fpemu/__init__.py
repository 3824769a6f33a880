"""fpemu: the exact bits of low-precision training and inference, on any machine.

>>> import numpy as np, fpemu
>>> fpemu.quantize(np.float32([0.1, 1.0, 2.6, 5.25]), fmt="nvfp4")
array([0.   , 0.875, 2.625, 5.25 ], dtype=float32)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fpemu.backends.threads import get_num_threads, set_num_threads
    from fpemu.comparison import compare
    from fpemu.cvt import cvt_rs
    from fpemu.encoded import Encoded
    from fpemu.errors import BackendError, FileFormatError, FpemuError
    from fpemu.formats import BlockFormat, Format, get_format, list_formats
    from fpemu.gemm import matmul
    from fpemu.identification import identify
    from fpemu.labels import evidence
    from fpemu.monitor import Monitor
    from fpemu.ops import decode, encode, quantize
    from fpemu.rotation import hadamard
    from fpemu.statistics import Stats, stats

# Where each name lives: a module is imported when its first name is asked for, so that
# `import fpemu` loads neither torch nor numba.
_HOME = {
    "BackendError": "errors",
    "BlockFormat": "formats",
    "Encoded": "encoded",
    "FileFormatError": "errors",
    "Format": "formats",
    "FpemuError": "errors",
    "Monitor": "monitor",
    "Stats": "statistics",
    "compare": "comparison",
    "cvt_rs": "cvt",
    "decode": "ops",
    "encode": "ops",
    "evidence": "labels",
    "get_format": "formats",
    "get_num_threads": "backends.threads",
    "hadamard": "rotation",
    "identify": "identification",
    "list_formats": "formats",
    "matmul": "gemm",
    "quantize": "ops",
    "set_num_threads": "backends.threads",
    "stats": "statistics",
}
_MODULES = ("checkpoints", "cvt", "formats", "gemm", "monitor", "nn", "recipes", "rotation")
__all__ = sorted([*_HOME, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fpemu.{name}")
    try:
        module = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'fpemu' has no attribute {name!r}") from None
    value = getattr(import_module(f"fpemu.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
