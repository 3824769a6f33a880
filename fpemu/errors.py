"""Errors. Each message says what is wrong, the value, what is allowed, and one way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FpemuError(Exception):
    """Base of every error that fpemu defines itself."""


class BackendError(FpemuError, RuntimeError):
    """A backend was forced that cannot serve this call; the message says why."""


class FileFormatError(FpemuError, ValueError):
    """A saved file is truncated, mislabelled or inconsistent; the message names file and tensor."""


def unknown(where: str, what: str, name: object, known: Iterable[str]) -> ValueError:
    """A ``ValueError`` for a name that is not one of `known`, with a suggestion when one is near."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{where}: unknown {what} {name!r}; known: {shown}.{hint}")
