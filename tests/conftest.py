"""Which tests run by default, and how hypothesis behaves."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long sweeps run only when asked for by name; a file that is one long test comes first.

    (At the end it would keep one process busy while the others have nothing left.)
    """
    items.sort(key=lambda item: "interpreted" not in item.path.name)
    if "exhaustive" in (config.option.markexpr or ""):
        return
    long = [item for item in items if item.get_closest_marker("exhaustive")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
