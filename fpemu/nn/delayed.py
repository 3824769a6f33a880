"""Delayed scaling: amax histories and the scales that come from them, as TransformerEngine's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fpemu.recipes import Delayed

FLT_MAX = torch.finfo(torch.float32).max


class History(NamedTuple):
    """State of one tensor, the layer's buffers.

    Parameters
    ----------
    amax_history : float32 Tensor [history]
        Entry 0 collects the running step's amax; the newest finished step is the last entry.
    scale : float32 scalar Tensor
        What the tensor is multiplied by before the cast; its inverse is ``fl(1/scale)``.
    amax : float32 scalar Tensor
        ``fl(fmt.max / amax)`` is `scale`: what `fpemu.quantize` is given.
    """

    amax_history: Tensor
    scale: Tensor
    amax: Tensor


def new_history(delayed: Delayed, fmt_max: float) -> History:
    """Nothing seen yet: history 0, scale 1."""
    return History(torch.zeros(delayed.history), torch.tensor(1.0), torch.tensor(float(fmt_max)))


def stage(history: History, amax: float) -> None:
    """Note an amax of the running step.

    One that is not finite is not noted: the step leaves no trace. (TransformerEngine keeps an
    infinite amax in the history, so that ``algo="max"`` does not move until it has left.)
    """
    if amax <= FLT_MAX:
        history.amax_history[0] = max(float(history.amax_history[0]), amax)


def update(history: History, delayed: Delayed, fmt_max: float) -> None:
    """Move the history by one step and compute the scale, in place.

    With h the history and a = h[0] the running step's amax: where a is 0, nothing changes. Else h
    becomes ``[0, h[2], ..., h[-1], a]`` and, in float32 with m = max(h[1], ..., h[-1], a), or a for
    ``algo="most_recent"``::

        scale = min(fl(fmt_max * 2**-margin / m), FLT_MAX)

    Source: TransformerEngine (d0067d0) common/recipe/delayed_scaling.cu, kernel_bulk.

    Examples
    --------
    >>> h = new_history(Delayed(history=3), 448.0)
    >>> for amax in (2.0, 8.0, 1.0, 1.0):
    ...     stage(h, amax)
    ...     update(h, Delayed(history=3), 448.0)
    ...     print(h.amax_history.tolist(), h.scale.item())
    [0.0, 0.0, 2.0] 224.0
    [0.0, 2.0, 8.0] 56.0
    [0.0, 8.0, 1.0] 56.0
    [0.0, 1.0, 1.0] 56.0
    """
    h = history.amax_history
    newest = h[0].clone()
    if float(newest) == 0:
        return
    rolled = torch.cat((h[1:], newest[None]))
    amax = newest if delayed.algo == "most_recent" else rolled.max()
    rolled[0] = 0
    h.copy_(rolled)
    if float(amax) == 0 or not float(amax) <= FLT_MAX:
        return
    top = torch.tensor(fmt_max * 2.0**-delayed.margin)
    history.scale.copy_((top / amax.cpu()).clamp(max=FLT_MAX))
    # The same quotient with the powers of two on the other side.
    history.amax.copy_((amax * 2.0**delayed.margin).clamp(max=FLT_MAX))
