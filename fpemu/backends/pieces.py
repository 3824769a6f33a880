"""Cutting an array into pieces that hold whole blocks."""

from __future__ import annotations

from math import prod

from fpemu.formats import BlockFormat, Format


def block_steps(
    fmt: Format | BlockFormat, shape: tuple[int, ...], axis: int, swapped: bool = False
) -> tuple[int, ...]:
    """Where each axis may be cut: multiples of the block."""
    steps = [1] * len(shape)
    if isinstance(fmt, BlockFormat) and fmt.block is not None:
        if fmt.is_2d:
            steps[-2:] = fmt.block[::-1] if swapped else fmt.block
        else:
            steps[axis] = fmt.block[0]
    return tuple(steps)


def pieces(shape: tuple[int, ...], steps: tuple[int, ...], limit: int) -> list[tuple[slice, ...]]:
    """Slices that cover `shape`, cut at multiples of `steps`, of about `limit` elements."""
    index = tuple(slice(0, n) for n in shape)
    total = prod(shape)
    for axis, n in enumerate(shape):
        if total <= limit:
            break
        if n <= steps[axis]:
            continue
        rest = total // n
        size = max(limit // rest // steps[axis], 1) * steps[axis]
        cuts = [slice(a, min(a + size, n)) for a in range(0, n, size)]
        if size * rest <= limit or axis == len(shape) - 1:
            return [(*index[:axis], cut, *index[axis + 1 :]) for cut in cuts]
        inner = pieces(shape[axis + 1 :], steps[axis + 1 :], max(limit // size, 1))
        return [(*index[:axis], cut, *tail) for cut in cuts for tail in inner]
    return [index]
