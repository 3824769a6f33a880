"""Weights that are stored in a format between steps, without a float32 master."""

from __future__ import annotations

from typing import Any

import torch

from fpemu import ops
from fpemu.nn import streams
from fpemu.recipes import Operand, Recipe, get_recipe

CALLS = "fpemu_rounding_calls"  # in the optimizer's first group, so that its state_dict has it
SEED = "fpemu_rounding_seed"


def round_weights(
    optimizer: torch.optim.Optimizer,
    recipe: str | Recipe | Operand = "bf16_sr_weights",
    *,
    seed: int | None = None,
) -> Any:
    """Round every weight that an optimizer has just updated to the format weights are stored in.

    The optimizer computes ``w + update`` in the parameter's dtype, then each parameter is rounded
    in place: with float32 parameters, what a fused update kernel does that keeps 16-bit weights
    and no float32 master. Parameters are rounded at once, so that they start on the grid.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its ``state_dict`` carries seed and count, so a resumed run draws on.
    recipe : str, Recipe or Operand
        Whose ``weights``, or itself: format and rounding.
    seed : int, optional
        Of stochastic rounding; default: drawn from torch's global generator. Ranks that hold
        replicas must have the same one.

    Returns
    -------
    RemovableHandle
        ``.remove()`` ends it.

    Raises
    ------
    ValueError
        For a recipe with float32 masters.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = torch.optim.SGD([w], lr=2.0**-10)  # a quarter of BF16's step below 1
    >>> _ = round_weights(optimizer, Operand("bf16"))
    >>> w.grad = torch.ones(1)
    >>> for _ in range(100):
    ...     optimizer.step()
    >>> w.item()  # to nearest, the weight never moves
    1.0
    """
    row = recipe if isinstance(recipe, Operand) else get_recipe(recipe, "round_weights").weights
    fmt = None if row is None else row.fmt
    if row is None or fmt is None:
        raise ValueError(
            f"round_weights: recipe {recipe!r} keeps float32 master weights; there is nothing to"
            " round. Use 'bf16_sr_weights' or an Operand such as Operand('bf16', rounding='sr')."
        )
    state = optimizer.param_groups[0]
    state[CALLS] = 0
    state[SEED] = streams.draw_seed() if seed is None else seed

    @torch.no_grad()
    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        state = optimizer.param_groups[0]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, p in enumerate(parameters):
            how: dict[str, Any] = {}
            if row.rounding == "sr":
                # Replicas of a weight must agree, so no rank takes part: rank 0, operand 7.
                stream = int(streams.ticket(0, index, state[CALLS])[1]) | 7
                how = {"seed": state[SEED], "stream": stream}
            p.copy_(ops.quantize(p, fmt, rounding=row.rounding, **how))
        state[CALLS] += 1

    after_step(optimizer)
    return optimizer.register_step_post_hook(after_step)
