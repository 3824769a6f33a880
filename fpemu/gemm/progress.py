"""Pieces of work over the threads, with a bar once they take more than a few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fpemu.backends.threads import parallel

PATIENCE = 3.0  # seconds without a bar


def run_pieces(
    function: Callable[..., Any], pieces: list[tuple[Any, ...]], progress: bool | None = False
) -> list[Any]:
    """``parallel(function, pieces)``; a bar on stderr if `progress`, or if it is None and that is
    a terminal."""
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()
    if not progress or len(pieces) < 4:
        return parallel(function, pieces)
    bar, done, lock, start = None, 0, threading.Lock(), time.monotonic()

    def counted(*piece: Any) -> Any:
        nonlocal bar, done
        result = function(*piece)
        with lock:
            done += 1
            if bar is None and time.monotonic() - start > PATIENCE and done < len(pieces):
                from rich.console import Console
                from rich.progress import Progress

                console = Console(stderr=True)
                bar = Progress(console=console, transient=console.is_terminal)
                bar.add_task("matmul", total=len(pieces))
                bar.start()
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
        return result

    try:
        return parallel(counted, pieces)
    finally:
        if bar is not None:
            bar.stop()
