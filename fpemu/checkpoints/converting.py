"""`convert`: a checkpoint written again in another layout or format, one weight at a time."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fpemu.checkpoints import coding, configs
from fpemu.checkpoints.coding import Misfit, Shape
from fpemu.checkpoints.layouts import (
    LOCAL,
    Layout,
    convert_number,
    get_layout,
    granularity,
    holds,
    layout_for,
    read_format,
    same_codes,
    sized,
)
from fpemu.checkpoints.reading import (
    INDEX,
    NUMBERS,
    ORIGIN,
    Checkpoint,
    Entry,
    Origin,
    open_checkpoint,
)
from fpemu.checkpoints.storage import Writer, byte_count, read
from fpemu.encoded import Encoded
from fpemu.formats import BlockFormat, Format, get_format

#: Weights that stay plain when a plain checkpoint is quantized, as the libraries leave them:
#: embeddings, output heads, norms and the routers of experts.
UNQUANTIZED = (
    "*embed*", "*wte.weight", "*wpe.weight", "*lm_head*", "*norm*", "*ln_*", "*router*",
    "*.gate.weight",
)  # fmt: skip
#: Plain formats that weights can be written back to, and their dtypes.
PLAIN = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True)
class Conversion:
    """What `convert` did, by weight names.

    `moved`: codes and scales as they were; `computed`: quantized anew; `decoded`: written plain;
    `kept`: copied plain tensors; `dropped`: stored tensors that the new layout has no place for.
    """

    path: Path
    moved: tuple[str, ...]
    computed: tuple[str, ...]
    decoded: tuple[str, ...]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass
class _Task:
    """One entry on its way: what is done to it, and the tensors that it becomes.

    `name` is the weight's name in the result; `parts` maps a role to a name and its dtype and
    shape; `fused` are the entries that share this one's number.
    """

    entry: Entry
    how: str
    name: str
    shape: Shape | None = None
    parts: dict[str, tuple[str, tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    fused: tuple[Entry, ...] = ()


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    layout: str | Layout | None = None,
    fmt: str | BlockFormat | Format | None = None,
    keep: Iterable[str] = (),
    force: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> Conversion:
    """Write a checkpoint in another layout or format.

    Parameters
    ----------
    src : path
        A checkpoint, plain or quantized, as `open` takes it.
    dst : path
        A folder, or a ``.safetensors`` file; it appears only when it is complete. Shards keep
        their names, small files (tokenizer, ...) are copied, ``quantization_config`` is rewritten.
    layout : str or Layout, optional
        Default: the one of `fmt`.
    fmt : str or format, optional
        Of the codes. Default: what is stored, or the layout's own for plain weights. ``"bf16"``,
        ``"fp16"`` or ``"fp32"`` write plain weights. ``"fp8_channel_e4m3"`` is known here too.
    keep : patterns
        Shell-style names of weights to leave plain, besides embeddings, heads, norms and routers
        (`UNQUANTIZED`).
    force : bool
        Replace `dst` if it is a checkpoint already.
    progress : callable, optional
        Called with each weight's name and stored bytes when it is written.

    Returns
    -------
    Conversion

    Notes
    -----
    Codes and scales that already are those of `fmt` (the same element, block and scale format, any
    dialect) are moved, not computed again: the stored bytes of codes and scales stay. A global
    scale that multiplies becomes one that divides by one float32 rounding, which its inverse does
    not always undo; the file's metadata therefore keeps the number that was stored first, and a
    conversion back restores its bits. Plain tensors of a quantized checkpoint stay plain.

    One weight is in memory at a time.

    Raises
    ------
    FileExistsError
        When `dst` exists and `force` is not given.
    FileFormatError
        For a damaged source.
    ValueError
        When a layout cannot hold a format or a weight; names the weight.
    """
    source = open_checkpoint(src)
    target, wanted = _target(source, layout, fmt)
    tasks = _plan(source, target, wanted, tuple(keep))
    with _replacing(Path(dst), source, force) as (path, single):
        _write(source, tasks, target, path, single, progress)
    names: dict[str, list[str]] = {}
    for task in tasks:
        names.setdefault(task.how, []).append(task.entry.name)
    dropped = [
        part.name
        for task in tasks
        for role, part in task.entry.parts.items()
        if role == "input_number" and role not in task.parts
    ]
    moved, computed, decoded, kept = (
        tuple(names.get(how, ())) for how in ("move", "compute", "decode", "keep")
    )
    return Conversion(Path(dst), moved, computed, decoded, kept, tuple(dropped))


def _target(
    source: Checkpoint, layout: Any, fmt: Any
) -> tuple[Layout | None, BlockFormat | Format | None]:
    """The layout to write (None: plain) and the format of its codes (None: as they are)."""
    if fmt is None and layout is None:
        raise ValueError(
            "convert: neither fmt nor layout is given; at least one says what to write. For example"
            " fmt='nvfp4', or fmt='bf16' for plain weights."
        )
    wanted: BlockFormat | Format | None = None
    if fmt is not None:
        local = LOCAL.get(fmt) if isinstance(fmt, str) else None
        wanted = local or get_format(fmt, "convert")
    if isinstance(wanted, Format):
        if wanted.name not in PLAIN or layout is not None:
            raise ValueError(
                f"convert: fmt {wanted.name!r} is an element format without scales, and layouts hold"
                f" block formats; plain weights are {', '.join(PLAIN)}, without layout=. For FP8"
                " take fp8_tensor_e4m3, for example."
            )
        return None, wanted
    if layout is None:
        assert wanted is not None
        return layout_for(wanted, "convert"), wanted
    row = get_layout(layout, "convert")
    if wanted is not None and not holds(row, wanted):
        raise ValueError(
            f"convert: layout {row.name!r} does not hold {wanted.name!r}; it holds {row.format!r}"
            " and formats with the same codes. Leave layout out, or choose another."
        )
    return row, wanted


# Plan --------------------------------------------------------------------------------------------


def _plan(
    source: Checkpoint,
    layout: Layout | None,
    wanted: BlockFormat | Format | None,
    keep: tuple[str, ...],
) -> list[_Task]:
    """A task for every entry, so that every file's header is known before any data is read."""
    plain_source = not source.layouts
    chosen = _targets(source, layout, keep) if plain_source else set()
    tasks = []
    for entry in source.values():
        kept = any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in keep)
        if layout is None:
            assert isinstance(wanted, Format)
            floats = entry.layout is not None or (
                plain_source and entry.parts["codes"].dtype in (*_TORCH, "F64")
            )
            tasks.append(_plain(entry, PLAIN[wanted.name]) if floats and not kept else _copy(entry))
        elif entry.layout is None:
            quantize = entry.name in chosen
            tasks.append(_compute(entry, layout, wanted) if quantize else _copy(entry))
        elif kept:
            tasks.append(_plain(entry, _dtype_code(source)))
        else:
            tasks.append(_again(entry, layout, wanted))
    if layout is not None and not any(task.how in ("move", "compute") for task in tasks):
        patterns = ", ".join(pattern for pattern, _ in layout.targets)
        raise ValueError(
            f"convert: {str(source.path)!r} has no weight to write as {layout.name}; it quantizes"
            f" floating-point weights named {patterns}, without embeddings, heads, norms and what"
            " keep names. Check the names with fpemu inspect."
        )
    if layout is not None:
        _fuse(tasks, layout)
    names: dict[str, _Task] = {}
    for task in tasks:
        for name, _ in task.parts.values():
            if name in names:
                raise ValueError(
                    f"convert: weights {names[name].entry.name!r} and {task.entry.name!r} would both"
                    f" be stored as {name!r}; rename one of them in the source."
                )
            names[name] = task
    return tasks


def _targets(source: Checkpoint, layout: Layout | None, keep: tuple[str, ...]) -> set[str]:
    """Plain weights to quantize: those of the first of the layout's patterns that finds any."""
    for pattern, ndim in () if layout is None else layout.targets:
        found = {
            entry.name
            for entry in source.values()
            if fnmatch.fnmatchcase(entry.name, pattern)
            and len(entry.shape) == ndim
            and 0 not in entry.shape
            and entry.parts["codes"].dtype in (*_TORCH, "F64")
            and not any(fnmatch.fnmatchcase(entry.name, p) for p in (*UNQUANTIZED, *keep))
        }
        if found:
            return found
    return set()


def _fuse(tasks: list[_Task], layout: Layout) -> None:
    """Tell weights that share one number of each other."""
    computed = {
        task.entry.name: task
        for task in tasks
        if task.how == "compute" and task.shape is not None and task.shape.format.tensor_scaled
    }
    for name, task in computed.items():
        parent, _, module = name.removesuffix(".weight").rpartition(".")
        group = next((group for group in layout.fused if module in group), ())
        names = (f"{parent}.{other}.weight" for other in group)
        task.fused = tuple(computed[other].entry for other in names if other in computed)


def _dtype_code(source: Checkpoint) -> str:
    return {name: code for code, name in _TORCH.items()}.get(source.declared.dtype, "BF16")


def _copy(entry: Entry) -> _Task:
    """The stored tensors as they are."""
    parts = {role: (part.name, part.spec) for role, part in entry.parts.items()}
    return _Task(entry, "keep" if entry.layout is None else "move", entry.name, None, parts)


def _plain(entry: Entry, dtype: str) -> _Task:
    return _Task(entry, "decode", entry.name, None, {"codes": (entry.name, (dtype, entry.shape))})


def _again(entry: Entry, layout: Layout, wanted: Any) -> _Task:
    """A quantized weight in another layout: its codes moved where they fit, else computed."""
    assert isinstance(entry.format, BlockFormat) and entry.stored_shape is not None
    fits = holds(layout, entry.format) and (wanted is None or same_codes(entry.format, wanted))
    if fits and entry.layout == layout:
        return _copy(entry)
    if not fits and wanted is None:
        raise ValueError(
            f"convert: weight {entry.name!r} is stored as {entry.format.name!r}, which layout"
            f" {layout.name!r} does not hold. Pass fmt={layout.format!r} to quantize it anew."
        )
    return _stored(entry, layout, entry.format) if fits else _compute(entry, layout, wanted)


def _compute(entry: Entry, layout: Layout, wanted: Any) -> _Task:
    fmt = read_format(layout.format) if wanted is None else wanted
    task = _stored(entry, layout, fmt)
    task.how = "compute"
    return task


def _stored(entry: Entry, layout: Layout, fmt: BlockFormat) -> _Task:
    """A task that writes a weight in a layout, with the names of its tensors there."""
    stem = layout.plain_stem(entry.name)
    if stem is None:  # a parameter of another name, as a stack of experts: a module of that name
        stem = f"{entry.name}."
    rows = _rows(entry, layout)
    fmt = sized(fmt, rows[-1] if rows else 1)
    dtype = layout.scale_dtypes[0]
    if (
        entry.origin is not None
        and fmt == entry.format
        and entry.origin.scale_dtype in layout.scale_dtypes
    ):
        dtype = entry.origin.scale_dtype
    shape = Shape(rows, coding.block_axis(layout, len(rows)), fmt, dtype)
    try:
        specs = coding.planned(layout, shape)
    except Misfit as misfit:
        raise ValueError(
            f"convert: weight {entry.name!r} does not fit layout {layout.name!r}: {misfit}. Leave it"
            f" plain with keep=[{entry.name!r}]."
        ) from None
    parts = {role: (stem + getattr(layout, role), spec) for role, spec in specs.items()}
    static = entry.origin is not None and "input_number" in entry.origin.numbers
    same = isinstance(entry.format, BlockFormat) and entry.format.element == fmt.element
    if static and same and layout.input_number:
        parts["input_number"] = (stem + layout.input_number, ("F32", layout.number_shape))
    return _Task(entry, "move", layout.plain_name(stem), shape, parts)


def _rows(entry: Entry, layout: Layout) -> tuple[int, ...]:
    """The weight's shape with the axis that `layout` blocks last.

    A quantized weight brings its own axis: blocks stay blocks, whatever the plain weight looks like
    in the new layout.
    """
    if entry.stored_shape is not None:
        return entry.stored_shape.rows
    axis = coding.block_axis(layout, len(entry.shape))
    rest = list(entry.shape)
    return (*rest[:axis], *rest[axis + 1 :], rest[axis])


# Data --------------------------------------------------------------------------------------------


def _data(task: _Task, layout: Layout | None) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of the tensors that a task writes."""
    entry = task.entry
    if task.shape is None:
        if task.how == "decode":
            name, (dtype, _) = task.parts["codes"]
            yield name, _bits(entry.values(_TORCH[dtype]))
            return
        for role, (name, _) in task.parts.items():
            yield name, read(entry.parts[role])
        return
    assert layout is not None
    shape = task.shape
    if task.how == "move":
        codes, scales = entry.codes(), entry.scales()
        number = _moved_number(entry, layout, "number")
    else:
        codes, scales, number = _computed(task, layout, shape)
    yield task.parts["codes"][0], coding.pack_codes(layout, codes)
    del codes
    try:
        yield task.parts["scales"][0], coding.pack_scales(layout, shape, scales)
    except Misfit as misfit:
        raise entry.parts["scales"].broken(str(misfit)) from None
    if number is not None:
        yield task.parts["number"][0], number
    if "input_number" in task.parts:
        static = _moved_number(entry, layout, "input_number")
        assert static is not None
        yield task.parts["input_number"][0], static


def _moved_number(entry: Entry, layout: Layout, role: str) -> np.ndarray | None:
    """A stored number as the layout has it, from the one that was stored first."""
    first = None if entry.origin is None else entry.origin.numbers.get(role)
    if first is None or getattr(layout, role) is None:
        return None
    kind, number = first
    return np.asarray(convert_number(number, kind, getattr(layout, NUMBERS[role])), np.float32)


def _computed(
    task: _Task, layout: Layout, shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes, scales and number of a weight quantized anew, blocks along the last axis."""
    import fpemu

    entry = task.entry
    amax = _shared_amax(task.fused) if len(task.fused) > 1 else None
    x = _source_values(entry)
    at = len(shape.rows) - 1
    if entry.stored_shape is not None:
        x = x.movedim(entry.stored_shape.axis, -1)
    elif x.ndim:
        x = x.movedim(coding.block_axis(layout, x.ndim), -1)
    encoded = fpemu.encode(x, shape.format, axis=at, amax=amax)
    number = None
    if layout.number is not None:
        number = np.asarray(_new_number(encoded, layout.number_kind), np.float32)
    if granularity(shape.format) == "tensor":
        return encoded.codes.numpy(), encoded.tensor_scale.numpy(), number
    return encoded.codes.numpy(), encoded.scales.numpy(), number


def _source_values(entry: Entry) -> Any:
    """What is quantized: a plain tensor as it is, a quantized one decoded in float32."""
    return entry.values(None if entry.layout is None else "float32")


def _shared_amax(entries: tuple[Entry, ...]) -> float | None:
    """The largest amax; None, so that each keeps its own, where one holds NaN."""
    largest = float(np.max([_amax(entry) for entry in entries]))
    return None if largest != largest else largest


@lru_cache(maxsize=64)
def _amax(entry: Entry) -> float:
    return float(_source_values(entry).abs().amax())


def _new_number(encoded: Encoded, kind: str) -> np.float32:
    """The number of a fresh `Encoded` as a layout stores it, unchanged where the kinds agree."""
    assert isinstance(encoded.format, BlockFormat)
    own = {"divided": "divides", "te": "amax"}.get(encoded.format.decode)
    if own == kind:
        return np.float32(encoded.global_scale.item())
    return convert_number(np.float32(encoded.tensor_scale.item()), "multiplies", kind)


def _bits(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


# Files -------------------------------------------------------------------------------------------


def _write(
    source: Checkpoint,
    tasks: list[_Task],
    layout: Layout | None,
    path: Path,
    single: bool,
    progress: Callable[[str, int], None] | None,
) -> None:
    block = _block(source, tasks, layout)
    if single:
        metadata = {key: value for m in source.metadata.values() for key, value in m.items()}
        if block is not None:
            metadata["quantization_config"] = json.dumps(block)
        _write_file(path, tasks, layout, metadata, block is None, progress)
        return
    alone = len(source.files) == 1
    mapped: dict[str, str] = {}
    for file in source.files:
        name = "model.safetensors" if alone else file.name
        of_file = [task for task in tasks if task.entry.file == file]
        # A file left without codes (they lie in another shard with their scales) is not written.
        if of_file:
            _write_file(path / name, of_file, layout, source.metadata[file], True, progress)
            mapped.update({part: name for task in of_file for part, _ in task.parts.values()})
    if not alone:
        total = sum(byte_count(*spec) for task in tasks for _, spec in task.parts.values())
        _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": mapped})
    folder = source.path if source.path.is_dir() else None
    if folder is not None:
        for file in sorted(folder.iterdir()):
            other = file.is_file() and not file.name.endswith(_WEIGHTS)
            if other and file.name not in (configs.CONFIG, configs.MODELOPT_CONFIG):
                shutil.copyfile(file, path / file.name)
    if folder is not None and _unchanged(source, tasks):
        for name in (configs.CONFIG, configs.MODELOPT_CONFIG):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, path / name)
        return
    config = {k: v for k, v in source.declared.config.items() if k not in configs.BLOCKS}
    if block is not None:
        config[configs.BLOCKS[0]] = block
        if block.get("producer"):  # ModelOpt's; it says the same in a file of its own
            _write_json(path / configs.MODELOPT_CONFIG, configs.modelopt_file(block))
    if config:
        _write_json(path / configs.CONFIG, config)


def _block(source: Checkpoint, tasks: list[_Task], layout: Layout | None) -> dict[str, Any] | None:
    """The ``quantization_config`` of what is written."""
    quantized = [task for task in tasks if task.how in ("move", "compute")]
    if not quantized:
        return None
    if _unchanged(source, tasks):
        return source.declared.quantization
    row = layout or quantized[0].entry.layout
    assert row is not None
    writer = configs.WRITERS.get(row.library)
    if writer is None:
        return None
    formats = {}
    for task in quantized:
        fmt = task.entry.format if task.shape is None else task.shape.format
        assert isinstance(fmt, BlockFormat)
        formats[_module(task.name)] = fmt
    plain = [
        _module(task.entry.name)
        for task in tasks
        if task not in quantized and len(task.entry.shape) > 1
    ]
    static = all("input_number" in task.parts for task in quantized)
    return writer(
        configs.Quantized(row, formats, plain, static, configs.kv_cache_scheme(source.declared))
    )


def _unchanged(source: Checkpoint, tasks: list[_Task]) -> bool:
    """Whether every weight is copied as it is, so that the configuration stays true."""
    copied = all(task.shape is None and task.how != "decode" for task in tasks)
    return copied and bool(source.declared.quantization)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _write_file(
    path: Path,
    tasks: list[_Task],
    layout: Layout | None,
    metadata: dict[str, str],
    drop_config: bool,
    progress: Callable[[str, int], None] | None,
) -> None:
    stale = (ORIGIN, "quantization_config") if drop_config else (ORIGIN,)
    kept = {"format": "pt", **{k: v for k, v in metadata.items() if k not in stale}}
    origins = {
        task.name: note.to_json()
        for task in tasks
        if task.how == "move" and layout is not None and (note := _note(task, layout)) is not None
    }
    if origins:
        kept[ORIGIN] = json.dumps(origins)
    planned = {name: spec for task in tasks for name, spec in task.parts.values()}
    with Writer(path, planned, kept) as file:
        for task in tasks:
            for name, data in _data(task, layout):
                file.write(name, data)
            if progress is not None:
                progress(task.entry.name, task.entry.nbytes)


def _note(task: _Task, layout: Layout) -> Origin | None:
    """What the new file must remember: what it does not itself say as the first file did."""
    origin = task.entry.origin
    if origin is None:
        return None
    other = any(
        kind != getattr(layout, NUMBERS[role]) for role, (kind, _) in origin.numbers.items()
    )
    name = None if task.name == task.entry.name else task.entry.name
    if other or name is not None or origin.scale_dtype != task.parts["scales"][1][0]:
        return replace(origin, name=name)
    return None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _replacing(dst: Path, source: Checkpoint, force: bool) -> Iterator[tuple[Path, bool]]:
    """A temporary place beside `dst` that becomes `dst` when all went well, and nothing otherwise."""
    single = dst.suffix == ".safetensors"
    if dst.resolve() in (source.path.resolve(), *(file.resolve() for file in source.files)):
        raise ValueError(f"convert: {str(dst)!r} is the source itself; name another place.")
    if dst.exists() or dst.is_symlink():
        if not force:
            raise FileExistsError(
                f"convert: {str(dst)!r} exists; it is not overwritten. Choose another name, or"
                " force it."
            )
        if not _is_checkpoint(dst, single):
            raise FileExistsError(
                f"convert: {str(dst)!r} exists and is no checkpoint, so it is not replaced even by"
                " force. Remove it yourself."
            )
    if not dst.parent.is_dir():
        raise FileNotFoundError(f"convert: no folder {str(dst.parent)!r} for the result; make it.")
    place = Path(tempfile.mkdtemp(dir=dst.parent, prefix=f".{dst.name}."))
    try:
        umask = os.umask(0)
        os.umask(umask)
        place.chmod(0o777 & ~umask)
        ready = place / "new"
        if not single:
            ready.mkdir()
        yield ready, single
        _swap(ready, dst, place / "old")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _swap(ready: Path, dst: Path, old: Path) -> None:
    """Put `ready` in the place of `dst`, or leave `dst` as it was."""
    if dst.exists():
        os.replace(dst, old)
    try:
        os.replace(ready, dst)
    except BaseException:
        if old.exists():
            os.replace(old, dst)
        raise


def _is_checkpoint(dst: Path, single: bool) -> bool:
    if single or not dst.is_dir():
        return single and dst.is_file()
    inside = list(dst.iterdir())
    return not inside or any(file.suffix == ".safetensors" for file in inside)
