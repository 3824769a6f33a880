"""One tiny training study, shared by the tests that look at its record and figures; workers without
processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import harness, model, runs, underflow
from fpemu.backends import threads

TINY = underflow.Budget(
    model.Shape(width=32, layers=1, heads=2, context=32),
    model.Training(steps=4, batch=2, warmup=2),
    captures=2,
    draws=3,
    held_out=1 << 11,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``--quick`` a matter of seconds."""
    monkeypatch.setitem(underflow.BUDGETS, "quick", TINY)


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the record and figures of a run of seconds."""
    out = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(underflow.BUDGETS, "quick", TINY)
        assert underflow.main(["--quick", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="session")
def record(study: Path) -> dict:
    return harness.read_record(study / "underflow.json")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a worker."""
    before = torch.get_num_threads()
    runs.one_thread()
    yield
    torch.set_num_threads(before)
    threads.set_num_threads(None)


@pytest.fixture(scope="session")
def pool() -> Any:
    """`runs.pool` in this process."""

    def fill(folder: Path, points: Any, compute: Any, name: str, argv: Any, *_: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        runs.work(folder, points, compute, name, harness.provenance(name, argv, "cpu"))

    return fill
