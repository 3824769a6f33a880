"""`fpemu verify`: counting, records and exit codes, with the emulator in the GPU's place.

The stand-in is a `Session` on the CPU whose answers are the emulator's, with errors planted where a
test wants them: a comparison that cannot fail shows nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fpemu import cli
from fpemu.errors import BackendError
from fpemu.hw import INSTRUCTIONS, device, gemms, peers, replay, verify
from fpemu.hw.device import Gpu

H200 = Gpu("NVIDIA H200", (9, 0), "580.1", "12.8", "12.8.4", "2.11.0", "3.6.0")
B200 = Gpu("NVIDIA B200", (10, 0), "580.1", "12.9", "12.9.1", "2.11.0", "3.6.0")
SMALL = verify.Budget(12, 128, 1 << 8, 1, 0)
CVT = "cvt.rn.satfinite.e4m3x2.f32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
Alter = Callable[[Any], Any]


class Fake(verify.Session):
    """The emulator, but for what `plant` changes: a function of the result by name."""

    def __init__(self, gpu: Gpu = H200, plant: dict[str, Alter] | None = None, **_: Any) -> None:
        super().__init__(gpu, "cpu")
        self.plant = plant or {}

    def _altered(self, name: str, result: Any) -> Any:
        return self.plant[name](result) if name in self.plant else result

    def cast(self, name: str, bits: Any, rbits: Any) -> Any:
        return self._altered(name, verify.emulate(INSTRUCTIONS[name], bits, rbits))

    def multiply(self, row: gemms.Gemm, x: gemms.Operands) -> np.ndarray:
        return self._altered(row.name, gemms.replay(row, x))

    def quantize(self, x: Any, fmt: Any, options: dict[str, Any]) -> list[np.ndarray]:
        return self._altered(fmt.name, verify._outputs(x, fmt, options))

    def emulate_product(self, row: gemms.Gemm, x: gemms.Operands) -> np.ndarray:
        return self._altered(row.unit, gemms.replay(row, x))


def run(session: Fake, part: str, pattern: str = "*", budget: Any = SMALL) -> list[verify.Row]:
    return list(verify.verify(session, (part,), budget, pattern))


def flipped(index: int, bit: int = 1) -> Alter:
    """One wrong bit."""

    def alter(result: Any) -> Any:
        if isinstance(result, np.ndarray):
            result = result.copy()
            result.flat[index] ^= bit
        else:
            result = result.clone()
            result[index] ^= bit
        return result

    return alter


# Counting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [H200, B200], ids=["sm_90", "sm_100a"])
def test_casts_of_a_gpu_without_errors_are_equal(gpu: Gpu) -> None:
    rows = run(Fake(gpu), "casts")
    assert [row.name for row in rows] == list(INSTRUCTIONS)
    for row in rows:
        has = INSTRUCTIONS[row.name].runs_on(gpu.capability)
        assert (row.inputs > 0) == has, row
        assert not row.different and not row.failed and bool(row.why) != has, row


def test_a_wrong_bit_of_a_cast_is_counted_and_shown_in_hex() -> None:
    (row,) = run(Fake(plant={CVT: flipped(37)}), "casts", CVT)
    assert (row.inputs, row.different, row.bad) == (1 << 12, 1, True)
    bits, _ = next(verify.sources(INSTRUCTIONS[CVT], 12, 0, "cpu"))
    want = int(replay(CVT, bits.numpy())[37])
    source = int(bits[37]) & 0xFFFFFFFF
    assert row.first == f"0x{source:08x}: 0x{want ^ 1:02x}, emulator 0x{want:02x}"


def test_the_first_difference_of_a_stochastic_cast_names_word_and_lane() -> None:
    name = "cvt.rs.satfinite.e2m1x4.f32"
    (row,) = run(Fake(B200, {name: flipped(6)}), "casts", name)
    assert row.different == 1
    assert re.match(r"0x[0-9a-f]{8} with 0x[0-9a-f]{8} in lane 2: 0x[0-9a-f], emulator", row.first)


def test_an_emulator_that_differs_on_the_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify.emulate
    monkeypatch.setattr(verify, "emulate", lambda *a: flipped(0)(real(*a)))
    (row,) = run(Fake(), "casts", CVT)
    assert (row.different, row.failed, row.bad) == (0, True, True)  # both are wrong alike
    assert "other bits on the GPU than on the CPU" in row.why


def test_a_kernel_that_breaks_ends_its_row_alone() -> None:
    def broken(result: Any) -> Any:
        raise RuntimeError("no such instruction\nlong text")

    rows = run(Fake(plant={CVT: broken}), "casts", "cvt.rn.satfinite.*x2.f32")
    assert sum(row.failed for row in rows) == 1
    failed = next(row for row in rows if row.failed)
    assert (failed.name, failed.why) == (CVT, "RuntimeError: no such instruction")
    assert failed.bad
    assert all(
        row.inputs for row in rows if INSTRUCTIONS[row.name].runs_on((9, 0)) and not row.failed
    )


def test_an_assembler_too_old_for_an_instruction_is_no_failure() -> None:
    class PTXASError(RuntimeError):
        """As Triton calls it."""

    def refuse(result: Any) -> Any:
        raise PTXASError("PTXAS error: Unexpected instruction types")

    new, old = "cvt.rn.satfinite.e4m3x2.bf16x2", "cvt.rn.satfinite.e2m1x2.f32"
    rows = {r.name: r for r in run(Fake(B200, {new: refuse, old: refuse}), "casts", "cvt.rn.s*")}
    assert not rows[new].bad and rows[new].why.startswith("needs PTX ISA 9.1")
    assert rows[old].bad and rows[old].failed  # it has been there since 8.6


def test_quantizers_compare_codes_scales_and_values() -> None:
    rows = {row.name: row for row in run(Fake(), "quantize", "nvfp4") if row.path == "triton"}
    row = rows["nvfp4"]
    assert not row.different and not row.failed
    size, points = SMALL.values // 72 * 72 + 72, 10
    blocks = size // 72 * 5
    assert row.inputs == points * (3 * size + blocks + 1)


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, "code of 0x"), (1, r"scale of \["), (2, "tensor scale of"), (3, "decoded of 0x"), (4, "value of 0x")],
)  # fmt: skip
def test_a_wrong_bit_of_a_quantizer_is_counted(part: int, text: str) -> None:
    def alter(parts: list[np.ndarray]) -> list[np.ndarray]:
        parts[part] = flipped(0)(parts[part])
        return parts

    (row,) = (r for r in run(Fake(plant={"nvfp4": alter}), "quantize", "nvfp4") if r.must)
    assert row.different == 10 and row.bad  # each rounding and type
    assert re.search(f"^rne {text}.*: 0x[0-9a-f]+, emulator 0x[0-9a-f]+$", row.first), row.first


def test_what_the_kernels_do_not_serve_is_no_failure() -> None:
    def refuse(parts: Any) -> Any:
        raise BackendError("not in this version")

    (row,) = (r for r in run(Fake(plant={"mxfp4": refuse}), "quantize", "mxfp4") if not r.inputs)
    assert (row.why, row.bad) == ("not in this version", False)


def test_products_of_a_gpu_without_errors_are_equal() -> None:
    for gpu in (H200, B200):
        rows = run(Fake(gpu), "gemm", "*kind::[mf]*" if gpu is B200 else "*wgmma*")
        assert len(rows) > 10
        assert not [r for r in rows if r.different or r.failed or not r.inputs]


def test_a_wrong_bit_of_an_instruction_fails() -> None:
    (row,) = (r for r in run(Fake(plant={WGMMA: flipped(5)}), "gemm", WGMMA) if r.path == "tl.dot")
    families = len(gemms.FAMILIES)
    assert (row.different, row.bad) == (families, True)
    assert row.first.startswith("normal 64x64x32 [0, 0, 5]: 0x")
    assert row.unit == "hopper.wgmma.e4m3"


def test_a_library_that_splits_k_is_explained_and_does_not_fail() -> None:
    name = "_scaled_mm tensor fast e4m3 -> fp32"

    class Splits(Fake):
        def multiply(self, row: gemms.Gemm, x: gemms.Operands) -> np.ndarray:
            return gemms.replay(row, x, split_k=2)

    (row,) = run(Splits(), "gemm", name)
    assert row.different > 0 and not row.bad
    assert row.why == "equal with split_k=2 (normal 128x128x512)"


def test_what_this_torch_does_not_have_is_said() -> None:
    class Old(Fake):
        def multiply(self, row: gemms.Gemm, x: gemms.Operands) -> np.ndarray:
            raise NotImplementedError("torch._scaled_mm is not in this torch")

    (row,) = run(Old(), "gemm", "_scaled_mm rows fast*")
    assert not row.bad and "not in this torch" in row.why


def test_nan_bits_are_counted_apart() -> None:
    row = verify.Row("gemm", "", "")
    got, want = np.uint32([0x7FC00000, 5, 7]), np.uint32([0x7FFFFFFF, 5, 6])
    verify._count_product(row, got, want, (1, 3, 1), "special", "fp32")
    assert (row.inputs, row.different, row.nan) == (3, 2, 1)
    row = verify.Row("gemm", "", "")
    verify._count_product(row, got[:2], want, (1, 3, 1), "special", "fp32")
    assert row.different == 3  # of another shape: all


def test_the_emulated_products_are_compared_too() -> None:
    plant = {"hopper.wgmma.bf16": flipped(0)}
    rows = [r for r in run(Fake(plant=plant), "gemm", "hopper.wgmma.*16") if "triton" in r.path]
    assert {r.name: r.bad for r in rows} == {
        "hopper.wgmma.fp16 -> fp32": False, "hopper.wgmma.fp16 -> fp16": False,
        "hopper.wgmma.bf16 -> fp32": True,
    }  # fmt: skip


@pytest.mark.skipif(device.gpu() is None, reason="no CUDA device is here")
@pytest.mark.parametrize("part", verify.PARTS)
def test_the_gpu_that_is_here_gives_the_bits(part: str) -> None:
    gpu = device.gpu()
    assert gpu is not None
    budget = verify.Budget(16, 1 << 10, 1 << 12, 1, 60)
    rows = list(verify.verify(verify.Session(gpu), (part,), budget))
    bad = ["\n".join(verify.lines(row)) for row in rows if row.bad]
    assert not bad, "\n".join(bad)
    assert any(row.inputs for row in rows)


# Inputs ------------------------------------------------------------------------------------------


def test_float32_sources_have_every_leading_pattern_once() -> None:
    chunks = list(verify.sources(INSTRUCTIONS[CVT], 14, 3, "cpu", chunk=1 << 12))
    bits = torch.cat([c for c, words in chunks]).numpy().view(np.uint32)
    assert np.array_equal(bits >> 18, np.arange(1 << 14))
    low = bits & ((1 << 18) - 1)
    assert len(np.unique(low)) > 1 << 13


def test_packed_sources_have_every_value_in_each_lane() -> None:
    for name, count in (("cvt.rn.satfinite.e5m2x2.f16x2", 1 << 16), ("cvt.rn.f16x2.e4m3x2", 256)):
        bits, words = next(verify.sources(INSTRUCTIONS[name], 4, 0, "cpu"))
        pairs = bits.numpy().astype(np.int64).reshape(-1, 2) & (count - 1)
        assert words is None
        for lane in (0, 1):
            assert len(np.unique(pairs[:, lane])) == count
        if count == 256:
            assert len(np.unique(pairs, axis=0)) == 1 << 16


def test_random_words_keep_to_the_bits_of_their_form() -> None:
    bits, words = next(verify.sources(INSTRUCTIONS["cvt.rs.f16x2.f32"], 12, 0, "cpu"))
    assert words.shape == (bits.numel() // 2,)
    used = words.numpy().view(np.uint32)
    assert not (used & ~np.uint32(0x1FFF1FFF)).any() and (used == 0x1FFF1FFF).any()


def test_the_emulator_on_a_device_is_the_replay() -> None:
    """Written twice, for arrays and for tensors; this holds them together."""
    for name, row in INSTRUCTIONS.items():
        bits, words = next(verify.sources(row, 12, 1, "cpu"))
        bits = bits[: 1 << 14]
        want = replay(name, bits.numpy(), None if words is None else words.numpy())
        got = verify.emulate(row, bits, words)
        assert np.array_equal(got.numpy().view(want.dtype), want), name


# The command -------------------------------------------------------------------------------------


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run the command on a stand-in; the exit code, the output and the record."""

    def command(*args: str, gpu: Gpu | None = H200, plant: dict[str, Alter] | None = None) -> Any:
        monkeypatch.setattr(device, "gpu", lambda: gpu)
        monkeypatch.setattr(verify, "Session", lambda g, show: Fake(g, plant))
        monkeypatch.setitem(verify.BUDGETS, "default", SMALL)
        record = tmp_path / "record.json"
        result = CliRunner().invoke(cli.app, ["verify", *args, "--json", str(record)])
        data = json.loads(record.read_text()) if record.exists() else None
        return result.exit_code, result.output, data

    return command


def test_equal_bits_end_in_0_and_a_record(on: Callable[..., Any]) -> None:
    code, out, record = on("--only", "casts")
    assert code == 0, out
    assert "Equal, bit for bit: all that fpemu claims." in out
    assert max(map(len, out.split("rows and")[0].splitlines())) <= 80
    assert record["status"] == "ok" and record["schema"] == 1
    assert record["gpu"]["name"] == "NVIDIA H200" and record["gpu"]["driver"] == "580.1"
    assert record["point"] == {"parts": ["casts"], "pattern": "*", "seed": 0, **SMALL._asdict()}
    assert set(record["git"]) == {"commit", "dirty"}
    row = next(row for row in record["rows"] if row["name"] == CVT)
    assert (row["inputs"], row["different"], row["part"]) == (1 << 12, 0, "casts")
    assert "first" not in row


def test_a_difference_ends_in_1(on: Callable[..., Any]) -> None:
    code, out, record = on("--only", "casts", CVT, plant={CVT: flipped(9)})
    assert code == 1
    assert "FAILED: 1 rows that must be equal are not" in out and "first: 0x" in out
    assert record["status"] == "differs" and record["rows"][0]["different"] == 1


def test_a_library_that_differs_is_reported_and_ends_in_0(on: Callable[..., Any]) -> None:
    name = "_scaled_mm tensor fast e4m3 -> bf16"
    code, out, record = on("--only", "gemm", "*_*e4m3*", plant={name: flipped(0)})
    assert code == 0, out
    assert "1 rows of other libraries differ from their models" in out
    assert record["status"] == "ok"


def test_without_a_gpu_it_lists_what_it_would_run_and_ends_in_3(on: Callable[..., Any]) -> None:
    code, out, record = on(gpu=None)
    assert (code, record) == (3, None)
    lines = [line.strip() for line in out.splitlines()]
    assert max(map(len, out.splitlines())) <= 100
    for name in INSTRUCTIONS:
        assert lines.count(name) == 1, name
    for capability in ((9, 0), (10, 0)):
        assert {row.name for row in gemms.rows(capability)} <= set(lines)
    assert "cvt: compute capability 10.0 or 10.3" in lines
    assert re.search(r"^Nothing was run: PyTorch .*CUDA", out, re.MULTILINE)


def test_without_triton_it_says_so(on: Callable[..., Any]) -> None:
    code, out, _ = on(gpu=Gpu("NVIDIA H200", (9, 0), torch="2.11"))
    assert code == 3 and "Triton is not installed" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--only", "cast"), "--only is 'cast'; casts, quantize, gemm and cpu"),
        (("--quick", "--full"), "choose one"),
        (("nothing*",), "nothing .*matches 'nothing\\*'"),
    ],
)
def test_mistakes_end_in_2(on: Callable[..., Any], args: tuple[str, ...], message: str) -> None:
    for gpu in (H200, None):
        code, out, _ = on(*args, gpu=gpu)
        assert code == 2 and re.search(message, out), out


def test_every_row_prints_in_80_columns() -> None:
    for gpu in (H200, B200):
        names = [(r.path, r.name) for r in gemms.rows(gpu.capability)]
        names += [("cvt", name) for name in INSTRUCTIONS]
        for path, name in names:
            row = verify.Row(
                "x", path, name, 1 << 32, 1 << 29, "0x" * 80, nan=3, why="because " * 30
            )
            assert max(map(len, verify.lines(row))) <= 80
            assert len(list(verify.lines(verify.Row("x", path, name)))) == 1, name


def test_the_record_is_named_after_gpu_and_day() -> None:
    report = verify.Report(H200, ("casts",), SMALL, started=1_764_547_200.0)
    assert report.default_path().parts[-3:] == ("results", "hardware", "h200-2025-12-01.json")
    assert report.as_dict()["status"] == "part"  # nothing has run yet


def test_the_benchmark_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import bench_gpu

    monkeypatch.setattr(device, "gpu", lambda: None)
    assert bench_gpu.main([]) == 3
    assert capsys.readouterr().err.startswith("Nothing was measured: PyTorch")
    names = [case.name for case in bench_gpu.CASES]
    assert set(bench_gpu.QUICK) <= set(names) and len(set(names)) == len(names)


def test_the_benchmark_counts_the_bytes_that_must_move() -> None:
    import fpemu
    from benchmarks.bench_gpu import Case, moved

    x = torch.ones(128, 1024, dtype=torch.bfloat16)
    encoded = fpemu.encode(x, "mxfp4")
    assert moved(Case("quantize", "mxfp4"), x, encoded) == 2 * x.numel() * 2
    assert moved(Case("encode", "mxfp4"), x, encoded) == x.numel() * 3 + x.numel() // 32


# Other libraries ---------------------------------------------------------------------------------


def test_libraries_that_are_not_installed_are_said_to_be_missing() -> None:
    rows = list(peers.rows(Fake(), SMALL, "*", 0))
    assert [r.path for r in rows].count("TransformerEngine") == 8
    for row in rows:
        assert not row.bad and (row.why == "not installed" or row.why.startswith("needs")), row


def test_a_library_is_compared_with_its_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and padded, transposed scales, as the library stores them."""
    import fpemu

    def library(x: Any) -> tuple[Any, Any]:
        made = fpemu.encode(x, "fp8_block_e4m3")
        codes, scales = made.codes.clone(), made.scales
        codes.view(-1)[7] ^= 1
        return codes, torch.nn.functional.pad(scales.t(), (0, 4)).contiguous()

    peer = peers.Peer("Lib", "json", "quantizer", "fp8_block_e4m3", (9, 0), library)
    monkeypatch.setattr(peers, "PEERS", (peer,))
    (row,) = peers.rows(Fake(), SMALL, "*", 0)
    assert (row.different, row.bad, row.failed) == (2, False, False), row
    assert row.first.startswith("bfloat16 code byte 7: 0x")
    assert peers.trimmed(np.zeros((128, 4)), (100, 3)).shape == (100, 3)
    assert peers.trimmed(np.ones(1), ()).shape == ()
