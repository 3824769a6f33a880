"""`jit`: how every kernel is compiled, and when a compiled one is stale.

No fast-math: numba then neither contracts nor reorders floating-point operations. Compiled code is
cached on disk. numba stamps a cached function with the file it stands in; ours are also made of
bodies that other files emit, and a change there must not bring back old bits. So the stamp covers
every kernel source.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from numba import njit
from numba.core import caching

_PACKAGE = Path(__file__).parent.parent
_SOURCES = ("backends/*.py", "gemm/*.py", "casting.py", "formats.py", "rng.py")

jit = njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)


@lru_cache(maxsize=1)
def _stamp() -> str:
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            if not path.name.startswith("triton"):  # kernels of another compiler
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _stamped(base: type) -> type:
    def from_function(cls, function, source):  # type: ignore[no-untyped-def]
        ours = _PACKAGE in Path(source).parents
        return base.from_function.__func__(cls, function, source) if ours else None

    members = {
        "get_source_stamp": lambda self: _stamp(),
        "from_function": classmethod(from_function),
    }
    return type(f"Fpemu{base.__name__}", (base,), members)


# numba has no public hook for this; the locators stand first and answer for our files only.
caching.CacheImpl._locator_classes[:0] = [
    _stamped(caching.UserProvidedCacheLocator),
    _stamped(caching.InTreeCacheLocator),
    _stamped(caching.UserWideCacheLocator),
]
