"""The linear layer: three GEMMs whose operands are quantized as a recipe says.

The work is done by two operators, so that a compiler sees two opaque calls and eager code the same
code path. What a layer remembers (random stream, amax histories) lives in buffers of the module;
the operators find the module's `Core` by a number.

================== ===============================================================================
``fpemu::fprop``   quantize X and W, multiply; note amaxes, count the call
``fpemu::bprop``   quantize dY, W and X, multiply twice; note amaxes, count the call
================== ===============================================================================
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fpemu import ops
from fpemu.backends import element_format
from fpemu.formats import BlockFormat, Format
from fpemu.gemm import list_units, matmul
from fpemu.nn import delayed, streams
from fpemu.recipes import OPERANDS, Delayed, Gemm, Hadamard, Operand, Recipe, get_recipe, row_of
from fpemu.rotation import encode_rotated, hadamard, quantize_rotated, rotated_amax

# Plans: what a recipe means for the tensors of a layer --------------------------------------------


@dataclass(frozen=True)
class Step:
    """One operand, resolved: everything that depends on the recipe alone."""

    tensor: str  # "x", "w" or "dy"
    fmt: Format | BlockFormat | None
    rounding: str
    transform: Hadamard | None
    rotated_axis: int | None
    scaling: Delayed | None
    axis: int | None  # along which 1D blocks lie in the stored tensor

    @property
    def tensor_scaled(self) -> bool:
        return isinstance(self.fmt, BlockFormat) and self.fmt.tensor_scaled


@dataclass(frozen=True, eq=False)
class Plan:
    """A recipe, resolved."""

    steps: dict[str, Step]
    first: dict[str, str]  # operand -> the first one with an equal step: they are one quantization
    out: dict[str, Any]
    unit: str | None
    trivial: bool  # nothing is quantized
    shares_x: bool  # wgrad takes the X that fprop took
    draws: bool  # anything draws random words
    draws_forward: bool  # X or W do
    delayed: dict[str, tuple[Delayed, float]]  # tensor -> how, and its format's max


@lru_cache(maxsize=1024)
def _step(name: str, operand: Operand) -> Step:
    fmt, contracted = row_of(operand, f"operand {name}"), OPERANDS[name]
    axis = None
    if isinstance(fmt, BlockFormat) and fmt.block is not None and not fmt.is_2d:
        axis = contracted if operand.blocks == "contraction" else -1 - contracted
    if operand.scaling is not None:
        if not (isinstance(fmt, BlockFormat) and fmt.tensor_scaled and fmt.block is None):
            raise ValueError(
                f"operand {name}: delayed scaling needs a format with one scale per tensor, got"
                f" {operand.fmt!r}; fp8_tensor_e4m3, fp8_tensor_e5m2 and int8_tensor have one."
                " Leave scaling out."
            )
        if operand.transform is not None:
            raise ValueError(
                f"operand {name}: delayed scaling and a rotation are both given; the amax of a"
                " rotated tensor has no history. Leave one out."
            )
    rotated = None if operand.transform is None else contracted
    return Step(
        name.split(".")[1], fmt, operand.rounding, operand.transform, rotated, operand.scaling, axis
    )


def make_plan(recipe: Recipe) -> Plan:
    """Resolve a recipe's names.

    Raises
    ------
    ValueError
        For unknown formats, for delayed scaling that a tensor cannot have, and for formats that
        the recipe's unit does not multiply.
    """
    return _plan(recipe.fprop, recipe.dgrad, recipe.wgrad, recipe.unit)


@lru_cache(maxsize=1024)
def _plan(fprop: Gemm, dgrad: Gemm, wgrad: Gemm, unit: str | None) -> Plan:
    recipe = Recipe("", fprop, dgrad, wgrad)
    steps = {name: _step(name, row) for name, row in recipe.operands().items()}
    histories: dict[str, tuple[Delayed, float]] = {}
    for name, step in steps.items():
        if step.scaling is not None:
            assert step.fmt is not None
            state = (step.scaling, step.fmt.max)
            if histories.setdefault(step.tensor, state) != state:
                raise ValueError(
                    f"operand {name}: {step.tensor} has delayed scaling of two kinds; one tensor has"
                    " one history. Give all its operands the same format and Delayed."
                )
        if unit is not None and _has_float_scales(step.fmt):
            raise ValueError(
                f"operand {name}: {recipe.operand(name)} has float32 block scales, which no unit"
                f" takes; unit={unit!r} serves element, tensor-scaled, MX and NVFP4 formats. Leave"
                " unit out."
            )
    out = {"fprop": fprop.out, "dgrad": dgrad.out, "wgrad": wgrad.out}
    quantized = any(s.fmt is not None or s.transform for s in steps.values())
    first = {n: next(m for m in steps if steps[m] == step) for n, step in steps.items()}
    return Plan(
        steps,
        first,
        out,
        unit,
        trivial=not quantized and unit is None and not any(out.values()),
        shares_x=first["wgrad.x"] == "fprop.x" and steps["fprop.x"].fmt is not None,
        draws=any(s.rounding == "sr" for s in steps.values()),
        draws_forward=any(s.rounding == "sr" for s in steps.values() if s.tensor != "dy"),
        delayed=histories,
    )


def _has_float_scales(fmt: Format | BlockFormat | None) -> bool:
    return isinstance(fmt, BlockFormat) and fmt.scale is not None and fmt.scale.bits > 8


# Cores: what an operator knows of a layer ---------------------------------------------------------


class Known(NamedTuple):
    """A weight's cast, and of what it is."""

    tensor: Any  # weak reference
    key: tuple[Any, ...]
    values: Tensor


class Core:
    """A layer as the operators see it.

    Parameters
    ----------
    plan : Plan
    index : int
        Number of the layer in its model: part of its random streams.
    group : ProcessGroup, optional
        Ranks that hold parts of the same tensors; tensor amaxes are their maxima.
    buffers : dict
        The module's, by name; empty for the functional form.
    """

    def __init__(
        self, plan: Plan, index: int = 0, group: Any = None, buffers: dict[str, Any] | None = None
    ) -> None:
        self.plan, self.index, self.group = plan, index, group
        self.buffers = {} if buffers is None else buffers
        self.weights: dict[str, Known] = {}  # by operand
        self.recent: deque[tuple[int, int]] = deque(maxlen=1024)  # (fingerprint of X, call)
        self.moves = True  # whether a backward pass has been since the scales last moved
        self.key = next(_keys)
        _cores[self.key] = self

    def history(self, tensor: str) -> delayed.History:
        return delayed.History(*(self.buffers[f"{tensor}_{f}"] for f in delayed.History._fields))


_cores: WeakValueDictionary[int, Core] = WeakValueDictionary()
_keys = itertools.count(1)


# Quantizing an operand ---------------------------------------------------------------------------


def tensor_amax(x: Tensor) -> float:
    """Largest ``|x|`` rounded to float32, NaN skipped; 0 for an empty tensor."""
    if x.numel() == 0:
        return 0.0
    if x.device.type == "cpu" and ops._default_cpu() == "numba":
        from fpemu.backends import numba_

        request, box = ops._request(
            "linear", x, "fp8_tensor_e4m3", "rne", None, -1, None, None, 0, 0, 32, None
        )
        bits = numba_.tensor_amax_bits(box.on_host(request, "numba")[0])
        return struct.unpack("f", struct.pack("I", bits))[0]
    low, high = torch.aminmax(x)
    amax = float(torch.maximum(-low, high).float())
    return amax if amax == amax else tensor_amax(torch.where(x.isnan(), 0, x))


def _reduced(amaxes: list[float], group: Any, device: torch.device) -> list[float]:
    """Their maxima over a group's ranks."""
    whole = torch.tensor(amaxes, dtype=torch.float32, device=device)
    torch.distributed.all_reduce(whole, torch.distributed.ReduceOp.MAX, group=group)
    return whole.tolist()


def _padded(x: Tensor, axis: int, size: int) -> Tensor:
    """x with zeros at the end of an axis, for whole blocks of a rotation."""
    short = -x.shape[axis] % size
    return F.pad(x, (0, 0, 0, short) if axis == 0 else (0, short)) if short else x


def _how(
    core: Core, name: str, x: Tensor, ticket: Tensor, note: bool
) -> tuple[Tensor, dict[str, Any]]:
    """The tensor that is to be quantized, and the arguments; ``size`` where it is rotated first."""
    step = core.plan.steps[name]
    how: dict[str, Any] = {"rounding": step.rounding}
    if step.axis is not None:
        how["axis"] = step.axis
    turn = step.transform
    if turn is not None:
        assert step.rotated_axis is not None
        x = _padded(x, step.rotated_axis, turn.size)
        rotation = {"size": turn.size, "signs": turn.signs, "axis": step.rotated_axis}
        if step.fmt is None or step.axis not in (None, step.rotated_axis):
            x, turn = hadamard(x, **rotation), None
        else:
            how.update(rotation)
    if step.scaling is not None:
        history = core.history(step.tensor)
        if note:
            delayed.stage(history, tensor_amax(x))
        how["amax"] = float(history.amax)
    elif step.tensor_scaled and core.group is not None:
        amax = tensor_amax(x) if turn is None else rotated_amax(x, **rotation)
        how["amax"] = _reduced([amax], core.group, x.device)[0]
    if step.rounding == "sr":
        how["seed"], how["stream"] = streams.of_operand(ticket, core.plan.first[name])
    return x, how


def cast(core: Core, name: str, x: Tensor, ticket: Tensor, note: bool = True) -> Tensor:
    """Values of an operand on its format's grid, float32."""
    fmt = core.plan.steps[name].fmt
    x, how = _how(core, name, x, ticket, note)
    if fmt is None:
        return x.float()
    quantize = quantize_rotated if "size" in how else ops.quantize
    try:
        return quantize(x, fmt, dtype=torch.float32, **how)
    except ValueError:
        if not bool(x.isnan().any()):
            raise
        # Integers have no NaN to pass on, so that an overflow is seen downstream: all of it is.
        return torch.full_like(x, float("nan"), dtype=torch.float32)


def _weight(core: Core, name: str, w: Tensor, ticket: Tensor, note: bool, reuse: bool) -> Tensor:
    """`cast` of the weight, kept until it changes: microbatches and dgrad take the same values.

    A change is seen by the tensor's identity, version and memory, and by a sample of its values,
    since assignments through ``.data`` leave the version alone.
    """
    step, first = core.plan.steps[name], core.plan.first[name]
    if step.rounding == "sr" or step.fmt is None or core.group is not None or w.is_inference():
        return cast(core, name, w, ticket, note)
    key: tuple[Any, ...] = (w._version, w.data_ptr(), _fingerprint(w))
    if step.scaling is not None:
        history = core.history("w")
        if note:
            delayed.stage(history, tensor_amax(w))
        key += (float(history.amax),)
    known = core.weights.get(first)
    if known is None or not reuse or known.tensor() is not w or known.key != key:
        known = Known(ref(w), key, cast(core, name, w, ticket, note=False))
        core.weights[first] = known
    return known.values


def _fingerprint(x: Tensor) -> int:
    """A hash of a matrix's shape and of some 64 of its values."""
    rows, cols = x.shape
    sample = x.detach()[:: max(1, rows // 8), :: max(1, cols // 8)].float().cpu()
    return hash((rows, cols, sample.numpy().tobytes()))


# One GEMM ----------------------------------------------------------------------------------------


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b (+ bias)`` in float32."""
    return torch.mm(a, b) if bias is None else torch.addmm(bias.float(), a, b)


def _fprop(
    core: Core, x: Tensor, w: Tensor, bias: Tensor | None, ticket: Tensor, note: bool, reuse: bool
) -> tuple[Tensor, Tensor | None]:
    """Y in float32, and the X that was multiplied."""
    if core.plan.unit is not None:
        a = _coded(core, "fprop.x", x, ticket, note)
        b = _coded(core, "fprop.w", w, ticket, note)
        y = _on_unit(core, a, _transposed(b))
        return (y if bias is None else y + bias.float()), None
    xq = cast(core, "fprop.x", x, ticket, note)
    return multiply(xq, _weight(core, "fprop.w", w, ticket, note, reuse).t(), bias), xq


def _finish(core: Core, gemm: str, y: Tensor, dtype: torch.dtype) -> Tensor:
    """A GEMM's float32 result in the output's format and dtype."""
    out = core.plan.out[gemm]
    return (y if out is None else ops.quantize(y, out)).to(dtype)


# On a tensor-core unit ---------------------------------------------------------------------------


def _coded(core: Core, name: str, x: Tensor, ticket: Tensor, note: bool) -> Any:
    """An operand as codes and scales; values where its format is None."""
    fmt = core.plan.steps[name].fmt
    x, how = _how(core, name, x, ticket, note)
    if fmt is None:
        return x.float()
    return (encode_rotated if "size" in how else ops.encode)(x, fmt, **how)


def _transposed(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.t()
    scales = None if x.scales is None else x.scales.t()
    return replace(x, codes=x.codes.t(), scales=scales, axis=1 - x.axis)


def _on_unit(core: Core, a: Any, b: Any) -> Tensor:
    """``a @ b`` in the arithmetic of the recipe's tensor-core unit, float32."""
    return matmul(a, b, unit=_unit_name(core.plan.unit, a, b))


def _unit_name(unit: str | None, a: Any, b: Any) -> str:
    """The unit itself, or the one of a family for the operands' formats."""
    assert unit is not None
    if unit in list_units():
        return unit
    names = ["fp32" if isinstance(x, Tensor) else _unit_format(x.format) for x in (a, b)]
    return f"{unit}.{names[0]}" if names[0] == names[1] else f"{unit}.{'x'.join(names)}"


def _unit_format(fmt: Format | BlockFormat) -> str:
    """What unit names call a format: an MX or NVFP4 name without its rule, else the element's."""
    blocked = isinstance(fmt, BlockFormat) and fmt.scale is not None
    return fmt.name.split("/")[0] if blocked else element_format(fmt).name


# The operators -----------------------------------------------------------------------------------


def _run_fprop(
    x: Tensor, w: Tensor, bias: Tensor | None, key: int, counts: bool, frozen: bool, saves: bool,
    dtype: torch.dtype, seed: int | None, stream: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    core = _cores[key]
    again = torch._C._current_graph_task_id() != -1  # in a backward pass: a checkpoint recomputes
    counts = counts and not again
    with _no_autocast(x):
        if core.plan.delayed and counts and core.moves:
            _move_scales(core)
        ticket = _forward_ticket(core, x, counts, again, seed, stream)
        # Microbatches and recomputations see one weight; evaluation may follow any change of it.
        y, xq = _fprop(core, x, w, bias, ticket, counts, reuse=again or (counts and saves))
        if frozen and counts:
            _pass_done(core)
        y = _finish(core, "fprop", y, dtype)
    kept = xq if saves and core.plan.shares_x and xq is not None else x.new_empty(0)
    return y, kept, ticket


def _run_bprop(
    dy: Tensor, x: Tensor, w: Tensor, ticket: Tensor, key: int, x_is_cast: bool, needs: list[bool],
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    core = _cores[key]
    plan = core.plan
    # Amaxes that fprop, which does not scale so, has not noted.
    new_x, new_w = (plan.steps[n].scaling is None for n in ("fprop.x", "fprop.w"))
    dx, dw, db = (dy.new_empty(0) for _ in range(3))
    with _no_autocast(dy):
        draw = _backward_ticket(core, ticket)
        read = cast if plan.unit is None else _coded
        g = None
        if needs[0]:
            g = read(core, "dgrad.dy", dy, draw, True)
            if plan.unit is None:
                product = multiply(g, _weight(core, "dgrad.w", w, ticket, new_w, True))
            else:
                product = _on_unit(core, g, _coded(core, "dgrad.w", w, ticket, new_w))
            dx = _finish(core, "dgrad", product, x_dtype)
        if needs[1]:
            if g is None or plan.first["wgrad.dy"] != "dgrad.dy":
                g = read(core, "wgrad.dy", dy, draw, True)
            if plan.unit is None:
                xq = x if x_is_cast else cast(core, "wgrad.x", x, ticket, new_x)
                product = multiply(g.t(), xq)
            else:
                xc = _coded(core, "wgrad.x", x, ticket, new_x)
                product = _on_unit(core, _transposed(g), xc)
            dw = _finish(core, "wgrad", product, w.dtype)
        if needs[2]:
            db = dy.sum(0, dtype=torch.float32)
        _pass_done(core)
    return dx, dw, db


def _no_autocast(x: Tensor) -> Any:
    device = x.device.type
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def _move_scales(core: Core) -> None:
    """One step of every history of the layer, from the amaxes since the last."""
    core.moves = False
    for tensor, (how, top) in core.plan.delayed.items():
        delayed.update(core.history(tensor), how, top)


def _pass_done(core: Core) -> None:
    """A backward pass, or a forward pass that will have none, is over: scales may move.

    Amaxes become those of all ranks here, not when scales move: data-parallel wrappers may copy
    one rank's buffers to the others before the next forward pass.
    """
    core.moves = True
    histories = [
        core.history(tensor) for tensor, (how, _) in core.plan.delayed.items() if how.reduce
    ]
    distributed = torch.distributed
    if histories and distributed.is_available() and distributed.is_initialized():
        staged = [float(h.amax_history[0]) for h in histories]
        whole = _reduced(staged, core.group, histories[0].scale.device)
        for history, amax in zip(histories, whole, strict=True):
            history.amax_history[0] = amax


def _forward_ticket(
    core: Core, x: Tensor, counts: bool, again: bool, seed: int | None, stream: int
) -> Tensor:
    """Whose random words a forward call draws; a recomputed call draws those of the first."""
    if not core.plan.draws:
        return torch.empty(0, dtype=torch.int64)
    state = core.buffers.get("random_state")
    if state is None:
        return streams.user_ticket(streams.draw_seed() if seed is None else seed, stream)
    key, call, _ = state.tolist()
    if core.plan.draws_forward:
        mark = _fingerprint(x)
        if again:
            call = next((c for m, c in reversed(core.recent) if m == mark), call)
        elif counts:
            core.recent.append((mark, call))
    if counts:
        state[1] += 1
    return streams.ticket(key, core.index, call)


def _backward_ticket(core: Core, ticket: Tensor) -> Tensor:
    state = core.buffers.get("random_state")
    if not core.plan.draws or state is None:
        return ticket
    key, _, call = state.tolist()
    state[2] += 1
    return streams.ticket(key, core.index, call)


def _fake_fprop(
    x: Tensor, w: Tensor, bias: Tensor | None, key: int, counts: bool, frozen: bool, saves: bool,
    dtype: torch.dtype, seed: int | None, stream: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = _cores[key].plan
    keeps = saves and plan.shares_x and plan.unit is None
    return (
        x.new_empty(x.shape[0], w.shape[0], dtype=dtype),
        x.new_empty(x.shape, dtype=torch.float32) if keeps else x.new_empty(0),
        torch.empty(2 if plan.draws else 0, dtype=torch.int64, device="cpu"),
    )


def _fake_bprop(
    dy: Tensor, x: Tensor, w: Tensor, ticket: Tensor, key: int, x_is_cast: bool, needs: list[bool],
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, outs, ins = dy.shape[0], w.shape[0], w.shape[1]
    return (
        dy.new_empty((tokens, ins) if needs[0] else 0, dtype=x_dtype if needs[0] else dy.dtype),
        dy.new_empty((outs, ins) if needs[1] else 0, dtype=w.dtype if needs[1] else dy.dtype),
        dy.new_empty(outs if needs[2] else 0, dtype=torch.float32 if needs[2] else dy.dtype),
    )


_LIBRARY = torch.library.Library("fpemu", "FRAGMENT")
#: They count and draw: no compiler may merge, drop or repeat a call.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
_LIBRARY.define(
    "fprop(Tensor x, Tensor w, Tensor? bias, int key, bool counts, bool frozen, bool saves,"
    " ScalarType dtype, SymInt? seed, SymInt stream) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "bprop(Tensor dy, Tensor x, Tensor w, Tensor ticket, int key, bool x_is_cast, bool[] needs,"
    " ScalarType x_dtype) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
for _name, _real, _fake in (
    ("fprop", _run_fprop, _fake_fprop),
    ("bprop", _run_bprop, _fake_bprop),
):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fpemu::{_name}", _fake, lib=_LIBRARY)


class LinearFunction(torch.autograd.Function):
    """Y of (X, W, bias), all matrices; the gradient passes straight through every quantization."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, key: int, counts: bool, frozen: bool,
        saves: bool, shares: bool, dtype: torch.dtype, seed: int | None, stream: int,
    ) -> Tensor:  # fmt: skip
        y, xq, ticket = torch.ops.fpemu.fprop(
            x, w, bias, key, counts, frozen, saves, dtype, seed, stream
        )
        # For wgrad: the cast of X where it will do, else X itself.
        ctx.save_for_backward(xq if shares or not saves else x, w, ticket)
        ctx.key, ctx.shares, ctx.dtype = key, shares, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, ticket = ctx.saved_tensors
        needs = [bool(n) for n in ctx.needs_input_grad[:3]]
        dx, dw, db = torch.ops.fpemu.bprop(dy, x, w, ticket, ctx.key, ctx.shares, needs, ctx.dtype)
        return (
            dx if needs[0] else None,
            dw if needs[1] else None,
            db.to(ctx.bias_dtype) if needs[2] else None,
            *(None,) * 8,
        )


def apply(
    x: Tensor, w: Tensor, bias: Tensor | None, core: Core, training: bool, seed: int | None,
    stream: int,
) -> Tensor:  # fmt: skip
    """The layer as torch code: autocast, autograd, and which calls count."""
    if core.plan.trivial:
        return F.linear(x, w, bias)
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    recording = torch.is_grad_enabled()
    learns = w.requires_grad or (bias is not None and bias.requires_grad)
    frozen = recording and not (learns or x.requires_grad)
    saves = recording and w.requires_grad
    shares = core.plan.shares_x and core.plan.unit is None
    # Shapes change out here, where autograd sees it: what a Function returns as a view of its own
    # must not be written in place.
    y = LinearFunction.apply(
        x.reshape(-1, w.shape[1]), w, bias, core.key, training, frozen, saves, shares, x.dtype,
        seed, stream,
    )  # fmt: skip
    return y.view(*x.shape[:-1], w.shape[0]) if x.dim() != 2 else y


# The two forms -----------------------------------------------------------------------------------


class Linear(nn.Linear):
    """`torch.nn.Linear` whose GEMMs are quantized as a recipe says.

    `fpemu.nn.convert` makes them of the `nn.Linear` layers of a model; parameters stay the same
    objects, in float32 (or whatever they were) for the optimizer.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As for `torch.nn.Linear`.
    recipe : str or Recipe
    seed : int, optional
        Of stochastic rounding; default: drawn from torch's global generator.
    index : int
        Number of the layer in its model: layers of one seed must differ in it.
    amax_group : ProcessGroup, optional
        Ranks that hold shards of this layer's tensors; amaxes of tensors are their maxima.

    Notes
    -----
    Buffers, where the recipe needs them, all part of `state_dict`: ``random_state`` (seed, forward
    calls, backward calls; int64) and, for delayed scaling of a tensor t of x, w, dy,
    ``t_amax_history``, ``t_scale``, ``t_amax``, float32. Checkpoints without them load.

    Examples
    --------
    >>> layer = Linear(32, 32, recipe="mxfp8")
    >>> layer(torch.ones(3, 7, 32)).shape
    torch.Size([3, 7, 32])
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None,
        dtype: Any = None, *, recipe: str | Recipe, seed: int | None = None, index: int = 0,
        amax_group: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_recipe(recipe, seed=seed, index=index, amax_group=amax_group)

    def set_recipe(
        self, recipe: str | Recipe, *, seed: int | None = None, index: int = 0,
        amax_group: Any = None,
    ) -> None:  # fmt: skip
        """Compute by another recipe from now on, with fresh state."""
        self.recipe = get_recipe(recipe, "set_recipe")
        plan = make_plan(self.recipe)
        for name in self.state_names():
            delattr(self, name)
        if plan.draws:
            seed = streams.draw_seed() if seed is None else seed
            self.register_buffer("random_state", torch.tensor([seed, 0, 0]))
        for tensor, (how, top) in plan.delayed.items():
            history = delayed.new_history(how, top)
            for field, value in history._asdict().items():
                self.register_buffer(f"{tensor}_{field}", value.to(self.weight.device))
        self.index, self.amax_group = index, amax_group
        self._make_core()

    def state_names(self) -> list[str]:
        """Names of the buffers that a recipe made."""
        fields = [f"{t}_{f}" for t in ("x", "w", "dy") for f in delayed.History._fields]
        return [name for name in ("random_state", *fields) if name in self._buffers]

    def forward(self, x: Tensor) -> Tensor:
        return apply(x, self.weight, self.bias, self.core, self.training, None, 0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"

    # State ---------------------------------------------------------------------------------------

    def _make_core(self) -> None:
        self.core = Core(make_plan(self.recipe), self.index, self.amax_group, self._buffers)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["core"]  # a copy is another layer
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_core()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the state with the module but leave its dtype: histories stay float32."""
        state = {name: self._buffers[name] for name in self.state_names()}
        super()._apply(fn, recurse)
        for name, value in state.items():
            assert value is not None
            self._buffers[name] = value.to(self.weight.device) if name != "random_state" else value
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """A checkpoint of the unconverted layer has no state; ours then stays as it is."""
        for name in self.state_names():
            state_dict.setdefault(prefix + name, self._buffers[name])
        super()._load_from_state_dict(state_dict, prefix, *rest)


_stateless_cores: dict[tuple[Plan, Any], Core] = {}


@torch.compiler.assume_constant_result
def _stateless(recipe: str | Recipe, group: Any) -> Core:
    """The core that all calls of `linear` with a recipe share."""
    row = get_recipe(recipe, "linear")
    plan = make_plan(row)
    core = _stateless_cores.get((plan, group))
    if core is None:
        if plan.delayed:
            raise ValueError(
                f"linear: recipe {row.name!r} has delayed scaling, whose history needs a layer."
                " Use fpemu.nn.Linear, or recipe.without('delayed')."
            )
        core = _stateless_cores[plan, group] = Core(plan, group=group)
    return core


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str | Recipe,
    seed: int | None = None,
    stream: int = 0,
    amax_group: Any = None,
) -> Tensor:
    """`torch.nn.functional.linear` whose GEMMs are quantized as a recipe says.

    Parameters
    ----------
    x : Tensor (..., in)
    weight : Tensor (out, in)
    bias : Tensor (out,), optional
        Added in float32.
    recipe : str or Recipe
        One without delayed scaling, which needs a layer's state.
    seed, stream : int
        Of stochastic rounding: 64-bit key (default: drawn from torch's global generator at the
        call) and 48 bits that tell calls of one seed apart.
    amax_group : ProcessGroup, optional
        Ranks that hold shards of the tensors; amaxes of tensors are their maxima.

    Returns
    -------
    Tensor (..., out)
        In x's dtype (autocast's, under autocast), formed in float32. The gradient passes straight
        through the quantizations.

    Raises
    ------
    ValueError
        For unknown recipes and formats, and for delayed scaling.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 2.6]])
    >>> linear(x, torch.eye(2), recipe="mxfp4")
    tensor([[1., 3.]])
    """
    core = _stateless(recipe, amax_group)
    return apply(x, weight, bias, core, True, seed, stream)
