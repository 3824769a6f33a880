"""`fpemu.Monitor`: what formats would do to the tensors of a training run, as it runs.

Hooks look at each layer's weight, activation, output, gradient and weight gradient when they are
there anyway, measure them on the spot (`fpemu.summary`) and keep numbers only. Nothing is changed,
no random number is drawn and no tensor is kept, so training has the bits it has without a monitor.

A run is a file of JSON lines. The first is a header; every other is one tensor of one step.
"""

from __future__ import annotations

import fnmatch
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fpemu
from fpemu.errors import FileFormatError, unknown
from fpemu.formats import BlockFormat, Format, get_format
from fpemu.ops import as_numpy
from fpemu.summary import Summary, summarize

#: What is recorded of a layer ``Y = X W^T``. Channels are a tensor's last axis: the layer's inputs
#: for weight, activation and weight gradient, its outputs for the other two.
KINDS = ("weight", "activation", "output", "gradient", "weight gradient")
#: What the header calls this layout; raised when it changes.
LAYOUT = 1

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OUTSIDE = "fpemu.Monitor measures outside the compiled graph; compile without fullgraph=True"


class Monitor:
    """Record what formats would do to every layer's tensors, every few steps.

    Use it as a context manager, or with `attach` and `detach`. Call `step` once per training step,
    after ``backward()`` and before the gradients are cleared.

    Parameters
    ----------
    model : nn.Module
        Not yet compiled (see Notes).
    formats : sequence of str, Format or BlockFormat
        What to cast to, in measurement only; the run need not use them. Rounded to nearest.
    every : int
        Record steps 0, `every`, 2 `every`, ...
    path : str or Path
        The run's file: ``.jsonl``; or ``.parquet`` (needs pyarrow), which is written next to the
        ``.jsonl`` by `detach`. In a process group of several ranks, ``run.jsonl`` becomes
        ``run.rank0.jsonl`` and so on.
    layers : str, sequence of str, or callable, optional
        Shell-style patterns on the names of the linear layers, or ``f(name, module) -> bool`` asked
        about every module. Default: every linear layer, which is a module whose 2-D `weight` has
        shape ``(out_features, in_features)``.
    kinds : sequence of str
        Some of `KINDS`.
    axis : {-1, -2}
        Along which blocks lie: channels, or tokens (rows), as the operands of wgrad have them. All
        axes of a tensor but the last count as rows.
    top : int
        How many outlier channels to keep.
    evaluation : bool
        Record layers that are in evaluation mode too.
    optimizer : torch.optim.Optimizer, optional
        Count its steps: then `step` need not be called. A step that `torch.amp.GradScaler` skips
        is not counted; its numbers are pooled with the next one's.
    ranks : {"all", "first"}
        Which ranks record, each its own tensors into its own file. No rank waits for another.
    exists : {"error", "append", "replace"}
        What to do when the file is there.
    start : int
        Number of the first step, when a run goes on from a checkpoint.
    tensorboard : str, Path or object with ``add_scalar(tag, value, step)``, optional
        Folder for a `SummaryWriter` (needs tensorboard), or a writer.

    Attributes
    ----------
    steps : int
        Number of the current step.
    latest : list of dict
        Records of the last step that was recorded.

    Notes
    -----
    *Pooling.* Calls within one step (gradient accumulation, a module used twice) are pooled as if
    their tensors had been one; each was cast with its own scales. Forward passes that activation
    checkpointing repeats are not counted.

    *What is measured.* Tensors as the layer gets and gives them: under autocast the input is not
    yet cast; under loss scaling gradients are scaled. The weight is measured in the step's first
    forward pass, once where layers share it, and its gradient is ``weight.grad`` when the step ends
    (with `optimizer`: when the optimizer begins).

    *Absent.* A tensor that there is not (a frozen layer's gradient, a layer that was not called)
    is recorded with the reason, never as zeros. NaN and infinities are counted and left out of the
    moments; a format's result counts its own NaN.

    *torch.compile* after `attach` works, without ``fullgraph=True`` (torch then says why): the graph
    is cut at each layer, in every step and after `detach` too. What the compiler fuses, and so its
    rounding, may differ from a compiled model without a monitor. A model that is compiled already
    is refused. Tensor subclasses such as DTensor are not measured: absent, with the reason.

    *Cost.* On the GPT of ``experiments/model.py`` (3.3 million parameters, 8 x 256 tokens) a recorded
    step takes about 54 % longer with one format and 111 % with three, 28 % without any: 5 % and 11 %
    of the run at ``every=10``. Other steps cost nothing measurable. Processor time of one thread of
    an AMD EPYC, by ``python benchmarks/bench_monitor.py --cpu``.

    Raises
    ------
    ValueError
        For names that are not known, `every` below 1, no matching layer, a compiled model.
    FileExistsError
        From `attach`, unless `exists` says otherwise.
    ImportError
        Where pyarrow or tensorboard is asked for and missing.

    Examples
    --------
    >>> import tempfile, torch, fpemu
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    >>> path = tempfile.mkdtemp() + "/run.jsonl"
    >>> with fpemu.Monitor(model, ["nvfp4", "mxfp8_e4m3"], every=1, path=path) as monitor:
    ...     model(torch.ones(4, 32)).sum().backward()
    ...     monitor.step()
    >>> run = fpemu.monitor.read(path)
    >>> run.layers, run.steps
    (['0', '2'], [0])
    >>> run.records[0, "2", "gradient"]["formats"]["nvfp4"]["underflow"]
    0
    """

    def __init__(
        self,
        model: nn.Module,
        formats: Sequence[str | Format | BlockFormat] = ("fp8_tensor_e4m3", "mxfp8_e4m3", "nvfp4"),
        *,
        every: int = 100,
        path: str | Path = "monitor.jsonl",
        layers: str | Sequence[str] | Callable[[str, nn.Module], bool] | None = None,
        kinds: Sequence[str] = KINDS,
        axis: int = -1,
        top: int = 4,
        evaluation: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        ranks: str = "all",
        exists: str = "error",
        start: int = 0,
        tensorboard: Any = None,
    ) -> None:
        if isinstance(formats, (str, Format, BlockFormat)):
            formats = [formats]
        self.formats = [get_format(fmt, "Monitor") for fmt in formats]
        _one_of("kind", kinds, KINDS)
        _one_of("ranks", [ranks], ("all", "first"))
        _one_of("exists", [exists], ("error", "append", "replace"))
        if axis not in (-1, -2):
            raise ValueError(
                f"Monitor: axis must be -1 (channels) or -2 (tokens), got {axis!r}. Leave it out"
                " for channels."
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"Monitor: every must be a positive integer, got {every!r}. every=1 records each"
                " step."
            )
        self.model, self.every, self.kinds, self.axis = model, every, tuple(kinds), axis
        self.top, self.evaluation, self.optimizer = top, evaluation, optimizer
        self.ranks, self.exists, self.steps = ranks, exists, start
        self.path = Path(path)
        self.parquet = self.path.suffix == ".parquet"
        if self.parquet:
            _pyarrow()
            self.path = self.path.with_suffix(".jsonl")
        self.layers = dict(_chosen(model, layers))
        if not self.layers:
            raise ValueError(
                f"Monitor: no layer of {type(model).__name__} matches layers={layers!r}; the linear"
                f" layers are {_some(name for name, _ in _chosen(model, None))}. Leave layers out"
                " for all of them."
            )
        self.recording = False
        self.latest: list[dict[str, Any]] = []
        self._writer = _summary_writer(tensorboard)
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        self._file: Any = None
        self._begun = False
        self._clear()

    # Attaching -----------------------------------------------------------------------------------

    def __enter__(self) -> Monitor:
        self.attach()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            self._clear()  # the error says more than a warning about steps
        self.detach()

    def attach(self) -> None:
        """Open the file and add the hooks."""
        if self._handles:
            raise RuntimeError("Monitor.attach: it is attached already; call detach() first.")
        for name, module in self.model.named_modules():
            if _is_compiled(module):
                raise ValueError(
                    f"Monitor.attach: {name or 'the model'} is compiled already, and compiled code"
                    " ignores new hooks. Attach the monitor first, then call torch.compile."
                )
        rank, world = _rank()
        if self.ranks == "first" and rank:
            return
        self._open(rank, world)
        for name, module in self.layers.items():
            hook = module.register_forward_hook(_Watch(self, name), with_kwargs=True)
            self._handles.append(hook)
        if self.optimizer is not None:
            before = self.optimizer.register_step_pre_hook(lambda *_: self._weight_gradients())
            after = self.optimizer.register_step_post_hook(lambda *_: self.step())
            self._handles += [before, after]
        self._begin()

    def detach(self) -> None:
        """Remove the hooks and close the file. A step that was not ended by `step` is dropped."""
        if self._found and not self.latest:
            warnings.warn(
                "Monitor: nothing was recorded, as step() was never called. Call it after each"
                " backward(), or pass optimizer=.",
                stacklevel=2,
            )
        for handle in self._handles:
            handle.remove()
        self._handles, self.recording = [], False
        self._clear()
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if self.parquet:
            to_parquet(self.file, self.file.with_suffix(".parquet"))

    def step(self) -> None:
        """End a step: write its records, if it is one that is recorded."""
        if self.recording:
            self._weight_gradients()
            self._write()
        self.steps += 1
        self._begin()

    # Collecting ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._clear()
        self.recording = bool(self._handles) and self.steps % self.every == 0
        if self.recording:
            for name, module in self.layers.items():
                weight = getattr(module, "weight", None)
                if isinstance(weight, nn.Parameter):
                    self._owners.setdefault(id(weight), name)

    def _clear(self) -> None:
        self._found: dict[tuple[str, str], Summary] = {}
        self._facts: dict[tuple[str, str], dict[str, Any]] = {}  # dtype and shape, or why absent
        self._reached: set[str] = set()  # layers whose output got a gradient in this step
        self._evaluated: set[str] = set()  # layers called in evaluation mode
        self._owners: dict[int, str] = {}  # by a weight's id: the first layer that has it

    def _forward(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any, out: Any
    ) -> None:
        if not (module.training or self.evaluation):
            self._evaluated.add(name)
            return
        # Inside backward() a forward pass is one that checkpointing repeats. Its outputs are the
        # ones that get gradients, under reentrant checkpointing; otherwise theirs never arrive.
        repeated = torch._C._current_graph_task_id() != -1
        y = _first_tensor((out,))
        if not repeated:
            self._weight(name, module)
            self._see(name, "activation", _first_tensor((*args, *kwargs.values())))
            self._see(name, "output", y)
        if y is not None and y.requires_grad:
            _origin(y, (*args, *kwargs.values())).register_hook(
                partial(self._backward, name, self.steps, y.shape)
            )
        elif torch.is_grad_enabled():
            self._absent(name, "gradient", "the output needs no gradient")

    @torch.compiler.disable(reason=_OUTSIDE)
    def _backward(self, name: str, step: int, shape: torch.Size, gradient: Tensor) -> None:
        if self.recording and step == self.steps:
            self._reached.add(name)
            self._see(name, "gradient", gradient.reshape(shape))

    def _weight(self, name: str, module: nn.Module) -> None:
        if (name, "weight") in self._facts:
            return
        weight = getattr(module, "weight", None)
        owner = self._owners.get(id(weight), name)
        if owner == name:
            self._see(name, "weight", weight)
        else:
            self._absent(name, "weight", f"shared with {owner}")

    def _weight_gradients(self) -> None:
        if not self.recording or "weight gradient" not in self.kinds:
            return
        reached = {id(getattr(self.layers[name], "weight", None)) for name in self._reached}
        for name, module in self.layers.items():
            weight = getattr(module, "weight", None)
            owner = self._owners.get(id(weight), name)
            if (name, "weight gradient") in self._facts:
                continue  # measured when the optimizer began
            if not isinstance(weight, Tensor):
                why = "the layer has no weight"
            elif owner != name:
                why = f"shared with {owner}"
            elif not weight.requires_grad:
                why = "the weight is frozen"
            elif not weight.is_leaf:
                why = "the weight is computed from other tensors"
            elif id(weight) not in reached:
                why = self._why(name, "no gradient reached the layer")
            elif weight.grad is None:
                why = "cleared before the step ended; call step() before zero_grad()"
            else:
                self._see(name, "weight gradient", weight.grad)
                continue
            self._absent(name, "weight gradient", why)

    def _see(self, name: str, kind: str, tensor: Tensor | None) -> None:
        """Measure a tensor and pool it with what was seen in this step."""
        if kind not in self.kinds:
            return
        why = _unmeasurable(tensor)
        if why is not None:
            self._absent(name, kind, why)
            return
        assert tensor is not None
        seen = summarize(_matrix(tensor), self.formats, self.axis)
        facts = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        with self._lock:  # backward may run in several threads, one per device
            before = self._found.get((name, kind))
            self._found[name, kind] = seen if before is None else before.pool(seen)
            self._facts[name, kind] = facts

    def _absent(self, name: str, kind: str, why: str) -> None:
        if (name, kind) not in self._found:
            self._facts[name, kind] = {"absent": why}

    # Writing -------------------------------------------------------------------------------------

    def _open(self, rank: int, world: int) -> None:
        name = f"{self.path.stem}.rank{rank}{self.path.suffix}" if world > 1 else self.path.name
        self.file = self.path.with_name(name)
        self._rank = rank
        exists = "append" if self._begun else self.exists
        if exists == "error" and self.file.exists():
            raise FileExistsError(
                f"Monitor.attach: {str(self.file)!r} exists; exists='append' goes on in it and"
                " exists='replace' writes it anew. Or choose another path."
            )
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if exists == "append":
            _drop_torn_line(self.file)
        # Unbuffered: a line is one write, in the file when the call returns.
        self._file = self.file.open("wb" if exists == "replace" else "ab", buffering=0)
        self._begun = True
        self._line(
            {
                "fpemu_monitor": LAYOUT, "fpemu": fpemu.__version__, "rank": rank, "world": world,
                "every": self.every, "start": self.steps, "axis": self.axis,
                "formats": [fmt.name for fmt in self.formats], "kinds": list(self.kinds),
                "layers": {name: type(module).__name__ for name, module in self.layers.items()},
            }
        )  # fmt: skip

    def _write(self) -> None:
        self.latest = []
        for name in self.layers:
            for kind in (k for k in KINDS if k in self.kinds):
                record = {"step": self.steps, "rank": self._rank, "layer": name, "kind": kind}
                found = self._found.get((name, kind))
                if found is None:
                    why = {"absent": self._why(name, "not there in this step")}
                    record |= self._facts.get((name, kind), why)
                else:
                    record |= self._facts[name, kind] | found.to_dict(self.top)
                self.latest.append(record)
        for record in self.latest:
            self._line(record)
            if self._writer is not None:
                for tag, value in _scalars(record):
                    self._writer.add_scalar(tag, value, self.steps)
        if hasattr(self._writer, "flush"):
            self._writer.flush()

    def _why(self, name: str, otherwise: str) -> str:
        """Why nothing of a layer was seen."""
        if any(layer == name for layer, _ in self._found):
            return otherwise
        return "in evaluation mode" if name in self._evaluated else "not called"

    def _line(self, value: dict[str, Any]) -> None:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        self._file.write(text.encode() + b"\n")


class _Watch:
    """A layer's forward hook. A copy of the model (deepcopy, pickle) carries one without effect."""

    def __init__(self, monitor: Monitor | None, name: str) -> None:
        self.monitor, self.name = monitor, name

    @torch.compiler.disable(reason=_OUTSIDE)
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self.monitor is not None and self.monitor.recording:
            self.monitor._forward(self.name, module, args, kwargs, out)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watch, (None, self.name)


# Layers and tensors ------------------------------------------------------------------------------


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer by its looks: `nn.Linear`, and what stands in for it."""
    weight = getattr(module, "weight", None)
    sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    return isinstance(weight, Tensor) and tuple(weight.shape) == sizes


def _chosen(
    model: nn.Module, layers: str | Sequence[str] | Callable[[str, nn.Module], bool] | None
) -> Iterator[tuple[str, nn.Module]]:
    patterns = [layers] if isinstance(layers, str) else layers
    for name, module in model.named_modules():
        if callable(patterns):
            take = patterns(name, module)
        else:
            take = is_linear(module)
            if patterns is not None:
                take = take and any(fnmatch.fnmatchcase(name, p) for p in patterns)
        if take:
            yield name or "model", module


def _is_compiled(module: nn.Module) -> bool:
    inside = type(module).__name__ == "OptimizedModule"
    return inside or getattr(module, "_compiled_call_impl", None) is not None


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (tuple, list)):
            found = _first_tensor(value)
            if found is not None:
                return found
    return None


def _origin(y: Tensor, inputs: Iterable[Any]) -> Tensor:
    """The tensor to hook for the gradient of y, also where y is changed in place afterwards.

    A linear layer's output of more than two axes is a view of a matrix. In-place operations on a
    view leave its own hooks behind, those of the matrix stay.
    """
    base = y._base
    if base is None or not base.requires_grad or base.numel() != y.numel():
        return y  # (inside a custom Function the matrix is no part of the graph)
    others = [t for t in inputs if isinstance(t, Tensor)]
    if any(t is base or t._base is base for t in others):  # a view of an input: used elsewhere too
        return y
    return base if y.is_contiguous() and base.is_contiguous() else y


def _unmeasurable(tensor: Any) -> str | None:
    """Why a tensor cannot be measured, or None."""
    if not isinstance(tensor, Tensor):
        return "there is no tensor"
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"a {type(tensor).__name__}"
    if tensor.dtype not in _DTYPES:
        return f"dtype {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return f"a {tensor.device.type} tensor, {str(tensor.layout).removeprefix('torch.')}"
    return None


def _matrix(tensor: Tensor) -> np.ndarray:
    """Rows x channels on the host; 16-bit floats as float32, which holds them exactly."""
    flat = tensor.detach()
    flat = flat.reshape(-1, flat.shape[-1]) if flat.ndim > 1 else flat.reshape(1, -1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    return as_numpy(flat.cpu().contiguous())


# Arguments and optional packages -----------------------------------------------------------------


def _one_of(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown("Monitor", what, name, known)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f", ... ({len(listed)} in all)" if len(listed) > 8 else ""
    return (", ".join(listed[:8]) or "none") + more


def _rank() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _summary_writer(target: Any) -> Any:
    if target is None or hasattr(target, "add_scalar"):
        return target
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"Monitor: tensorboard={str(target)!r} needs the package tensorboard, got: {error}."
            " Install it, or leave tensorboard out; the .jsonl has all numbers."
        ) from None
    return SummaryWriter(str(target))


def _pyarrow() -> Any:
    if find_spec("pyarrow") is None:
        raise ImportError(
            "Monitor: a .parquet file needs the package pyarrow, which is not installed. Install"
            " it, or use a path that ends in .jsonl."
        )
    import_module("pyarrow.parquet")
    return import_module("pyarrow")


def _scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """TensorBoard tags and values of a record; what is None is left out."""
    head = f"{record['kind'].replace(' ', '_')}/{record['layer']}"
    for name in ("amax", "rms", "kurtosis"):
        if record.get(name) is not None:
            yield f"{head}/{name}", record[name]
    for fmt, loss in record.get("formats", {}).items():
        for name in ("underflow_share", "saturated_share", "sqnr_db"):
            if loss.get(name) is not None:
                yield f"{head}/{fmt}/{name}", loss[name]


# Reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One rank's records, by (step, layer, kind)."""

    path: Path
    header: dict[str, Any]
    records: dict[tuple[int, str, str], dict[str, Any]]
    torn: bool  # the last line was cut off, and left out

    @property
    def layers(self) -> list[str]:
        return list(self.header["layers"])

    @property
    def steps(self) -> list[int]:
        return sorted({step for step, _, _ in self.records})


def read(path: str | Path) -> Run:
    """Read a run's file.

    A last line that was cut off (the process died while it wrote) is left out and said in `torn`;
    all lines before it are whole. Where a step was recorded twice, as after going on from a
    checkpoint, the later record counts.

    Raises
    ------
    FileNotFoundError
    FileFormatError
        For a file that is no monitor's, or is damaged elsewhere than at its end.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop() != b""
    header: dict[str, Any] = {}
    layers: dict[str, str] = {}
    records = {}
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if "fpemu_monitor" in value:
                if value["fpemu_monitor"] != LAYOUT:
                    raise KeyError(f"layout {value['fpemu_monitor']}")
                header = value
                layers |= value["layers"]
            elif not header:
                raise KeyError("no header")
            else:
                records[value["step"], value["layer"], value["kind"]] = value
        except (ValueError, KeyError, TypeError) as error:
            raise FileFormatError(
                f"monitor.read: {str(path)!r}, line {number} is not a record of this version's"
                f" Monitor, got: {error}. Delete that line, or record again."
            ) from None
    if not header:
        raise FileFormatError(
            f"monitor.read: {str(path)!r} has no whole line; a run begins with a header. Record"
            " again."
        )
    return Run(path, {**header, "layers": layers}, records, torn)


def _drop_torn_line(path: Path) -> None:
    """Cut a file back to its last whole line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        end = file.tell()
        while end:  # backwards in blocks: a run may be large
            start = max(0, end - (1 << 16))
            file.seek(start)
            cut = file.read(end - start).rfind(b"\n")
            if cut >= 0:
                file.truncate(start + cut + 1)
                return
            end = start
        file.truncate(0)


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """A run as a flat table: one row per step, layer, kind and format, absent tensors left out."""
    for record in run.records.values():
        shared = {k: v for k, v in record.items() if k not in ("formats", "exponents", "channels")}
        if "absent" in record:
            continue
        shared["shape"] = "x".join(map(str, record["shape"]))
        shared["lowest_exponent"] = record["exponents"]["lowest"]
        shared["exponent_counts"] = record["exponents"]["counts"]
        first = (record["channels"] or [[None, None, None]])[0]
        shared["outlier_channel"], _, shared["outlier_ratio"] = first
        for fmt, loss in record["formats"].items():
            if "absent" not in loss:
                yield {**shared, "format": fmt, **{f"q_{k}": v for k, v in loss.items()}}


def to_parquet(run: str | Path | Run, out: str | Path) -> None:
    """Write a run's `rows` as a Parquet file. Needs pyarrow; raises ImportError without it."""
    arrow = _pyarrow()
    run = run if isinstance(run, Run) else read(run)
    out = Path(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        arrow.parquet.write_table(arrow.Table.from_pylist(list(rows(run))), temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
