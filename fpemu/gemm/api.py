"""`matmul`: arguments into a `Request`, a backend, and the result in the caller's container.

Everything but the product itself is linear in the operands and done in numpy on the host, or, for
tensors whose backend takes them where they are, by the same operations in torch.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np

from fpemu.backends import element_format
from fpemu.casting import value_table
from fpemu.encoded import Encoded
from fpemu.errors import BackendError, unknown
from fpemu.formats import FP32, BlockFormat, Format
from fpemu.gemm import recipes, tensors
from fpemu.gemm.recipes import Recipe
from fpemu.gemm.request import Operand, Request, Scales, split_scales
from fpemu.gemm.units import OUTPUTS, Unit, get_unit

BACKENDS = {
    "numba": "fpemu.gemm.numba_",
    "triton": "fpemu.gemm.triton_",
    "torch": "fpemu.gemm.torch_",
    "oracle": "fpemu.gemm.oracle_",
}
NAN = {"fp32": 0x7FFFFFFF, "fp16": 0x7FFF, "bf16": 0x7FFF0000}


def matmul(
    a: Any,
    b: Any,
    *,
    unit: str | Unit,
    c: Any = None,
    out: str = "fp32",
    recipe: str | Recipe | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    bias: Any = None,
    scale_result: Any = None,
    split_k: int = 1,
    backend: str | None = None,
    progress: bool | None = None,
) -> Any:
    """``a @ b + c`` as a tensor core computes it.

    Parameters
    ----------
    a : ndarray, Tensor or Encoded, shape (..., M, K)
        Values of the unit's format, in any dtype that holds them; or codes, with scales along K
        (``axis=-1``) where the unit takes scales.
    b : ndarray, Tensor or Encoded, shape (..., K, N)
        Likewise; scales along K are ``axis=-2``. Leading dimensions broadcast.
    unit : str or Unit
        For example ``"hopper.wgmma.e4m3"``; `fpemu.gemm.list_units` has the names. For a unit that
        takes scales, an operand given as values has scales of 1.
    c : float32 array, broadcastable to (..., M, N), optional
        What is added to; rounded to float16 (RNE) first where ``out="fp16"``. Default +0.
    out : {"fp32", "fp16"}
        Type of the accumulator and the result. A recipe's accumulator is float32; its result may
        also be ``"bf16"``, ``"e4m3"`` or ``"e5m2"``, as float32 values.
    recipe : str or Recipe, optional
        How a library builds a GEMM of the unit's blocks (promotion, split-K, scaling, epilogue);
        `fpemu.gemm.list_recipes` has the names. Default: one chain of blocks over K, and where
        `Encoded` operands have tensor scales, ``"scaled"``: the two are multiplied in at the end.
    scale_a, scale_b, bias, scale_result, split_k
        Arguments of recipes: float32 dequantization factors (scalars, per row and column, or per
        block of 128), float32 (N,), the factor of an FP8 result, the number of splits of K.
    backend : {"numba", "triton", "torch", "oracle"}, optional
        Force one. The bits are the same. Default: triton for tensors on a GPU, numba else.
    progress : bool, optional
        A bar on stderr once a product takes more than three seconds; default: on a terminal.

    Returns
    -------
    ndarray or Tensor of float32 or float16, shape (..., M, N)
        In the container (and on the device) of `a`.

    Notes
    -----
    K is zero-padded to whole blocks; K = 0 gives c. NaN is 0x7FFFFFFF (0x7FFF in float16). Time
    grows as M*N*K, memory as the operands. Source: `fpemu.gemm.units` and
    ``docs/tensor_cores.md``; `Unit.evidence` says what a unit was compared with.

    Raises
    ------
    ValueError
        For values that the unit's format does not have (the message counts them), shapes that do
        not fit, an unknown unit, recipe or output, scales that are missing or of no use.
    TypeError
        For operands that are no arrays of numbers, or of different kinds.
    BackendError
        When a forced backend cannot serve.

    Examples
    --------
    >>> import numpy as np
    >>> from fpemu.gemm import matmul
    >>> a, b = np.ones((1, 32)), np.full((32, 1), 2.0**-9)
    >>> a @ b + 4, matmul(a, b, unit="blackwell.tcgen05.e4m3", c=[[4.0]])
    (array([[4.0625]]), array([[4.0625]], dtype=float32))
    >>> matmul(a * 2.0**-6, b, unit="hopper.wgmma.e4m3", c=[[4.0]])  # each 2**-15 is cut off
    array([[4.]], dtype=float32)
    """
    row = get_unit(unit, "matmul")
    left, right = Array(a, "a"), Array(b, "b")
    if left.device != right.device:
        raise TypeError(
            f"matmul: a is {left.kind} and b is {right.kind}; both must be numpy arrays, or tensors"
            " on one device. Convert one of them."
        )
    plan = None if recipe is None else recipes.get_recipe(recipe, "matmul")
    if plan is None and (left.tensor_scale is not None or right.tensor_scale is not None):
        plan = recipes.SCALED
    check_out(row, out, plan)
    for x in (left, right):
        _check_place_for_scales(row, plan, x)
    module = _backend(row, backend, left.device)
    left.stays = right.stays = left.device is not None and getattr(module, "TAKES_TENSORS", False)
    lead, request = build_request(row, out if plan is None else "fp32", left, right, c)
    request.progress = progress

    def run(request: Request) -> Any:
        d = module.run(request, left.device)
        for count, x, operand, element in zip(
            request.bad, (left, right), (request.a, request.b), (row.a, row.b), strict=True
        ):
            if count:
                raise not_values(x.name, count, prod(operand.values.shape), element)
        return d

    with _ieee_mode(), np.errstate(all="ignore"):
        if plan is None:
            _check_no_recipe(scale_a, scale_b, bias, scale_result, split_k)
            d = _rounded(run(request), out)
        else:
            if c is not None:
                raise ValueError(
                    f"matmul: c is given, but recipe {plan.name!r} starts from zero. Leave c out and"
                    " add it to the result, or drop the recipe and the tensor scales."
                )
            scales = [
                recipes.Given(_float32(x, name), None if y.encoded is None else y.encoded)
                for x, name, y in ((scale_a, "scale_a", left), (scale_b, "scale_b", right))
            ]
            others = _float32(bias, "bias"), _float32(scale_result, "scale_result")
            d = recipes.run(plan, request, run, lead, scales, *others, split_k, out)
            d = _rounded(d, out)
    return left.container(d.reshape((*lead, left.shape[-2], right.shape[-1])))


# Arguments -----------------------------------------------------------------------------------------


class Array:
    """An operand, and the container that the result goes into."""

    def __init__(self, x: Any, name: str) -> None:
        self.name = name
        self.encoded = x if isinstance(x, Encoded) else None
        self.data = x if self.encoded is None else self.encoded.codes
        self.device = None
        self.stays = False  # whether a tensor's steps are done where it is
        if tensors.is_tensor(self.data):
            self.data = self.data.detach()
            self.device = self.data.device
        else:
            self.data = np.asarray(self.data)
        self.kind = "a numpy array" if self.device is None else f"a tensor on {self.device}"
        self.shape = tuple(self.data.shape)
        if len(self.shape) < 2:
            fix = "a[None, :]" if name == "a" else "b[:, None]"
            raise ValueError(
                f"matmul: {name} has shape {self.shape}; a is (..., M, K) and b is (..., K, N)."
                f" For a vector, {fix}."
            )

    @property
    def tensor_scale(self) -> Any:
        return None if self.encoded is None else self.encoded.tensor_scale

    def host(self) -> np.ndarray:
        """The data as an array; 8-bit and bfloat16 floats as float32."""
        x = self.data
        if self.device is None:
            return x
        if str(x.dtype).startswith(("torch.bfloat16", "torch.float8")):
            x = x.float()
        return x.cpu().numpy()

    def values(self, element: Format) -> Any:
        """float32 values, contiguous."""
        if self.encoded is None:
            if not self.stays:
                return _float32(self.host(), self.name, element)
            _check_numbers(self.data, self.name)
            single, wrong = tensors.single(self.data)
            if wrong:
                raise not_values(self.name, wrong, self.data.numel(), element)
            return single
        codes = self.data if self.stays else self.host()
        if element.bits > 16:
            return tensors.as_floats(codes, element.bits)
        return tensors.lookup(value_table(element), codes)

    def container(self, d: Any) -> Any:
        if self.device is None or self.stays:
            return d
        return sys.modules["torch"].from_numpy(d).to(self.device)


def _check_numbers(x: Any, name: str) -> None:
    kind = str(x.dtype)
    if x.dtype.is_complex or kind == "torch.bool":
        raise not_numbers(name, kind)


def not_numbers(name: str, dtype: Any) -> TypeError:
    return TypeError(
        f"matmul: {name} has dtype {dtype}; real floating-point and integer arrays are allowed."
        " Convert it first."
    )


def _float32(x: Any, name: str, element: Format = FP32) -> Any:
    """An argument as a contiguous float32 array with the same values."""
    if x is None:
        return None
    if tensors.is_tensor(x):
        torch = sys.modules["torch"]
        x = (
            x.detach()
            .to(torch.float64 if x.dtype == torch.float64 else torch.float32)
            .cpu()
            .numpy()
        )
    data = np.asarray(x)
    if data.dtype.kind not in "fiu" and not data.dtype.name.startswith(("bfloat", "float")):
        raise not_numbers(name, data.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.ascontiguousarray(data, dtype=np.float32)
        if data.dtype.itemsize > 2 and data.dtype != np.float32:
            back = single.astype(data.dtype)
            wrong = (back != data) & ~(np.isnan(single) & np.isnan(data))
            if name not in ("a", "b"):  # these were never meant to be of the unit's format
                return single
            if wrong.any():
                raise not_values(name, int(wrong.sum()), data.size, element)
    return single.reshape(data.shape)


def not_values(name: str, count: int, total: int, element: Format) -> ValueError:
    return ValueError(
        f"matmul: {count:,} of {total:,} values of {name} are not {element.name} values, which is"
        f" all that the unit multiplies. Round first: fpemu.quantize({name}, {element.name!r})."
    )


def check_out(unit: Unit, out: str, plan: Recipe | None) -> None:
    allowed = OUTPUTS if plan is None else recipes.OUTPUTS
    if out not in allowed:
        raise unknown("matmul", "out", out, allowed)
    if plan is not None:
        plan.check_unit(unit)
    elif out not in unit.outputs:
        raise ValueError(
            f"matmul: unit {unit.name!r} has no {out} output, only {', '.join(unit.outputs)}."
            " Use out='fp32' and round the result."
        )


def _check_no_recipe(*arguments: Any) -> None:
    names = ("scale_a", "scale_b", "bias", "scale_result", "split_k")
    for name, value in zip(names, arguments, strict=True):
        if not (value is None or (name == "split_k" and value == 1)):
            raise ValueError(
                f"matmul: {name} is given, but no recipe; a unit alone neither scales nor splits."
                " Name a recipe, for example recipe='scaled'."
            )


def build_request(
    unit: Unit, out: str, left: Array, right: Array, c: Any
) -> tuple[tuple[int, ...], Request]:
    """The leading dimensions of the result, and the validated product."""
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(
            f"matmul: a is (..., M, K) = {left.shape} and b is (..., K, N) = {right.shape}; K must"
            " be the same. Transpose one of them?"
        )
    try:
        lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except ValueError:
        raise ValueError(
            f"matmul: a is {left.shape} and b is {right.shape}; the dimensions before the last two"
            " must broadcast. Insert ones, or reshape."
        ) from None
    size = _scale_size(unit, left, right)
    a, b = (
        _operand(unit, left, unit.a, -1, lead, size),
        _operand(unit, right, unit.b, -2, lead, size),
    )
    shape = (*lead, left.shape[-2], right.shape[-1])
    start = _start(c, out, shape, a.values)
    return lead, Request(unit, out, a, b, start.reshape(prod(lead), *shape[-2:]))


def _operand(
    unit: Unit, x: Array, element: Format, axis: int, lead: tuple[int, ...], size: int
) -> Operand:
    _check_format(unit, x, element, axis)
    count = prod(x.shape[:-2])
    values = x.values(element).reshape(count, *x.shape[-2:])
    index = np.broadcast_to(np.arange(count, dtype=np.int64).reshape(x.shape[:-2]), lead)
    scales = None if unit.scale is None else _scales(unit, x, axis, size)
    return Operand(values, np.ascontiguousarray(index).ravel(), scales)


def _start(c: Any, out: str, shape: tuple[int, ...], values: Any) -> Any:
    """C as float32 values of the output type, where `values` are."""
    if c is None:
        return tensors.zeros(shape, values)
    if tensors.is_tensor(c) and tensors.is_tensor(values):
        start = tensors.single(c.detach().to(values.device))[0]
    else:
        start = tensors.like(_float32(c, "c"), values)
    if out == "fp16":
        start = tensors.half(start)
    try:
        fits = np.broadcast_shapes(start.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"matmul: c has shape {tuple(start.shape)}; it must broadcast to the result's, {shape}."
            " Leave c out for zero."
        )
    return tensors.spread(start, shape)


def _check_format(unit: Unit, x: Array, element: Format, axis: int) -> None:
    """Whether an Encoded's format is what the unit takes there."""
    if x.encoded is None:
        return
    fmt = x.encoded.format
    found = element_format(fmt)
    if (found.exp_bits, found.man_bits, found.bias, found.special) != (
        element.exp_bits, element.man_bits, element.bias, element.special,
    ):  # fmt: skip
        raise ValueError(
            f"matmul: {x.name} is encoded as {fmt.name!r}; unit {unit.name!r} multiplies"
            f" {element.name} there. Encode it in a format with {element.name} elements."
        )
    if unit.scale is None or not isinstance(fmt, BlockFormat):
        return
    scale = fmt.scale
    fits = (
        scale is not None
        and (scale.exp_bits, scale.man_bits) == (unit.scale.exp_bits, unit.scale.man_bits)
        and fmt.block is not None
        and fmt.block[-1] in unit.scale_block
    )
    if not fits:
        raise ValueError(
            f"matmul: {x.name} is encoded as {fmt.name!r}; unit {unit.name!r} reads"
            f" {unit.scale.name} scales of blocks of {' or '.join(map(str, unit.scale_block))}."
            " Encode it with such scales."
        )
    if not fmt.is_2d and x.encoded.axis != len(x.shape) + axis:
        raise ValueError(
            f"matmul: the scales of {x.name} lie along axis {x.encoded.axis}; they must lie along K,"
            f" which is axis {len(x.shape) + axis}. Encode it with axis={axis}."
        )


def _check_place_for_scales(unit: Unit, plan: Recipe | None, x: Array) -> None:
    """Block scales go into the unit, or into a recipe that promotes with them."""
    if x.encoded is None or x.encoded.scales is None or unit.scale is not None:
        return
    single = x.encoded.scales.dtype.itemsize == 4
    if not (single and plan is not None and plan.scaling == "blocks"):
        raise ValueError(
            f"matmul: {x.name} is encoded as {x.encoded.format.name!r}, and unit {unit.name!r} does"
            " not take its block scales. Use"
            + (" recipe='deepgemm.1d2d' or 'deepgemm.1d1d'." if single else " a block-scaled unit.")
        )


def _scale_size(unit: Unit, left: Array, right: Array) -> int:
    """Elements of K per scale: what the Encoded operands say, alike."""
    formats = [x.encoded.format for x in (left, right) if x.encoded is not None]
    sizes = {fmt.block[-1] for fmt in formats if isinstance(fmt, BlockFormat) and fmt.block}
    if unit.scale is not None and len(sizes) > 1:
        raise ValueError(
            f"matmul: a and b have scales for blocks of {' and '.join(map(str, sorted(sizes)))}; the"
            " instruction takes one block size for both. Encode them alike."
        )
    return sizes.pop() if sizes else (unit.scale_block or (0,))[0]


def _scales(unit: Unit, x: Array, axis: int, size: int) -> Scales:
    """Block scales along K as significands and exponents, one per row or column of the operand."""
    assert unit.scale is not None
    lead, (rows, cols) = x.shape[:-2], x.shape[-2:]
    fmt = None if x.encoded is None else x.encoded.format
    if x.encoded is None or not isinstance(fmt, BlockFormat):
        blocks = -(-x.shape[axis] // size)
        shape = (rows, blocks) if axis == -1 else (blocks, cols)
        return split_scales(np.ones((prod(lead), *shape), np.float32), unit.scale, size)
    codes = x.encoded.scales
    if x.device is not None and not x.stays:
        codes = codes.cpu().numpy()
    if fmt.is_2d:  # one scale per tile: the same for each of its rows
        across = -1 if axis == -2 else -2
        codes = tensors.repeat(codes, size, across)
        codes = codes[..., :rows, :] if axis == -1 else codes[..., :cols]
    codes = codes.reshape(prod(lead), *codes.shape[-2:])
    table = split_scales(value_table(unit.scale), unit.scale, size)
    return Scales(tensors.lookup(table.sig, codes), tensors.lookup(table.exp, codes), size)


def _ieee_mode() -> Any:
    """No subnormal is flushed while the kernels and the float32 steps of a recipe run."""
    if find_spec("numba") is None:
        return nullcontext()
    from fpemu.backends.floatmode import ieee_mode

    return ieee_mode()


# Backends and results ------------------------------------------------------------------------------


def _backend(unit: Unit, forced: str | None, device: Any) -> Any:
    """The module that computes the product."""
    if forced is not None and forced not in BACKENDS:
        raise unknown("matmul", "backend", forced, BACKENDS)
    on_host = device is None or device.type == "cpu"
    order = (
        [forced]
        if forced
        else ["numba", "torch", "oracle"]
        if on_host
        else ["triton", "torch", "numba", "oracle"]
    )
    reason: str | None = None
    for name in order:
        needs = "numpy" if name == "oracle" else name
        if find_spec(needs) is None:
            reason = f"{needs} is not installed"
            continue
        module = import_module(BACKENDS[name])
        reason = module.supports(unit)
        if reason is None:
            return module
    raise BackendError(
        f"matmul: backend {forced!r} cannot compute unit {unit.name!r}: {reason}. Leave backend out."
    )


def _rounded(d: Any, out: str) -> Any:
    """D in the type of the result, with its canonical NaN."""
    return tensors.result(d, out == "fp16", NAN.get(out, NAN["fp32"]))
