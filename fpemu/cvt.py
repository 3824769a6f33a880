"""Stochastic rounding as hardware and libraries do it: one random word for a group of elements.

`fpemu.cvt_rs` replays PTX ``cvt.rs``: each element of a packed group of 2 or 4 takes its own slice
of the group's 32-bit word. A slice R of n bits decides by the rule that `fpemu.quantize` has:
the magnitude goes up iff ``floor(f * 2**n) + R >= 2**n``, f being the fraction cut off. So a form
is a way to make words, and `rs_words` makes them for any quantizer.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from fpemu import ops
from fpemu.errors import unknown

TE_SOFTWARE = "e2m1x4/te-software"


@dataclass(frozen=True)
class Form:
    """One conversion.

    Parameters
    ----------
    element : str
        Format of the results.
    group : int
        Elements that share a word. Element 0 is the lowest lane of the packed result, the *last*
        source operand of the instruction.
    slices : tuple of tuple of int
        For each element the bits of the word that it takes, its most significant first.
    used : int
        Bits of the word that may be set.
    evidence : str
        What the slices rest on.
    """

    element: str
    group: int
    slices: tuple[tuple[int, ...], ...]
    used: int
    evidence: str

    @property
    def bits(self) -> int:
        """Random bits of an element: `sr_bits` for `fpemu.quantize`."""
        return len(self.slices[0])


def _down(high: int, low: int) -> tuple[int, ...]:
    return tuple(range(high, low - 1, -1))


def _mirrored(*slices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Each slice for one element, and its bits in opposite order for the next."""
    return tuple(order for s in slices for order in (s, s[::-1]))


_PROBED = (
    "model: which bits from the PTX ISA (cvt, 9.7.9.22); their order as probed on a B200 by others"
)
_ASSUMED = "model: which bits from the PTX ISA (cvt, 9.7.9.22); their order assumed as for FP8"
_HALVES = _mirrored(_down(15, 0), _down(31, 16))
_FULL = 0xFFFFFFFF

#: Every form by name.
FORMS: dict[str, Form] = {
    "f16x2": Form(
        "fp16", 2, (_down(12, 0), _down(28, 16)), 0x1FFF1FFF,
        "model: PTX ISA (cvt, 9.7.9.22): 13 bits of each half; results below 2**-14 not probed",
    ),
    "bf16x2": Form("bf16", 2, (_down(15, 0), _down(31, 16)), _FULL, _PROBED),
    "e4m3x4": Form("e4m3", 4, _HALVES, _FULL, _PROBED),
    "e5m2x4": Form("e5m2", 4, _HALVES, _FULL, _PROBED),
    "e2m3x4": Form("e2m3", 4, _HALVES, _FULL, _ASSUMED),
    "e3m2x4": Form("e3m2", 4, _HALVES, _FULL, _ASSUMED),
    "e2m1x4": Form(
        "e2m1", 4, _mirrored(_down(23, 16) + _down(7, 0), _down(31, 24) + _down(15, 8)), _FULL,
        _PROBED,
    ),
    TE_SOFTWARE: Form(
        "e2m1", 4, tuple(_down(8 * i + 7, 8 * i) for i in range(4)), _FULL,
        "model: TransformerEngine d0067d0, common/util/ptx.cuh, stochastic_round_fp4_e2m1, as read",
    ),
}  # fmt: skip
_BY_ELEMENT = {form.element: name for name, form in FORMS.items() if "/" not in name}


def get_form(name: str, where: str = "cvt_rs") -> Form:
    """The form of a name: ``"e2m1x4"``, or of an element format: ``"e2m1"``."""
    name = getattr(name, "name", name)
    form = FORMS.get(_BY_ELEMENT.get(name, name)) if isinstance(name, str) else None
    if form is None:
        raise unknown(where, "form", name, (*FORMS, *_BY_ELEMENT))
    return form


def cvt_rs(x: Any, fmt: Any, rbits: Any, *, overflow: str | None = None) -> Any:
    """Replay PTX ``cvt.rs``: stochastic rounding with one random word per packed group.

    Parameters
    ----------
    x : ndarray or Tensor, shape (..., n)
        float32 (the only source of the instruction), or float16 or bfloat16, which it holds.
    fmt : str or Format
        ``"f16x2"``, ``"bf16x2"``, ``"e4m3x4"``, ``"e5m2x4"``, ``"e2m3x4"``, ``"e3m2x4"``,
        ``"e2m1x4"``; the element's name does, too. ``"e2m1x4/te-software"`` is what
        TransformerEngine computes where there is no such instruction: 8 bits an element.
    rbits : ndarray or Tensor of uint32, shape (..., n / group)
        One word per group of 2 or 4 along the last axis; in torch int32 (the same bits) or int64,
        too. Element 0 of a group is the lowest lane of the packed result.
    overflow : {"sat", "nonsat"}, optional
        ``"sat"`` is ``.satfinite``, which FP8, FP6 and FP4 always have. Default: "nonsat" for
        ``f16x2`` and ``bf16x2``.

    Returns
    -------
    ndarray or Tensor
        Values in x's shape, dtype and container, as `fpemu.quantize` gives them.

    Notes
    -----
    Special values: as every cast, see ``docs/bits.md``. What the slices of the word rest on is
    ``fpemu.cvt.FORMS[fmt].evidence``.

    Source: PTX ISA 9.0, cvt; the order of bits inside a slice from a probe of a B200.

    Raises
    ------
    TypeError
        For a float64 or integer x.
    ValueError
        For an unknown form, a length the group does not divide, words of a wrong shape, or (f16x2)
        words with bits set that PTX wants to be zero.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> x = np.float32([1.25, 1.25, 1.25, 1.25])       # half-way between 1 and 1.5
    >>> fpemu.cvt_rs(x, "e2m1x4", np.uint32([0x00800000]))
    array([1.5, 1. , 1. , 1. ], dtype=float32)
    """
    form = get_form(fmt)
    box = ops._box(x, "cvt_rs")
    if box.kind not in ("float32", "float16", "bfloat16"):
        raise TypeError(
            f"cvt_rs: x has dtype {box.dtype}; the instruction's source is float32 (float16 and"
            " bfloat16 are exact in it). Round x first, for example x.astype('float32')."
        )
    if not box.shape:
        raise ValueError("cvt_rs: x has 0 dimensions; groups lie along its last axis. Reshape x.")
    if overflow == "nonsat" and form.element not in ("fp16", "bf16"):
        raise ValueError(
            f"cvt_rs: overflow is 'nonsat' but {form.element!r} conversions always saturate"
            " (.satfinite). Leave overflow out."
        )
    words = rs_words(fmt, rbits, shape=box.shape, where="cvt_rs")
    if form is FORMS[TE_SOFTWARE]:
        return _te_software(x, words)
    return ops.quantize(
        x, form.element, rounding="sr", overflow=overflow, sr_bits=form.bits, random_bits=words
    )


def rs_words(
    fmt: Any, rbits: Any, *, shape: tuple[int, ...] | None = None, where: str = "rs_words"
) -> Any:
    """The random word of every element, from one word per group.

    ``quantize(x, f, rounding="sr", sr_bits=FORMS[fmt].bits, random_bits=rs_words(fmt, rbits))``
    rounds the elements of any format f, a block format too, as the hardware form does.

    Parameters
    ----------
    fmt : str or Format
        As in `cvt_rs`. For ``"e2m1x4/te-software"`` the words are equivalent but for the rare
        values that ``docs/rotation.md`` names.
    rbits : ndarray or Tensor of uint32, shape (..., m)
        Also int32 or int64 in torch.

    Returns
    -------
    ndarray of uint32, or Tensor of int64 with values below 2**32; shape (..., m * group)

    Examples
    --------
    >>> import numpy as np
    >>> from fpemu.cvt import rs_words
    >>> [hex(w) for w in rs_words("e4m3x4", np.uint32([0x80000001])).tolist()]
    ['0x10000', '0x80000000', '0x80000000', '0x10000']
    """
    form = get_form(fmt, where)
    torch_: Any = sys.modules.get("torch")
    tensor = torch_ is not None and isinstance(rbits, torch_.Tensor)
    if tensor:
        allowed = rbits.dtype in (torch_.uint32, torch_.int32, torch_.int64)
        word = rbits.to(torch_.int64) & _FULL if allowed else rbits
    else:
        word = np.asarray(rbits)
        allowed = word.dtype == np.uint32
    want = None
    if shape is not None and shape[-1] % form.group == 0:
        want = (*shape[:-1], shape[-1] // form.group)
    if not allowed or (tuple(word.shape) != want if shape is not None else not word.ndim):
        per = f"one per group of {form.group} along the last axis"
        of = "" if shape is None else f" of x, whose shape is {tuple(shape)}"
        raise ValueError(
            f"{where}: rbits has dtype {rbits.dtype if tensor else word.dtype} and shape"
            f" {tuple(word.shape)}; it must be uint32 words, {per}{of}. Reshape it."
        )
    if form.used != _FULL and bool((word & (_FULL ^ form.used)).any()):
        raise ValueError(
            f"{where}: rbits has bits set outside {form.used:#010x}; PTX wants them to be zero for"
            f" {form.element!r}. Mask them: rbits & {form.used:#x}."
        )
    lanes = [_gather(word, bits) for bits in form.slices]
    if tensor:
        return torch_.stack(lanes, -1).flatten(-2)
    return np.stack(lanes, -1).reshape(*word.shape[:-1], word.shape[-1] * form.group)


def _gather(word: Any, bits: tuple[int, ...]) -> Any:
    """The named bits of each word, from bit 31 of the result down."""
    out = word & 0
    for place, bit in enumerate(bits):
        out = out | ((word >> bit & 1) << (31 - place))
    return out


def _te_software(x: Any, words: Any) -> Any:
    """TransformerEngine's form: ``t = fma(byte / 256, step, |x|)`` in float32, then down to a step.

    All is exact here. A sum of at most half a float32 step below the next grid point rounds up to
    it (a tie too: the grid point is even); there alone the form differs from the rule on 8 bits.
    """
    torch_ = sys.modules.get("torch")
    if torch_ is not None and isinstance(x, torch_.Tensor):
        lib: Any = torch_
        value, share = x.detach().to(torch_.float64), words.to(torch_.float64) * 2.0**-32
    else:
        lib = np
        with np.errstate(invalid="ignore"):  # signalling NaN
            value, share = np.asarray(x).astype(np.float64), words * 2.0**-32
    a = abs(value)
    step = lib.where(a < 2, 0.5, lib.where(a < 4, 1.0, 2.0))
    low = lib.floor(a / step) * step
    high = low + step
    half = 2.0**-22
    for top, smaller in ((4, 2.0**-23), (2, 2.0**-24), (1, 2.0**-25), (0.5, 2.0**-26)):
        half = lib.where(high <= top, smaller, half)
    up = a >= high - share * step - half
    q = lib.where(up, high, low)
    q = lib.where(q < 6, q, 6.0)  # NaN too
    q = lib.where(lib.isnan(a), q, lib.copysign(q, value))
    return q.to(x.dtype) if lib is not np else q.astype(np.asarray(x).dtype)
