"""The ``fpemu`` command: formats, their codes, what a format does to a file, and a self-check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # --help must not wait for numpy or rich
    from rich.table import Table

    from fpemu.checkpoints import Checkpoint, Difference
    from fpemu.formats import BlockFormat, Format

app = typer.Typer(
    help="The exact bits of low-precision training and inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    app(prog_name="fpemu")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """The user's mistakes end in one line on stderr and exit code 2; a fault keeps its traceback."""
    from fpemu.errors import FpemuError

    try:
        yield
    except BrokenPipeError:  # the reader of our output has seen enough
        raise
    except (FpemuError, ValueError, TypeError, OSError) as error:
        typer.echo(f"fpemu: {error}", err=True)
        raise typer.Exit(2) from None


def _version(wanted: bool) -> None:
    if wanted:
        from fpemu import __version__

        typer.echo(f"fpemu {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# formats -----------------------------------------------------------------------------------------


@app.command()
def formats(
    pattern: Annotated[str, typer.Argument(help="Shell-style pattern, such as 'nvfp4*'.")] = "*",
) -> None:
    """List formats: range and specials; or block, scale and rule; or a library's dialect."""
    from fpemu.dialects import dialect_of
    from fpemu.formats import Format, get_format, list_formats

    with _one_line_errors():
        rows = [get_format(name) for name in list_formats(pattern)]
        if not rows:
            get_format(pattern, "formats")  # raises, with the nearest name
        elements = [row for row in rows if isinstance(row, Format)]
        blocks = [row for row in rows if not isinstance(row, Format)]
        dialects = [row for row in blocks if dialect_of(row) is not None]
        blocks = [row for row in blocks if dialect_of(row) is None]
        hidden = len(dialects) if pattern == "*" else 0
        tables = []
        if elements:
            tables.append(_element_table(elements))
        if blocks:
            tables.append(_block_table(blocks))
        if dialects and not hidden:
            tables.append(_dialect_table(dialects))
        _print(*tables)
        if hidden:
            typer.echo(f"\nAnd {hidden} dialects of libraries: fpemu formats 'nvfp4/*'")


def _element_table(rows: list[Format]) -> Table:
    table = _table("Element formats", "name", "bits", "s,e,m", "max", "min normal", "min subnormal")
    for name in ("Inf", "NaN", "-0"):
        table.add_column(name, justify="center")
    for row in rows:
        signed, exp = int(row.signed), row.exp_bits
        flags = (row.has_inf, row.has_nan, row.has_negative_zero)
        table.add_row(
            row.name,
            str(row.bits),
            f"{signed},{exp},{row.man_bits}",
            f"{row.max:.6g}",
            _power(row.min_normal),
            _power(row.min_subnormal),
            *("yes" if flag else "-" for flag in flags),
        )
    return table


def _block_table(rows: list[BlockFormat]) -> Table:
    table = _table("Block formats", "name", "element", "block", "scale", "rule", "tensor")
    table.add_column("bits", justify="right")
    for row in rows:
        table.add_row(
            row.name,
            row.element.name,
            "tensor" if row.block is None else "x".join(map(str, row.block)),
            "-" if row.scale is None else row.scale.name,
            row.rule,
            "fp32" if row.tensor_scaled else "-",
            f"{_bits_per_element(row):g}",
        )
    return table


def _dialect_table(rows: list[BlockFormat]) -> Table:
    table = _table("Dialects", "name", "ties", "decoded", "source")
    for row in rows:
        table.add_row(row.name, row.rounding, row.decode, row.source)
    return table


def _bits_per_element(row: BlockFormat) -> float:
    """Stored bits of an element and its share of the block scale, to three digits."""
    if row.block is None or row.scale is None:
        return row.element.bits
    size = 1
    for side in row.block:
        size *= side
    return round(row.element.bits + row.scale.bits / size, 3)


def _power(value: float) -> str:
    """2^k for a power of two, which every smallest number is."""
    mantissa, exponent = value.hex().split("p")
    sign = "-" if mantissa.startswith("-") else ""
    return f"{sign}2^{int(exponent)}" if mantissa.strip("-") == "0x1.0000000000000" else repr(value)


# table -------------------------------------------------------------------------------------------


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="A format of at most 16 bits, such as e4m3.")],
) -> None:
    """Print every code of a format with its bits and exact value.

    For a block format, the codes of its elements.
    """
    from fpemu.formats import Format, get_format

    with _one_line_errors():
        row = get_format(name, "table")
        fmt = row if isinstance(row, Format) else row.element
        if fmt.bits > 16:
            raise ValueError(
                f"table: {name!r} has 2**{fmt.bits} codes; at most 2**16 are printed."
                " Ask for fp16 or bf16, or decode the codes you need with fpemu.decode."
            )
        if not isinstance(row, Format):
            scale = row.scale.name if row.scale else None
            also = f"; the scales are {scale}: fpemu table {scale}" if scale else ""
            typer.echo(f"# elements of {name} ({fmt.name}){also}")
        _write_lines(_code_lines(fmt))


def _code_lines(fmt: Format) -> Iterator[str]:
    """Fixed-width lines for a pager; the exact decimal, which may be long, comes last."""
    digits = max(2, -(-fmt.bits // 4))
    widths = [w for w in (int(fmt.signed), fmt.exp_bits, fmt.man_bits) if w]
    if fmt.is_integer:
        widths, layout = [fmt.bits], "integer"
    else:
        layout = "|".join(("s", "exp", "man")[3 - len(widths) :] if fmt.signed else ("exp", "man"))
        layout = layout if fmt.man_bits else "exp"
    bits_width = max(len(layout), sum(widths) + len(widths) - 1)
    hexes = [_hex(value) for value in fmt.values().tolist()]
    hex_width = max(map(len, hexes))
    yield f"{'code':>{digits + 2}}  {layout:<{bits_width}}  {'hex':<{hex_width}}  value"
    for code, (value, hexed) in enumerate(zip(fmt.values().tolist(), hexes, strict=True)):
        split, rest = [], f"{code:0{fmt.bits}b}"
        for width in widths:
            split.append(rest[:width])
            rest = rest[width:]
        yield (
            f"0x{code:0{digits}x}  {'|'.join(split):<{bits_width}}  {hexed:<{hex_width}}"
            f"  {_decimal(value)}"
        )


def _hex(value: float) -> str:
    """``float.hex`` without the mantissa's trailing zeros."""
    if not isfinite(value):
        return str(value)
    mantissa, exponent = value.hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}p{exponent}"


def _decimal(value: float) -> str:
    """All digits of a value, as many as it takes."""
    if not isfinite(value):
        return str(value)
    exact = Decimal(value)
    tiny = 0 < abs(value) < 1e-9
    return format(exact, "E" if tiny else "f")


# inspect -----------------------------------------------------------------------------------------

INSPECT_FORMATS = "e4m3,mxfp8_e4m3,mxfp4,nvfp4"


@app.command()
def inspect(
    file: Annotated[
        Path,
        typer.Argument(help="A .npy, .npz, .safetensors or .pt file, or a checkpoint's folder."),
    ],
    pattern: Annotated[str, typer.Argument(help="Which tensors, such as '*.weight'.")] = "*",
    formats: Annotated[
        str, typer.Option("--formats", "-f", help="Names, separated by commas.")
    ] = "",
    axis: Annotated[int, typer.Option(help="Axis that the blocks lie along.")] = -1,
) -> None:
    """Show what formats would do to a file's tensors, or what a quantized checkpoint holds.

    For a folder or a quantized file without --formats: each tensor's layout, format, shape and
    bytes, the share of its codes that are zero and of its block scales that are saturated.
    """
    from fpemu import checkpoints
    from fpemu.files import tensors
    from fpemu.formats import get_format

    with _one_line_errors():
        names = [name.strip() for name in (formats or INSPECT_FORMATS).split(",") if name.strip()]
        for name in names:
            get_format(name, "inspect")
        checkpoint = None
        if file.is_dir() or (file.suffix == ".safetensors" and file.is_file()):
            opened = checkpoints.open(file)
            checkpoint = opened if file.is_dir() or opened.layouts else None
        if checkpoint is not None and not formats:
            _inspect_checkpoint(checkpoint, pattern)
            return
        table = _table(str(file), "tensor", "dtype", "shape", "amax", "format")
        for column in ("underflow", "saturated", "SQNR dB"):
            table.add_column(column, justify="right")
        found = tensors(file, pattern) if checkpoint is None else _values(checkpoint, pattern)
        with _spinner() as show:
            for tensor_name, tensor in found:
                show(tensor_name)
                _inspect_one(table, tensor_name, tensor, names, axis)
        if not table.row_count:
            raise ValueError(f"inspect: no tensor of {str(file)!r} matches {pattern!r}; try '*'.")
        _print(table)


def _values(checkpoint: Checkpoint, pattern: str) -> Iterator[tuple[str, Any]]:
    """Names and decoded values of a checkpoint's weights, one at a time."""
    for name, entry in checkpoint.items():
        if fnmatchcase(name, pattern):
            yield name, entry.values()


def _inspect_checkpoint(checkpoint: Checkpoint, pattern: str) -> None:
    from fpemu.checkpoints.reading import saturated_scale_share, zero_code_share

    entries = [entry for name, entry in checkpoint.items() if fnmatchcase(name, pattern)]
    if not entries:
        raise ValueError(
            f"inspect: no tensor of {str(checkpoint.path)!r} matches {pattern!r}; try '*'."
        )
    several = len(checkpoint.layouts) > 1
    columns = ("tensor", "layout", "format", "shape") if several else ("tensor", "format", "shape")
    table = _table(f"{checkpoint.path}: {', '.join(checkpoint.layouts) or 'plain'}", *columns)
    for column in ("bytes", "zero codes", "sat. scales"):
        table.add_column(column, justify="right")
    total = sum(entry.nbytes for entry in entries)
    with _progress("reading", total) as advance:
        for entry in entries:
            fmt = entry.parts["codes"].dtype if entry.format is None else entry.format.name
            layout = "plain" if entry.layout is None else entry.layout.name
            table.add_row(
                entry.name,
                *((layout,) if several else ()),
                fmt,
                "x".join(map(str, entry.shape)) or "scalar",
                f"{entry.nbytes:,}",
                _percent(zero_code_share(entry)),
                _percent(saturated_scale_share(entry)),
            )
            advance(entry.name, entry.nbytes)
    table.add_section()
    blanks = [""] * (len(columns) - 1)
    table.add_row(f"{len(entries)} tensors", *blanks, f"{total:,}", "", "")
    _print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g}%"


def _inspect_one(table: Table, name: str, tensor: Any, formats: list[str], axis: int) -> None:
    import fpemu

    x, amax = _measurable(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    head = (name, dtype, "x".join(map(str, tensor.shape)) or "scalar", amax)
    if x is None:
        table.add_row(*head, "-", "-", "-", "-", end_section=True)
        return
    for i, fmt in enumerate(formats):
        measured = fpemu.stats(x, fmt, axis=axis)
        table.add_row(
            *(head if i == 0 else ("", "", "", "")),
            fmt,
            f"{100 * measured.underflow_share:.3g}%",
            f"{100 * measured.saturated_share:.3g}%",
            f"{measured.sqnr_db:.2f}",
            end_section=i == len(formats) - 1,
        )


def _measurable(tensor: Any) -> tuple[Any, str]:
    """The tensor as `fpemu.stats` takes it (None for what holds no floats), and its amax."""
    import numpy as np

    if isinstance(tensor, np.ndarray):
        if not tensor.size or tensor.dtype.kind not in "fiu":
            return None, "-"
        amax = max(abs(float(tensor.min())), abs(float(tensor.max())))
        floats = tensor.dtype.kind == "f" and tensor.dtype.itemsize <= 8
        return tensor if floats else None, f"{amax:.6g}"
    import torch

    packed = "float4" in str(tensor.dtype)  # bytes that hold two codes: no values to measure
    if not tensor.numel() or tensor.is_complex() or packed:
        return None, "-"
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.float()  # FP8 and E8M0: exact
    low, high = torch.aminmax(tensor)
    amax = max(abs(low.item()), abs(high.item()))
    return tensor if tensor.is_floating_point() else None, f"{amax:.6g}"


# convert, diff -----------------------------------------------------------------------------------


@app.command()
def convert(
    src: Annotated[Path, typer.Argument(metavar="IN", help="A checkpoint: folder or file.")],
    dst: Annotated[Path, typer.Argument(metavar="OUT", help="Folder, or .safetensors file.")],
    fmt: Annotated[
        str, typer.Option(help="Format of the codes, such as nvfp4; bf16 writes plain weights.")
    ] = "",
    layout: Annotated[
        str, typer.Option(help="How to store it, such as nvfp4-pack-quantized.")
    ] = "",
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Weights to leave plain; repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace OUT if it is a checkpoint.")] = False,
) -> None:
    """Write a checkpoint in another layout or format.

    Codes that already are of the format are moved, bit for bit. Embeddings, heads, norms and
    routers stay plain. OUT appears only when it is complete.
    """
    from fpemu import checkpoints

    with _one_line_errors():
        before = checkpoints.open(src)
        with _progress("writing", before.nbytes) as advance:
            done = checkpoints.convert(
                src,
                dst,
                layout=layout or None,
                fmt=fmt or None,
                keep=keep or (),
                force=force,
                progress=advance,
            )
        after = checkpoints.open(dst)
        rows = {
            "weights whose codes were moved": done.moved,
            "weights quantized": done.computed,
            "weights decoded": done.decoded,
            "plain tensors copied": done.kept,
            "stored tensors left out: the layout has no place for them": done.dropped,
        }
        typer.echo(f"{dst}: {', '.join(after.layouts) or 'plain'}")
        for what, names in rows.items():
            if names:
                typer.echo(f"{len(names):>9,}  {what}")
        typer.echo(f"{before.nbytes:,} bytes became {after.nbytes:,}.")


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint: folder or file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of any layout.")],
    all_: Annotated[bool, typer.Option("--all", help="List tensors that agree, too.")] = False,
) -> None:
    """Compare two checkpoints tensor by tensor.

    How many block scales and codes differ (a dash: the formats do; * marks another global scale),
    and how far the values are apart. Exit code 0 where every bit agrees, 1 where one does not, 2
    for trouble.
    """
    from fpemu import checkpoints

    with _one_line_errors():
        one, two = checkpoints.open(a), checkpoints.open(b)
        with _progress("comparing", one.nbytes) as advance:
            found = checkpoints.diff(one, two, progress=advance)
        table = _table(f"{a} and {b}", "tensor")
        for column in ("scales differ", "codes differ", "SQNR dB", "max difference"):
            table.add_column(column, justify="right")
        for row in found:
            if all_ or not row.same:
                table.add_row(row.name, *_diff_cells(row))
        if table.row_count:
            _print(table)
    different = sum(not row.same for row in found)
    typer.echo(f"{different:,} of {len(found):,} tensors differ.")
    if different:
        raise typer.Exit(1)


def _diff_cells(row: Difference) -> tuple[str, str, str, str]:
    if row.where != "both":
        return f"only in {row.where.upper()}", "", "", ""
    if row.shapes[0] != row.shapes[1]:
        shapes = ("x".join(map(str, shape or ())) or "scalar" for shape in row.shapes)
        return " and ".join(shapes), "", "", ""
    scales = "-" if row.scales is None else f"{row.scales[0]:,} of {row.scales[1]:,}"
    codes = "-" if row.codes is None else f"{row.codes[0]:,} of {row.codes[1]:,}"
    mark = "*" if row.number_differs else ""
    return scales + mark, codes, f"{row.sqnr_db:.2f}", f"{row.max_difference:.6g}"


# identify ----------------------------------------------------------------------------------------


@app.command()
def identify(
    original: Annotated[Path, typer.Argument(help="The checkpoint before quantization.")],
    quantized: Annotated[Path, typer.Argument(help="The quantized checkpoint.")],
    pattern: Annotated[str, typer.Argument(help="Which tensors, such as '*.weight'.")] = "*",
) -> None:
    """Find the library that made a checkpoint's bits.

    Every dialect quantizes the original weights, tensor by tensor; the table ranks them by the
    share of scale bytes and codes that come out equal. Exit code 1 where none gives every bit.
    """
    from fpemu import checkpoints
    from fpemu.identification import Match, identify_all

    with _one_line_errors():
        before, after = checkpoints.open(original), checkpoints.open(quantized)
        names = [
            name
            for name, entry in after.items()
            if entry.layout is not None and name in before and fnmatchcase(name, pattern)
        ]
        if not names:
            raise ValueError(
                f"identify: {str(quantized)!r} has no quantized tensor of a name in"
                f" {str(original)!r} that matches {pattern!r}. Give the original of the same model."
            )
        with _progress("tensors", len(names)) as show:

            def done(matches: Sequence[Match]) -> None:
                show(matches[0].name, 1)

            pairs = ((before[name].values(), after[name].encoded()) for name in names)
            found = identify_all(pairs, progress=done)
        typer.echo(str(found))
    if not found.exact:
        raise typer.Exit(1)


# verify ------------------------------------------------------------------------------------------


@app.command()
def verify(
    pattern: Annotated[
        str, typer.Argument(help="Which formats or instructions, such as 'nvfp4*'.")
    ] = "*",
    only: Annotated[
        str, typer.Option(help="One part: casts, quantize, gemm, or cpu (needs no GPU).")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer inputs: half a minute.")] = False,
    full: Annotated[bool, typer.Option("--full", help="All 2^32 float32 patterns.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(help="The record. Default: results/hardware/<gpu>-<date>.json."),
    ] = None,
    values: Annotated[int, typer.Option(min=64, help="Values per format, for cpu.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random values.")] = 0,
) -> None:
    """Run the emulator and this GPU on the same inputs; count the bits that differ.

    Every cast instruction that the GPU has, the Triton kernels, single matrix instructions and the
    products of PyTorch, all beside the emulator; what TransformerEngine and FlashInfer compute,
    where they are installed. Writes a record. Exit code 0 where all is equal that fpemu claims, 1
    where it is not, 3 where there is no GPU: then it lists what it would run.

    --only cpu checks this machine's CPU kernels against exact arithmetic.
    """
    with _one_line_errors():
        if only not in ("", "cpu", "casts", "quantize", "gemm"):
            raise ValueError(
                f"verify: --only is {only!r}; casts, quantize, gemm and cpu are allowed. Leave it"
                " out for all that needs a GPU."
            )
        if quick and full:
            raise ValueError("verify: --quick and --full are both given; choose one.")
    if only == "cpu":
        _verify_cpu(pattern, values, seed)
    else:
        _verify_gpu(pattern, only, "quick" if quick else "full" if full else "default", json, seed)


def _verify_cpu(pattern: str, values: int, seed: int) -> None:
    """Hard values by every rounding with the CPU's backends, against the oracle's rationals."""
    from fpemu.selfcheck import BACKENDS, check

    with _one_line_errors():
        title = "Results that differ in any bit"
        table = _table(title, "format")
        for column in ("compared", *BACKENDS):
            table.add_column(column, justify="right")
        missing: dict[str, str] = {}
        wrong, checked = 0, set[str]()
        with _spinner() as show:
            for result in check(pattern, values, seed):
                show(result.name)
                missing |= result.missing
                wrong += sum(result.differing.values())
                checked |= result.differing.keys()
                counts = (result.differing.get(backend) for backend in BACKENDS)
                table.add_row(
                    result.name,
                    f"{result.compared:,}",
                    *("-" if n is None else f"[red]{n:,}[/]" if n else "0" for n in counts),
                )
        _print(table)
    for backend, why in missing.items():
        typer.echo(f"{backend}: not checked: {why}")
    if wrong:
        typer.echo(f"FAILED: {wrong:,} results differ on this machine; please report it.")
        raise typer.Exit(1)
    if not checked:
        typer.echo("FAILED: no backend could be checked.")
        raise typer.Exit(1)
    names = " and ".join(sorted(checked))
    typer.echo(f"Bits equal to exact arithmetic: {names}. No hardware was involved.")


def _verify_gpu(pattern: str, only: str, budget: str, record: Path | None, seed: int) -> None:
    from fpemu.hw import device, verify

    parts = (only,) if only else verify.PARTS
    with _one_line_errors():
        gpu = device.gpu()
        if gpu is None or gpu.triton is None:
            why = "Triton is not installed. Install triton."
            why = why if gpu is not None else device.why_none() or why
            _list_plan(list(verify.plan(parts, pattern)), pattern, why)
            raise typer.Exit(3)
        report = verify.Report(gpu, parts, verify.BUDGETS[budget], pattern, seed)
        path = record or report.default_path()
        typer.echo(f"{gpu}: driver {gpu.driver}, CUDA {gpu.cuda}, cuBLAS {gpu.cublas},")
        typer.echo(f"PyTorch {gpu.torch}, Triton {gpu.triton}")
        typer.echo(verify.HEADING)
        with _spinner() as show:
            session = verify.Session(gpu, show=show)
            for row in verify.verify(session, parts, report.budget, pattern, seed):
                if not report.rows or report.rows[-1].path != row.path:
                    typer.echo(row.path)
                report.rows.append(row)
                report.write(path)  # what there is, should the rest be cut short
                for line in verify.lines(row):
                    typer.echo(line)
        if not report.rows:
            raise ValueError(f"verify: nothing of {gpu} matches {pattern!r}; try '*'.")
        report.complete = True
        report.write(path)
    compared = report.compared
    inputs = sum(row.inputs for row in compared)
    typer.echo(f"{len(compared)} rows and {inputs:,} results compared; record: {path}")
    loose = sum(row.different > 0 for row in compared if not row.must)
    if loose:
        typer.echo(f"{loose} rows of other libraries differ from their models: see above.")
    if report.bad:
        typer.echo(f"FAILED: {len(report.bad)} rows that must be equal are not:")
        for row in report.bad:
            typer.echo(f"  {row.path}: {row.name}")
        raise typer.Exit(1)
    if not any(row.must for row in compared):
        typer.echo("FAILED: nothing that must be equal could be compared.")
        raise typer.Exit(1)
    typer.echo("Equal, bit for bit: all that fpemu claims.")


def _list_plan(plan: list[str], pattern: str, why: str) -> None:
    """What a GPU would be asked, and why none is."""
    if not any(line.startswith(" ") for line in plan):
        raise ValueError(f"verify: nothing matches {pattern!r}; try '*'.")
    typer.echo("With a GPU this would be compared with the emulator, bit for bit:")
    for line in plan:
        typer.echo(line)
    typer.echo(f"Nothing was run: {why}")
    typer.echo("The CPU's kernels can be checked here: fpemu verify --only cpu")


# report ------------------------------------------------------------------------------------------


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A file of fpemu.Monitor, or the folder it is in.")],
    out: Annotated[
        Path | None, typer.Option(help="The page to write. Default: the run's name with .html.")
    ] = None,
    fmt: Annotated[
        str | None, typer.Option("--format", "-f", help="Default: the last format of the run.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Which rank's file of a distributed run.")] = 0,
    top: Annotated[int, typer.Option(min=1, help="How many of the worst tensors to list.")] = 12,
) -> None:
    """Draw a monitored run: heat maps and the worst layers.

    Writes one HTML page that needs no other file, and the heat maps as PNG beside it.
    """
    from fpemu import report as drawing

    with _one_line_errors():
        found = drawing.load(run, rank)
        fmt = drawing.chosen_format(found, fmt)
        page = out if out is not None else found.path.with_suffix(".html")
        with _spinner() as show:
            show("drawing")
            written = drawing.write(found, page, fmt, top)
        table = _table(f"Worst tensors in {fmt}, by their worst step", *drawing.SHORT_COLUMNS)
        for column in table.columns[2:]:
            column.justify = "right"
        for record in drawing.worst(found, fmt, top):
            table.add_row(*drawing.short_row(record, fmt))
        _print(table)
    for path in written:
        typer.echo(path)


# Printing ----------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 1, 0, 0)
    for i, column in enumerate(columns):
        # A name that does not fit is folded, never cut: it must be possible to copy it.
        table.add_column(column, no_wrap=False, overflow="fold", style="cyan" if i == 0 else None)
    return table


def _print(*tables: Table) -> None:
    """To the terminal's width; into a pipe or file as wide as the tables are."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(80, *(_width(console, t) for t in tables)))
    for i, table in enumerate(tables):
        if i:
            console.print()
        console.print(table)


def _width(console: Any, table: Table) -> int:
    from rich.measure import Measurement

    wide = console.options.update(width=10_000)
    return Measurement.get(console, wide, table).maximum


@contextmanager
def _spinner() -> Iterator[Callable[[str], None]]:
    """What is being worked on, on stderr, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("") as status:
        yield status.update


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar of bytes on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(what, total=total)

        def advance(name: str, size: int) -> None:
            bar.update(task, advance=size)

        yield advance


def _write_lines(lines: Iterator[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
