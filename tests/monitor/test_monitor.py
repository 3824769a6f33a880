"""`fpemu.Monitor`: records what is there, once, and changes nothing."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpemu
from fpemu import monitor
from fpemu.errors import FileFormatError
from fpemu.monitor import KINDS, Monitor, Run

ROOT = Path(__file__).resolve().parents[2]


def compiles(test: Any) -> Any:
    """torch's compiler warns of parts of itself, and of its own look at ``.grad``."""
    for what in (".torch.jit.script:DeprecationWarning", "The .grad attribute:UserWarning"):
        test = pytest.mark.filterwarnings(f"ignore:{what}")(test)
    return test


class Net(nn.Module):
    """Two blocks of two layers, the second checkpointed on request, and a head."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32))
            for _ in range(2)
        )
        self.head = nn.Linear(32, 8, bias=False)
        self.checkpointing = checkpointing  # use_reentrant, or None for none

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.blocks[0](x)
        if self.checkpointing is None:
            x = x + self.blocks[1](x)
        else:
            x = x + checkpoint(self.blocks[1], x, use_reentrant=self.checkpointing)
        return self.head(x)


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batch(step: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 5, 32, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, steps: int = 3, watch: Monitor | None = None, parts: int = 1,
    call: Callable[[Tensor], Tensor] | None = None,
) -> list[float]:  # fmt: skip
    """Losses of a few steps of SGD; `parts` micro-batches each."""
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(steps):
        for part in batch(step).chunk(parts):
            loss = (model if call is None else call)(part).square().mean() / parts
            loss.backward()
            losses.append(float(loss.detach()))
        if watch is not None:
            watch.step()
        sgd.step()
        sgd.zero_grad()
    return losses


def record(model: nn.Module, path: Path, *, steps: int = 3, parts: int = 1, **options: Any) -> Run:
    """Train under a monitor, compare the losses with an unwatched copy's, and read the run."""
    want = train(copy.deepcopy(model), steps, parts=parts)
    options.setdefault("every", 1)
    with Monitor(model, ["nvfp4", "e5m2"], path=path, **options) as watch:
        got = train(model, steps, watch, parts)
    assert got == want
    return monitor.read(path)


def plain(found: dict[str, Any], *but: str) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in but}


# What is recorded --------------------------------------------------------------------------------


def test_every_tensor_of_every_layer(tmp_path: Path) -> None:
    run = record(net(), tmp_path / "run.jsonl", steps=5, every=2)
    assert run.layers == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "head"]
    assert run.steps == [0, 2, 4]
    assert len(run.records) == 3 * 5 * len(KINDS)
    assert not any("absent" in r for r in run.records.values())
    first = run.records[0, "head", "activation"]
    assert (first["shape"], first["dtype"], first["calls"]) == ([6, 5, 32], "float32", 1)
    assert run.header["formats"] == ["nvfp4", "e5m2"]


def test_measures_are_those_of_the_tensors(tmp_path: Path) -> None:
    """Against tensors taken by hand and measured by `fpemu.stats`."""
    model, x = net(), batch(0)
    taken: dict[str, Tensor] = {"weight": model.head.weight.detach().clone()}
    twin = copy.deepcopy(model)

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        taken["activation"], taken["output"] = args[0].detach().clone(), out.detach().clone()
        out.register_hook(lambda g: taken.update(gradient=g.clone()))

    twin.head.register_forward_hook(keep)
    twin(x).square().mean().backward()
    assert twin.head.weight.grad is not None
    taken["weight gradient"] = twin.head.weight.grad
    run = record(model, tmp_path / "run.jsonl", steps=1)
    for kind in KINDS:
        flat = taken[kind].reshape(-1, taken[kind].shape[-1])
        for fmt in ("nvfp4", "e5m2"):
            want = fpemu.stats(flat, fmt)
            got = run.records[0, "head", kind]["formats"][fmt]
            assert (got["underflow"], got["saturated"]) == (want.underflow, want.saturated), kind
            assert got["sqnr_db"] == pytest.approx(want.sqnr_db, abs=1e-5)
        assert run.records[0, "head", kind]["amax"] == float(flat.abs().max())


def test_axis_and_kinds(tmp_path: Path) -> None:
    with Monitor(
        net(), "mxfp4", path=tmp_path / "a.jsonl", axis=-2, kinds=["activation"], every=1
    ) as watch:
        watch.model(batch(0))
        watch.step()
    run = monitor.read(tmp_path / "a.jsonl")
    flat = batch(0).reshape(-1, 32)
    want = fpemu.stats(flat, "mxfp4", axis=0)
    assert want.underflow != fpemu.stats(flat, "mxfp4").underflow  # the axes can be told apart
    assert (
        run.records[0, "blocks.0.0", "activation"]["formats"]["mxfp4"]["underflow"]
        == want.underflow
    )
    assert {kind for _, _, kind in run.records} == {"activation"}


def test_layers_by_name_and_by_function(tmp_path: Path) -> None:
    assert list(Monitor(net(), layers="blocks.*.0").layers) == ["blocks.0.0", "blocks.1.0"]
    assert list(Monitor(net(), layers=["head", "blocks.1.*"]).layers) == [
        "blocks.1.0",
        "blocks.1.2",
        "head",
    ]
    chosen = Monitor(net(), layers=lambda name, module: isinstance(module, nn.ReLU))
    assert list(chosen.layers) == ["blocks.0.1", "blocks.1.1"]
    run = record(net(), tmp_path / "r.jsonl", steps=1, layers=lambda n, m: isinstance(m, nn.ReLU))
    assert run.records[0, "blocks.0.1", "weight"]["absent"] == "there is no tensor"
    assert run.records[0, "blocks.0.1", "weight gradient"]["absent"] == "the layer has no weight"
    assert run.records[0, "blocks.0.1", "output"]["zeros"] > 0


def test_what_stands_in_for_linear_counts_as_one() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 4, 3
            self.weight = nn.Parameter(torch.ones(3, 4))

    model = nn.Sequential(Mine(), nn.Embedding(3, 4), nn.LayerNorm(4), nn.Bilinear(2, 3, 4))
    assert list(Monitor(model).layers) == ["0"]


# Training as it really is ------------------------------------------------------------------------


def test_gradient_accumulation_pools(tmp_path: Path) -> None:
    whole = record(net(), tmp_path / "1.jsonl", steps=1)
    parts = record(net(), tmp_path / "3.jsonl", steps=1, parts=3)
    for kind in ("weight", "activation", "output", "gradient"):
        one, three = whole.records[0, "head", kind], parts.records[0, "head", kind]
        assert three["calls"] == (1 if kind == "weight" else 3)
        assert three["size"] == one["size"] and three["amax"] == pytest.approx(one["amax"])
        e5m2 = three["formats"]["e5m2"]
        assert e5m2["saturated"] == one["formats"]["e5m2"]["saturated"]
    assert parts.records[0, "head", "weight gradient"]["calls"] == 1
    one, three = (r.records[0, "head", "weight gradient"]["rms"] for r in (whole, parts))
    assert three == pytest.approx(one, rel=1e-4)  # the accumulated gradient, not the last part's


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_a_forward_once(tmp_path: Path, reentrant: bool) -> None:
    want = record(net(), tmp_path / "plain.jsonl")
    got = record(net(checkpointing=reentrant), tmp_path / "again.jsonl")
    assert got.records == want.records


def test_frozen_layers_have_no_gradient(tmp_path: Path) -> None:
    model = net()
    model.blocks[0].requires_grad_(False)
    model.head.requires_grad_(False)
    run = record(model, tmp_path / "run.jsonl", steps=2)
    for step in (0, 1):
        first = {kind: run.records[step, "blocks.0.0", kind] for kind in KINDS}
        head = {kind: run.records[step, "head", kind] for kind in KINDS}
        assert first["gradient"]["absent"] == "the output needs no gradient"
        assert first["weight gradient"]["absent"] == "the weight is frozen"
        assert first["activation"]["size"] == 6 * 5 * 32
        assert head["gradient"]["size"] == 6 * 5 * 8  # on its way to what is below
        assert head["weight gradient"]["absent"] == "the weight is frozen"
        assert "formats" not in first["gradient"]


def test_shared_weights_are_measured_once(tmp_path: Path) -> None:
    model = net()
    model.blocks[1][0].weight = model.blocks[0][0].weight
    run = record(model, tmp_path / "run.jsonl", steps=1)
    for kind in ("weight", "weight gradient"):
        assert run.records[0, "blocks.1.0", kind]["absent"] == "shared with blocks.0.0"
        assert run.records[0, "blocks.0.0", kind]["calls"] == 1
    model = nn.Sequential(*[nn.Linear(32, 32)] * 3)  # one module, called three times
    run = record(model, tmp_path / "again.jsonl", steps=1)
    calls = {kind: run.records[0, "0", kind]["calls"] for kind in KINDS}
    assert calls == {"weight": 1, "activation": 3, "output": 3, "gradient": 3, "weight gradient": 1}


def test_evaluation_and_layers_that_are_not_called(tmp_path: Path) -> None:
    model = net().eval()
    run = record(model, tmp_path / "off.jsonl", steps=1)
    assert {r["absent"] for r in run.records.values()} == {"in evaluation mode"}
    run = record(model, tmp_path / "on.jsonl", steps=1, evaluation=True)
    assert not any("absent" in r for r in run.records.values())

    model = net()
    with Monitor(model, ["nvfp4"], every=1, path=tmp_path / "some.jsonl") as watch:
        model.blocks[0](batch(0)).sum().backward()
        model.eval()
        model(batch(1))  # a validation pass in between
        model.train()
        watch.step()
    run = monitor.read(tmp_path / "some.jsonl")
    assert run.records[0, "blocks.0.0", "activation"]["calls"] == 1
    assert run.records[0, "blocks.0.0", "weight gradient"]["calls"] == 1
    assert run.records[0, "head", "activation"]["absent"] == "in evaluation mode"
    assert run.records[0, "head", "weight gradient"]["absent"] == "in evaluation mode"


def test_cleared_gradients_are_said(tmp_path: Path) -> None:
    model = net()
    with Monitor(model, ["nvfp4"], every=1, path=tmp_path / "run.jsonl") as watch:
        model(batch(0)).sum().backward()
        model.zero_grad()
        watch.step()
    assert "before zero_grad()" in watch.latest[-1]["absent"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)).to(dtype)
    with Monitor(model, ["nvfp4", "e5m2"], every=1, path=tmp_path / "run.jsonl") as watch:
        model(batch(0).to(dtype)).square().mean().backward()
        watch.step()
    run = monitor.read(tmp_path / "run.jsonl")
    assert {r["dtype"] for r in run.records.values()} == {str(dtype).removeprefix("torch.")}
    want = fpemu.stats(batch(0).to(dtype), "nvfp4")
    assert run.records[0, "0", "activation"]["formats"]["nvfp4"]["underflow"] == want.underflow


def test_autocast_and_kwargs(tmp_path: Path) -> None:
    model = nn.Linear(32, 8)
    with Monitor(model, ["nvfp4"], every=1, path=tmp_path / "run.jsonl") as watch:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(input=batch(0))
        out.float().sum().backward()
        watch.step()
    found = {r["kind"]: r["dtype"] for r in watch.latest}
    assert found == {"weight": "float32", "activation": "float32", "output": "bfloat16",
                     "gradient": "bfloat16", "weight gradient": "float32"}  # fmt: skip
    assert watch.latest[0]["layer"] == "model"


def test_nonfinite_values_are_counted(tmp_path: Path) -> None:
    model = net()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
        model.blocks[0][0].weight[1, 1] = float("inf")
    formats = ["nvfp4", "mxfp4", "e4m3", "fp16", "int8", "int8_tensor"]
    with Monitor(model, formats, every=1, path=tmp_path / "run.jsonl") as watch:
        model(batch(0)).sum().backward()
        watch.step()
    run = monitor.read(tmp_path / "run.jsonl")
    weight = run.records[0, "head", "weight"]
    assert (weight["nan"], weight["inf"]) == (1, 0)
    assert weight["formats"]["nvfp4"]["nan"] == 16  # its block
    assert weight["formats"]["int8"] == {"absent": "int8 has no code for NaN"}
    assert run.records[0, "blocks.0.0", "weight"]["inf"] == 1


def test_an_output_changed_in_place_and_expanded_gradients(tmp_path: Path) -> None:
    model = nn.Linear(32, 8)
    with Monitor(model, ["nvfp4"], every=1, path=tmp_path / "run.jsonl") as watch:
        out = model(batch(0))
        want = float(out.detach().abs().max())
        out.mul_(2).sum().backward()  # the gradient is one number, expanded
        watch.step()
    run = monitor.read(tmp_path / "run.jsonl")
    assert run.records[0, "model", "output"]["amax"] == want
    assert run.records[0, "model", "gradient"]["amax"] == 2.0


@compiles
@pytest.mark.parametrize("every", [1, 2])
def test_compiled_after_attaching(tmp_path: Path, every: int) -> None:
    torch._dynamo.reset()
    model = net()
    want = train(copy.deepcopy(model), 4)
    with Monitor(model, ["nvfp4"], every=every, path=tmp_path / "run.jsonl") as watch:
        got = train(model, 4, watch, call=torch.compile(model, backend="aot_eager"))
    assert got == want
    run = monitor.read(tmp_path / "run.jsonl")
    assert run.steps == list(range(0, 4, every))
    assert not any("absent" in r for r in run.records.values())
    eager = record(net(), tmp_path / "eager.jsonl", steps=4, every=every)
    for key, want_record in eager.records.items():
        assert run.records[key]["formats"]["nvfp4"] == want_record["formats"]["nvfp4"]


@compiles
def test_compiled_before_attaching_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compiled already.*Attach the monitor first"):
        Monitor(torch.compile(net()), path=tmp_path / "run.jsonl").attach()
    inner = net()
    inner.blocks[0].compile()
    with pytest.raises(ValueError, match=r"blocks\.0 is compiled already"):
        Monitor(inner, path=tmp_path / "run.jsonl").attach()
    assert not (tmp_path / "run.jsonl").exists()


@compiles
def test_a_full_graph_is_refused_with_the_reason(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = net()
    refused = pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True")
    with Monitor(model, ["nvfp4"], path=tmp_path / "run.jsonl"), refused:
        torch.compile(model, backend="eager", fullgraph=True)(batch(0))


def test_copies_of_the_model_are_not_watched(tmp_path: Path) -> None:
    model = net()
    with Monitor(model, ["nvfp4"], every=1, path=tmp_path / "run.jsonl") as watch:
        copy.deepcopy(model)(batch(1))
        pickle.loads(pickle.dumps(model))(batch(2))
        model(batch(0))
        watch.step()
    assert monitor.read(tmp_path / "run.jsonl").records[0, "head", "activation"]["calls"] == 1


def test_detaching_leaves_nothing(tmp_path: Path) -> None:
    model = net()
    watch = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    watch.attach()
    out = model(batch(0))
    with pytest.warns(UserWarning, match=r"step\(\) was never called"):
        watch.detach()
    out.sum().backward()  # the gradient hooks of the finished step do nothing
    assert not any(m._forward_hooks for m in model.modules())


def test_counting_the_steps_of_an_optimizer(tmp_path: Path) -> None:
    """Weight gradients are then measured although zero_grad() comes first."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    formats = ["nvfp4", "e5m2"]
    with Monitor(model, formats, every=2, path=tmp_path / "run.jsonl", optimizer=sgd) as watch:
        for step in range(4):
            model(batch(step)).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
    assert watch.steps == 4
    by_hand = record(net(), tmp_path / "hand.jsonl", steps=4, every=2)
    assert monitor.read(tmp_path / "run.jsonl").records == by_hand.records


# Files -------------------------------------------------------------------------------------------


def test_existing_files(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(net(), path, steps=2)
    with pytest.raises(FileExistsError, match="exists='append'"):
        record(net(), path, steps=1)
    run = record(net(), path, steps=2, exists="append", start=5)
    assert run.steps == [0, 1, 5, 6] and run.header["start"] == 5
    assert record(net(), path, steps=1, exists="replace").steps == [0]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = record(net(), path, steps=2)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        path.write_bytes(data[:-cut])
        run = monitor.read(path)
        assert run.torn and len(run.records) == len(whole.records) - 1
    run = record(net(), path, steps=1, exists="append", start=2)  # goes on after the whole lines
    assert not run.torn and len(run.records) == len(whole.records) - 1 + 25
    path.write_bytes(b"".join([*lines[:3], b"{garbage\n", *lines[3:]]))
    with pytest.raises(FileFormatError, match="line 4"):
        monitor.read(path)
    path.write_bytes(lines[0][:-5])
    with pytest.raises(FileFormatError, match="no whole line"):
        monitor.read(path)
    path.write_bytes(b'{"some":"json"}\n')
    with pytest.raises(FileFormatError, match="line 1"):
        monitor.read(path)


def test_killed_while_it_runs(tmp_path: Path) -> None:
    """Every step that step() ended is in the file, whole."""
    path = tmp_path / "run.jsonl"
    code = (
        "import os, sys, torch, fpemu; m = torch.nn.Linear(16, 4);"
        f"w = fpemu.Monitor(m, ['e4m3'], every=1, path={str(path)!r}); w.attach();\n"
        "for s in range(3): m(torch.ones(2, 16)).sum().backward(); w.step()\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120)
    assert done.returncode == -9
    run = monitor.read(path)
    assert run.steps == [0, 1, 2] and len(run.records) == 15 and not run.torn


def test_records_are_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(net(), path, steps=1)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_tensorboard_scalars(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars.append((tag, value, step))

    writer = Writer()
    run = record(net(), tmp_path / "run.jsonl", steps=1, tensorboard=writer)
    found = {tag: value for tag, value, _ in writer.scalars}
    want = run.records[0, "head", "weight gradient"]
    assert found["weight_gradient/head/amax"] == want["amax"]
    assert found["weight_gradient/head/nvfp4/sqnr_db"] == want["formats"]["nvfp4"]["sqnr_db"]
    assert {step for _, _, step in writer.scalars} == {0}


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="needs the package tensorboard"):
        Monitor(net(), tensorboard=tmp_path)
    monkeypatch.setattr(monitor, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs the package pyarrow"):
        Monitor(net(), path=tmp_path / "run.parquet")


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    with Monitor(net(), ["nvfp4", "e5m2"], every=1, path=tmp_path / "run.parquet") as watch:
        train(watch.model, 2, watch)
    rows = parquet.read_table(tmp_path / "run.parquet").to_pylist()
    assert rows == list(monitor.rows(monitor.read(tmp_path / "run.jsonl")))


def test_rows_are_flat(tmp_path: Path) -> None:
    run = record(net(), tmp_path / "run.jsonl", steps=1)
    rows = list(monitor.rows(run))
    assert len(rows) == 25 * 2
    one = next(r for r in rows if r["layer"] == "head" and r["kind"] == "weight")
    source = run.records[0, "head", "weight"]
    assert one["q_underflow"] == source["formats"][one["format"]]["underflow"]
    assert one["outlier_channel"] == source["channels"][0][0] and one["shape"] == "8x32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ["nvfp5"]}, "unknown format 'nvfp5'"),
        ({"every": 0}, "every must be a positive integer, got 0"),
        ({"kinds": ["weigth"]}, "Did you mean 'weight'"),
        ({"layers": "nothing.*"}, "the linear layers are blocks.0.0"),
        ({"axis": 1}, "axis must be -1"),
        ({"ranks": "some"}, "unknown ranks 'some'"),
        ({"exists": "maybe"}, "unknown exists 'maybe'"),
    ],
)
def test_mistakes_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Monitor(net(), **options)


# Two processes -----------------------------------------------------------------------------------

WORKER = """
import sys, torch, torch.distributed as dist, fpemu
rank, store, folder = int(sys.argv[1]), *sys.argv[2:4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
for ranks in ("all", "first"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    path = f"{folder}/{ranks}/run.jsonl"
    with fpemu.Monitor(model, ["nvfp4"], every=1, path=path, ranks=ranks) as watch:
        for step in range(2 if rank else 3):  # one rank ends early: no rank waits for the other
            x = torch.full((2, 16), float(rank + 1))
            if step < 2:
                parallel(x).sum().backward()
            else:
                model(x)
            watch.step()
            model.zero_grad()
dist.destroy_process_group()
"""


def test_two_processes(tmp_path: Path) -> None:
    for ranks in ("all", "first"):
        (tmp_path / ranks).mkdir()
    arguments = [str(tmp_path / "store"), str(tmp_path)]
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(rank), *arguments], cwd=ROOT)
        for rank in (0, 1)
    ]
    try:
        assert [worker.wait(timeout=180) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    for ranks, count in (("all", 2), ("first", 1)):
        files = sorted(path.name for path in (tmp_path / ranks).glob("*.jsonl"))
        assert files == ["run.rank0.jsonl", "run.rank1.jsonl"][:count]
        runs = [monitor.read(tmp_path / ranks / name) for name in files]
        assert [run.header["rank"] for run in runs] == list(range(count))
        assert runs[0].steps == [0, 1, 2] and runs[0].header["world"] == 2
        assert runs[0].records[0, "0", "activation"]["amax"] == 1.0
        if ranks == "all":
            assert runs[1].steps == [0, 1]
            assert runs[1].records[0, "0", "activation"]["amax"] == 2.0
            # DDP has averaged the gradients by the time the step ends.
            same = [run.records[0, "0", "weight gradient"]["amax"] for run in runs]
            assert same[0] == same[1] > 0


def test_converted_layers_are_watched(tmp_path: Path) -> None:
    from fpemu.nn import convert

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    convert(model, "mxfp8", verbose=False)
    run = record(model, tmp_path / "run.jsonl", steps=2)
    assert run.layers == ["0", "2"]
    assert not any("absent" in r for r in run.records.values())
