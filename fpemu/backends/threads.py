"""A small thread pool for kernels that release the GIL.

Threads of ours, not OpenMP's or numba's: they may be entered from any thread at once (autograd's
backward thread, a data loader, the main thread), and bits never depend on how work is split.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fpemu.backends.floatmode import ieee_mode

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_threads: int | None = None
_inside = threading.local()


def get_num_threads() -> int:
    """Threads a call may use; all cores this process may run on, unless set."""
    if _threads is not None:
        return _threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_num_threads(n: int | None) -> None:
    """Use at most `n` threads a call; None: all cores. Bits do not change.

    Raises
    ------
    ValueError
        For anything but a positive integer or None.
    """
    global _threads, _pool
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ValueError(
            f"set_num_threads: n must be a positive integer or None, got {n!r}. None uses all cores."
        )
    with _lock:
        _threads, _pool = n, None


def parallel(function: Callable[..., Any], pieces: Sequence[tuple[Any, ...]]) -> list[Any]:
    """``[function(*piece) for piece in pieces]``, spread over the threads.

    The calling thread works too. A piece that itself calls `parallel` runs its pieces in place, so
    a full pool cannot wait for itself. An error is raised when every thread has stopped.
    """
    workers = min(len(pieces), get_num_threads())
    if workers <= 1 or getattr(_inside, "pool", False):
        return [function(*piece) for piece in pieces]
    todo = deque(enumerate(pieces))
    results: list[Any] = [None] * len(pieces)

    def work() -> None:
        with ieee_mode():
            drain()

    def drain() -> None:
        while todo:
            try:
                k, piece = todo.popleft()
            except IndexError:
                return
            try:
                results[k] = function(*piece)
            except BaseException:
                todo.clear()  # the others stop after the piece they are at
                raise

    def work_in_pool() -> None:
        _inside.pool = True
        work()

    others = [_executor().submit(work_in_pool) for _ in range(workers - 1)]
    try:
        _inside.pool = True
        work()
    finally:
        _inside.pool = False
        errors = [other.exception() for other in others]  # waits: nobody writes after we return
    for error in errors:
        if error is not None:
            raise error
    return results


def split(total: int, step: int, least: int, most: int) -> list[tuple[int, int]]:
    """Ranges that cover ``0 .. total`` in order, cut at multiples of `step`.

    One a thread, but none shorter than `least` (threads cost more than they bring) and none much
    longer than `most` (so that a late thread does not keep the others waiting).
    """
    count = max(1, min(get_num_threads(), total // max(least, 1)), -(-total // most))
    size = -(-total // count)
    size = max(-(-size // step) * step, 1)
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(get_num_threads() - 1, 1), "fpemu")
        return _pool


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()
    _inside.pool = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
