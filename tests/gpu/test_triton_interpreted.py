"""The quantizer kernels' logic, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: nothing interprets its kernels")

BODIES = ("tests/gpu/triton_bodies.py", "tests/gpu/triton_dialect_bodies.py")
ROOT = Path(__file__).resolve().parents[2]


def test_in_the_interpreter() -> None:
    """In a process of its own, for Triton decides at import whether a kernel is interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *BODIES],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert int(re.match(r"\D*(\d+) passed", last)[1]) > 250 and "skipped" not in last, last  # type: ignore[index]
