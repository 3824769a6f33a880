"""Dialects in Triton kernels: the bits of the CPU's loops, which have those of every recorded block.

Collected as `triton_bodies.py` is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from backends.test_dialects import hard, special
from golden.test_dialect_vectors import IMPLEMENTATIONS, RECORDS, difference
from gpu.triton_bodies import FLOATS, to_device
from helpers import DIALECTS, assert_same_bits, assert_same_parts, request, unhex

import fpemu
from fpemu import formats
from fpemu.backends import Parts, numba_
from fpemu.backends import triton_ as backend
from fpemu.dialects import dialect_of
from fpemu.rng import Random

SERVED = [name for name in DIALECTS if not dialect_of(formats.TABLE[name]).rounds_itself]
#: The interpreter takes every second MX dialect: all rules, for the 17 of an element are odd.
TRIED = [
    name
    for n, name in enumerate(SERVED)
    if not backend.INTERPRETED or formats.TABLE[name].tensor_scaled or n % 2
]
#: One of each way of scaling, of choosing, of what has no code, and of decoding.
KINDS = [
    "nvfp4/te-ref", "nvfp4/torchao", "nvfp4/compressed-tensors", "nvfp4/te-fast",
    "nvfp4/fouroversix-mae", "mxfp4/modelopt", "mxfp4/qutlass-absmax",
    "mxfp4/fouroversix-static6", "mxfp8_e5m2/te", "mxint8/quark-even", "mxfp4/quark-pack-down",
]  # fmt: skip


def check(
    x: np.ndarray, fmt: Any, dtype: str | None = None, values: bool = True, decode: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    """Codes, scales and number, `values`, and what the codes `decode` to, against numba."""
    row, given = fpemu.get_format(fmt), to_device(x)
    note = f"{row.name} {x.dtype}{x.shape} {options}"
    want = fpemu.encode(x, fmt, backend="numba", **options)
    got = fpemu.encode(given, fmt, backend="triton", **options)
    assert_same_bits(got.scales, want.scales, note=f"{note} scales")
    assert_same_bits(got.codes, want.codes, x, f"{note} codes")
    if row.tensor_scaled and not np.isnan(want.global_scale):
        assert_same_bits(got.global_scale, want.global_scale, note=f"{note} number")
    if not values:
        return
    want = fpemu.quantize(x, fmt, backend="numba", dtype=dtype, **options)
    out = fpemu.quantize(given, fmt, backend="triton", dtype=dtype, **options)
    assert_same_bits(out, want, x, f"{note} {dtype} quantize")
    if decode:
        out = torch.empty_like(out)
        axis = options.get("axis", -1) % max(x.ndim, 1)
        backend.decode(row, Parts(got.codes, got.scales, got.global_scale), axis, out)
        assert_same_bits(out, want, x, f"{note} {dtype} decode")


def test_all_but_one_library_is_served() -> None:
    refused = {name for name in DIALECTS if isinstance(backend.scheme_of(formats.TABLE[name]), str)}
    assert refused == set(DIALECTS) - set(SERVED)
    assert {name.split("/")[1].split("-")[0] for name in refused} == {"microxcaling"}
    with pytest.raises(fpemu.BackendError, match="rounds elements by its library's own steps"):
        fpemu.encode(to_device(hard(5, 32, 0)), "mxfp4/microxcaling-even", backend="triton")


@pytest.mark.parametrize("name", TRIED)
def test_dialects(name: str) -> None:
    """Ties, zeros of both signs, subnormals, NaN and infinities, a short last block.

    All MX dialects decode alike, or are in `KINDS`: values of every fourth.
    """
    n = SERVED.index(name)
    scaled = formats.TABLE[name].tensor_scaled
    kind = list(FLOATS.values())[(0, 1, 2, 0)[n % 4] if n % 3 else 1]
    with np.errstate(over="ignore"):
        x = special(hard(10, 40, n)).astype(kind)
    if scaled:
        check(x, name, list(FLOATS)[n % 4], amax=3.0)
        check(x[:-4], name, values=False)
    else:
        check(x, name, list(FLOATS)[n % 4], values=n % 4 == 0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_recorded_blocks(impl: str) -> None:
    """What the library itself made, a call for all blocks of a format and an amax."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for record in RECORDS.get(impl, ()):
        fmt = IMPLEMENTATIONS[impl].format(record["format"])
        amax = record.get("global_amax") if formats.TABLE[fmt].tensor_scaled else None
        groups.setdefault((fmt, amax, len(record["input"])), []).append(record)
    if backend.INTERPRETED:  # an amax in seven, a format in two
        step = 7 if len(groups) > 6 else max(min(len(groups), 2), 1)
        groups = dict(list(groups.items())[list(IMPLEMENTATIONS).index(impl) % step :: step])
    for (fmt, amax, _), records in groups.items():
        if fmt not in SERVED:
            continue
        x = np.stack([unhex(record["input"]) for record in records])
        options = {} if amax is None else {"amax": float(unhex([amax])[0])}
        got = fpemu.encode(to_device(x), fmt, backend="triton", **options)
        for k, record in enumerate(records):
            one = fpemu.Encoded(
                got.codes[k].cpu(), got.scales[k].cpu(), None, fmt, dtype=got.dtype,
                global_scale=None if amax is None else got.global_scale.cpu(),
            )  # fmt: skip
            assert not (wrong := difference(record, fmt, one)), f"{fmt} {record['case']}: {wrong}"


@pytest.mark.parametrize("name", KINDS)
def test_every_way(name: str) -> None:
    """Axes, strides, a point, nothing, decoding, wide sources, other roundings, the mask, a NaN
    that reaches the tensor's amax."""
    x = hard(6, 70, 4)
    check(np.ascontiguousarray(x.T), name, "bfloat16", decode=True, axis=0)
    check(x.T.copy().T.astype(np.float64), name, "float16", decode=True)
    check(np.float32(2.5).reshape(()), name)
    check(np.zeros((3, 0), np.float32), name)
    check((x[:2] * 100).astype(np.int32), name, "float64", decode=True, rounding="rtp")
    data = special(x)
    check(data, name, values=False, rounding="sr", seed=3, offset=5)
    ask = request(data, name)
    inside = backend.within(replace(ask, x=to_device(data)))
    assert_same_bits(inside, numba_.within(ask), data, f"{name} within")


@pytest.mark.parametrize("name", ["nvfp4/te-ref", "nvfp4/quark", "mxfp4/quark-pack-down"])
def test_stats(name: str) -> None:
    x = special(hard(9, 40, 5))
    want = fpemu.stats(x, name).to_dict()
    got = fpemu.stats(to_device(x), name, backend="triton").to_dict()
    for key, value in want.items():
        if key in ("sqnr_db", "rms_rel_error", "cosine", "bias"):  # sums, in another order
            np.testing.assert_allclose(got[key], value, rtol=1e-9, err_msg=key)
        else:
            assert got[key] == value or value != value, key


def test_a_row_of_ones_own() -> None:
    block = formats.BlockFormat(
        "own", formats.E2M1, (24,), formats.E4M3, "nvfp4/torchao", True, decode="scale-first"
    )
    tile = formats.BlockFormat(
        "tile", formats.E4M3, (4, 8), formats.E4M3, "nvfp4/te-ref", True, decode="te"
    )
    for fmt in (block, tile):
        check(hard(9, 40, 9), fmt, decode=True)
    for rule, shape, why in (
        ("nvfp4/fouroversix-mae", (8,), "not runs of 16"),
        ("nvfp4/fouroversix-static6", (2, 8), "no runs of a power of two"),
    ):
        fmt = replace(tile, element=formats.E2M1, rule=rule, block=shape)
        with pytest.raises(fpemu.BackendError, match=why):
            fpemu.encode(to_device(hard(8, 16, 0)), fmt, backend="triton")


def test_random_words_and_many_axes() -> None:
    x = np.random.default_rng(3).standard_normal((2, 2, 2, 4, 4, 32)).astype(np.float32)
    dense = np.ascontiguousarray(x[:, :, :, ::2, ::2, ::2])
    view = to_device(x)[:, :, :, ::2, ::2, ::2]
    ask = request(dense, "nvfp4/te-4over6-mae-448", rounding="sr", random=Random(5))
    want = numba_.encode(replace(ask, axis=1))
    assert_same_parts(backend.encode(replace(ask, x=view, axis=1)), want)


#: Blocks (times 37, under an amax of 5) for which the order of a sum decides between candidates.
NEAR = {
    "nvfp4/fouroversix-mae": [
        27, -46, -67, 146, 118, 11, -72, -32, 157, 109, 149, -84, -71, 46, 16, 97
    ],
    "nvfp4/te-4over6-mse-256": [
        85, -111, -49, 59, -122, -125, -73, -8, 128, -46, 121, -132, 134, -95, -12, -38
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_errors_are_added_in_the_librarys_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.float32([NEAR[name], NEAR[name][::-1]]) / np.float32(37)
    check(x, name, amax=5.0)
    check(np.ascontiguousarray(x.T), name, amax=5.0, axis=0)
    honest = backend.triton_dialects.cost_of

    def planted(dialect: Any) -> Any:
        cost = honest(dialect)
        return cost._replace(pairs=not cost.pairs)

    monkeypatch.setattr(backend.triton_dialects, "cost_of", planted)
    with pytest.raises(AssertionError, match="differ"):
        check(x, name, amax=5.0)


@pytest.mark.parametrize(
    ("name", "table", "field", "value"),
    [
        ("nvfp4/te-ref", "steps_of", "zero", "keep"),
        ("nvfp4/te-unfused", "steps_of", "nan", 0),
        ("nvfp4/te-fast", "steps_of", "narrow", False),
        ("nvfp4/modelopt", "steps_of", "apply", "multiply"),
        ("nvfp4/fouroversix-static6", "steps_of", "wraps", False),
        ("nvfp4/te-4over6-mse-256", "cost_of", "measure", "mae"),
        ("mxfp8_e4m3/te", "steps_of", "skip_nan", False),
        ("mxfp4/qutlass-absmax", "order_of", "divisor", 0x3F000000),
    ],
)
def test_a_planted_error_is_seen(
    name: str, table: str, field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = special(hard(60, 32, 12))
    options = {"amax": 3.0} if formats.TABLE[name].tensor_scaled else {}
    check(x, name, **options)
    honest = getattr(backend.triton_dialects, table)

    def planted(*args: Any) -> Any:
        return honest(*args)._replace(**{field: value})

    for module in (backend, backend.triton_dialects):
        if hasattr(module, table):
            monkeypatch.setattr(module, table, planted)
    with pytest.raises(AssertionError, match="differ"):
        check(x, name, **options)
