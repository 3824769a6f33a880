"""`fpemu.identify`: which library made these bits?

Every dialect whose bits mean the same things encodes the original, and its scale bytes and codes
are compared with the ones that were found. A dialect that reproduces all of them may have made
them; the data decide how many others can be told apart from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fpemu.casting import value_table
from fpemu.comparison import alike
from fpemu.dialects import DECODE, dialect_of
from fpemu.encoded import Encoded
from fpemu.errors import BackendError
from fpemu.formats import TABLE, BlockFormat, get_format
from fpemu.ops import encode
from fpemu.scaling import NUMPY, multiplier_rule


@dataclass(frozen=True)
class Match:
    """How well one format reproduces the bits.

    `scales` and `codes` are shares of scale bytes and element codes that are equal (1.0: all);
    `blocks` how many blocks were compared; `exact` whether all of them are equal. `number` tells
    whether the tensor's number is also what this format stores for x (None: there is none).
    """

    name: str
    exact: bool
    scales: float
    codes: float
    blocks: int
    number: bool | None = None


@dataclass(frozen=True)
class Identification:
    """The candidates, best first; `exact` names those that reproduce every bit."""

    matches: tuple[Match, ...]

    @property
    def exact(self) -> tuple[str, ...]:
        return tuple(match.name for match in self.matches if match.exact)

    @property
    def best(self) -> str:
        return self.matches[0].name

    def __str__(self) -> str:
        blocks = self.matches[0].blocks if self.matches else 0
        lines = [f"{blocks:,} blocks; {len(self.exact)} of {len(self.matches)} formats exact"]
        lines.append(f"{'format':<36}{'scales equal':>14}{'codes equal':>14}")
        for match in self.matches:
            mark = "  every bit" if match.exact else ""
            mark += ", number" if match.exact and match.number else ""
            lines.append(
                f"{match.name:<36}{_percent(match.scales):>14}{_percent(match.codes):>14}{mark}"
            )
        return "\n".join(lines)


def identify(
    x: Any,
    encoded: Encoded,
    *,
    candidates: Iterable[str | BlockFormat] | None = None,
    amax: float | None = None,
) -> Identification:
    """Rank the dialects by how well they reproduce `encoded` from `x`.

    Parameters
    ----------
    x : ndarray or Tensor
        The original, in the dtype that was quantized (some libraries compute in it).
    encoded : Encoded
        What a library made of it: its codes, scale bytes and, where it has one, the tensor's
        number. The format only says what the bits mean: any dialect with that element, scale
        format and block will do, for instance ``"nvfp4"``.
    candidates : iterable of str or BlockFormat, optional
        Default: every format of the table whose bits mean the same.
    amax : float, optional
        The tensor amax, where it was calibrated and is not that of x. Where it is left out and no
        candidate's tensor number fits that of `encoded`, the amax is worked out from the number.

    Returns
    -------
    Identification
        Best first: exact ones, those whose tensor number fits before others, then by equal scale
    bytes, then by equal codes.

    Raises
    ------
    TypeError
        When `encoded` is no `Encoded` of a block format.
    ValueError
        When x has another shape, or no candidate's bits mean the same as `encoded`'s.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    >>> x[0, 0] = 0  # to which ModelOpt gives code 8
    >>> found = fpemu.identify(x, fpemu.encode(x, "mxfp4/modelopt"))
    >>> found.exact
    ('mxfp4/modelopt',)
    """
    if not isinstance(encoded, Encoded) or not isinstance(encoded.format, BlockFormat):
        kind = encoded.format.name if isinstance(encoded, Encoded) else type(encoded).__name__
        raise TypeError(
            f"identify: encoded must be an fpemu.Encoded of a block format, got {kind};"
            " fpemu.encode and fpemu.checkpoints make such. Pass one with scales."
        )
    if tuple(x.shape) != encoded.shape:
        raise ValueError(
            f"identify: x has shape {tuple(x.shape)} and encoded {encoded.shape}; they must agree."
            " Pass the original of the same tensor."
        )
    rows = _rows(encoded.format, candidates)
    theirs = _host(encoded)
    amaxes = _amaxes(rows, encoded, x, amax)
    found = [_match(x, row, encoded, theirs, g) for row, g in zip(rows, amaxes, strict=True)]
    return Identification(tuple(sorted(found, key=_rank)))


def identify_all(
    pairs: Iterable[tuple[Any, Encoded]],
    *,
    candidates: Iterable[str | BlockFormat] | None = None,
    progress: Callable[[Sequence[Match]], None] | None = None,
) -> Identification:
    """`identify` over many tensors: shares weighted by blocks, exact where every tensor is.

    Parameters
    ----------
    pairs : iterable of (x, Encoded)
        Taken one at a time.
    candidates
        As for `identify`.
    progress : callable, optional
        Called with the matches of each tensor.
    """
    totals: dict[str, list[float]] = {}
    for x, encoded in pairs:
        matches = identify(x, encoded, candidates=candidates).matches
        if progress is not None:
            progress(matches)
        for match in matches:
            total = totals.setdefault(match.name, [0.0, 0.0, 0, True, 0])
            total[0] += match.scales * match.blocks
            total[1] += match.codes * match.blocks
            total[2] += match.blocks
            total[3] = bool(total[3] and match.exact)
            total[4] += 1
    most = max((total[4] for total in totals.values()), default=0)
    matches_ = [
        Match(name, bool(exact and count == most), scales / blocks, codes / blocks, int(blocks))
        for name, (scales, codes, blocks, exact, count) in totals.items()
        if blocks
    ]
    return Identification(tuple(sorted(matches_, key=_rank)))


def _rank(match: Match) -> tuple[bool, bool, float, float]:
    return not match.exact, match.number is False, -match.scales, -match.codes


def _rows(fmt: BlockFormat, candidates: Iterable[str | BlockFormat] | None) -> list[BlockFormat]:
    if candidates is None:
        rows = [r for r in TABLE.values() if isinstance(r, BlockFormat) and alike(r, fmt)]
    else:
        rows = []
        for name in candidates:
            row = get_format(name, "identify")
            if isinstance(row, BlockFormat) and alike(row, fmt):
                rows.append(row)
    if not rows:
        raise ValueError(
            f"identify: no candidate has the element, scale format and block of {fmt.name!r};"
            " fpemu.list_formats() has the names. Leave candidates out to try all that fit."
        )
    return rows


def _match(x: Any, row: BlockFormat, encoded: Encoded, theirs: _Bits, amax: float | None) -> Match:
    try:
        own = encode(x, row, axis=encoded.axis, amax=amax)
    except BackendError:
        return Match(row.name, False, 0.0, 0.0, 0)
    ours = _host(own)
    scales = ours.scales == theirs.scales
    codes = ours.codes == theirs.codes
    exact = bool(scales.all() and codes.all())
    return Match(
        row.name, exact, float(scales.mean()) if scales.size else 1.0,
        float(codes.mean()) if codes.size else 1.0, int(scales.size), _same_number(own, encoded),
    )  # fmt: skip


def _same_number(ours: Encoded, theirs: Encoded) -> bool | None:
    """Whether the tensor's numbers are equal, as stored where both store the same thing."""
    if ours.global_scale is None or theirs.global_scale is None:
        return None
    alike_ = DECODE[ours.format.decode] == DECODE[theirs.format.decode]  # type: ignore[union-attr]
    a, b = (e.global_scale if alike_ else e.tensor_scale for e in (ours, theirs))
    return bool(np.float32(_numpy(a)).tobytes() == np.float32(_numpy(b)).tobytes())


@dataclass(frozen=True)
class _Bits:
    codes: np.ndarray
    scales: np.ndarray


def _host(encoded: Encoded) -> _Bits:
    """Codes and scale codes on the host, every NaN scale alike."""
    fmt = encoded.format
    assert isinstance(fmt, BlockFormat)
    codes, scales = _numpy(encoded.codes), _numpy(encoded.scales)
    if fmt.scale is not None and scales.dtype == np.uint8:
        nan = np.isnan(value_table(fmt.scale))[scales]
        scales = np.where(nan, np.uint8(fmt.scale.nan_code or 0), scales)
    return _Bits(codes, scales)


def _numpy(array: Any) -> np.ndarray:
    return array.cpu().numpy() if hasattr(array, "cpu") else np.asarray(array)


def _amaxes(
    rows: list[BlockFormat], encoded: Encoded, x: Any, amax: float | None
) -> list[float | None]:
    """The amax to give each row: the caller's; None where x's own leads some row to the stored
    number; else, for each, the one that leads it there."""
    if amax is not None or encoded.global_scale is None:
        return [amax if row.tensor_scaled else None for row in rows]
    wanted = float(np.float32(_numpy(encoded.tensor_scale)))
    scaled = [row for row in rows if row.tensor_scaled]
    own = _largest(x)
    if (
        not np.isfinite(wanted)
        or wanted <= 0
        or any(_close(_multiplies(row, own), wanted) for row in scaled)
    ):
        return [None] * len(rows)
    return [_amax_behind(row, wanted) if row.tensor_scaled else None for row in rows]


def _amax_behind(row: BlockFormat, wanted: float) -> float:
    """The tensor amax for which `row` stores the factor `wanted`, or nearly so."""
    guess = np.float32(wanted * row.element.max * (row.scale.max if row.scale else 1.0))
    near = [guess]
    for direction in (np.float32(0), np.float32(np.inf)):
        step = guess
        for _ in range(4):
            step = np.nextafter(step, direction)
            near.append(step)
    fitting = [g for g in near if _multiplies(row, float(g)) == np.float32(wanted)]
    return float(fitting[0] if fitting else guess)


def _close(a: np.float32, b: float) -> bool:
    """Within a few units in the last place: another library's order of the same operations."""
    return abs(float(a) - b) <= 4 * float(np.spacing(np.float32(b)))


def _multiplies(row: BlockFormat, amax: float) -> np.float32:
    """The factor that `row` would store for a tensor amax."""
    dialect = dialect_of(row)
    with np.errstate(all="ignore"):
        if dialect is None:
            return np.float32(multiplier_rule(row).tensor(NUMPY, row, np.float32(amax)).decode)
        stored = dialect.tensor(NUMPY, row, np.float32(amax)).decode
        return np.float32(DECODE[row.decode].multiplies(NUMPY, stored))


def _largest(x: Any) -> float:
    size = abs(x)
    top = size.max() if 0 not in size.shape else 0.0
    return float(top)


def _percent(share: float) -> str:
    return "100 %" if share == 1 else f"{100 * share:.4f} %"


__all__ = ["Identification", "Match", "identify", "identify_all"]
