"""Compile a Triton kernel for a GPU that is not there, and read what the assembler made of it.

Triton carries `ptxas` and `nvdisasm`, so a kernel becomes PTX, a cubin and SASS on any machine.
Every kernel of fpemu is compiled with ``enable_fp_fusion=False``: a product that must round is
never contracted into an FMA.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fpemu.errors import BackendError, unknown

#: Name of a target -> compute capability, as Triton counts it.
TARGETS = {"sm_90": 90, "sm_100a": 100}


class Assembly(NamedTuple):
    """One kernel, compiled for one target."""

    name: str
    ptx: str
    cubin: bytes


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any] | None = None,
    *,
    target: str = "sm_90",
    aligned: Iterable[str] = (),
    num_warps: int = 4,
    **options: Any,
) -> Assembly:
    """Compile a ``@triton.jit`` function without a GPU.

    Parameters
    ----------
    kernel : triton.JITFunction
    signature : mapping of str to str
        Type of each argument that is not a constant: ``{"x_ptr": "*fp32", "n": "i64"}``.
    constants : mapping of str to value, optional
        Values of the ``tl.constexpr`` arguments.
    target : {"sm_90", "sm_100a"}
    aligned : iterable of str
        Arguments that are multiples of 16 (pointers in bytes), as a launch would find out.
    num_warps, **options
        Triton's compile options. `enable_fp_fusion` is always off.

    Returns
    -------
    Assembly

    Raises
    ------
    BackendError
        Where the kernels were imported to be interpreted (``TRITON_INTERPRET=1``).

    Examples
    --------
    >>> from fpemu.backends.triton_build import TARGETS
    >>> TARGETS["sm_90"]
    90
    """
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise unknown("compile_kernel", "target", target, TARGETS)
    constants = dict(constants or {})
    names = getattr(kernel, "arg_names", None)
    if names is None or not hasattr(kernel, "cache_key"):
        raise BackendError(
            "compile_kernel: the kernel is interpreted and cannot be compiled; TRITON_INTERPRET was"
            " set when it was imported. Unset it."
        )
    source = ASTSource(
        fn=kernel,
        signature={n: signature.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    compiled = triton_compile(
        source,
        target=GPUTarget("cuda", TARGETS[target], 32),
        options={"num_warps": num_warps, **options, "enable_fp_fusion": False},
    )
    return Assembly(source.name, compiled.asm["ptx"], compiled.asm["cubin"])


def compile_launch(
    kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any], *, target: str = "sm_90",
    num_warps: int = 4, **options: Any,
) -> Assembly:  # fmt: skip
    """Compile what a launch with these arguments would compile: same types, same specialisation.

    Parameters
    ----------
    kernel : triton.JITFunction
    arguments : sequence
        Tensors of any device, integers and floats, in the order of the kernel's parameters.
    constants : mapping of str to value
        The ``tl.constexpr`` parameters.
    target, num_warps, **options
        As in `compile_kernel`.
    """
    plain = {p.name for p in kernel.params if p.do_not_specialize}
    signature, known, aligned = {}, dict(constants), []
    for name, value in zip(kernel.arg_names, arguments, strict=False):
        if hasattr(value, "data_ptr"):
            signature[name] = "*" + _POINTED[str(value.dtype).removeprefix("torch.")]
            number = value.data_ptr()
        elif isinstance(value, float):
            signature[name], number = "fp32", 1
        else:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            number = value
            if value == 1 and name not in plain:
                del signature[name]
                known[name] = 1
        if name in signature and name not in plain and number % 16 == 0:
            aligned.append(name)
    return compile_kernel(
        kernel, signature, known, target=target, aligned=aligned, num_warps=num_warps, **options
    )


#: Triton's name of what a tensor's pointer points to.
_POINTED = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1",
    **{f"{u}int{n}": f"{'u' if u else 'i'}{n}" for u in ("", "u") for n in (8, 16, 32, 64)},
}  # fmt: skip


# Reading -----------------------------------------------------------------------------------------

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_GUARD = re.compile(r"^@!?%?\w+\s+")


def ptx_lines(ptx: str) -> list[str]:
    """The instructions of a PTX text, operands included; comments, labels, directives stripped.

    Examples
    --------
    >>> ptx_lines(".loc 1 2 3 // nothing\\nL1:\\n@%p1 add.s32 %r1, %r2, 1; // more")
    ['add.s32 %r1, %r2, 1']
    """
    found = []
    for line in _COMMENT.sub("", ptx).splitlines():
        for statement in line.split(";"):
            text = _GUARD.sub("", statement.strip().lstrip("{ \t"))  # a scope may open here
            if text and re.match(r"[a-z]", text) and not text.endswith(":"):
                found.append(" ".join(text.split()))
    return found


def ptx_opcodes(ptx: str) -> Counter[str]:
    """How often each opcode, modifiers included, stands in a PTX text.

    Examples
    --------
    >>> ptx_opcodes("fma.rn.ftz.f32 %f1, %f2, %f3, %f4;")
    Counter({'fma.rn.ftz.f32': 1})
    """
    return Counter(line.split()[0] for line in ptx_lines(ptx))


def _tool(name: str) -> Path | None:
    from triton import backends

    path = Path(backends.__file__).parent / "nvidia" / "bin" / name
    return path if path.exists() else None


@lru_cache(maxsize=64)
def _run(tool: str, *arguments: str, cubin: bytes) -> str | None:
    path = _tool(tool)
    if path is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(path), *arguments, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout


def sass_lines(cubin: bytes) -> list[str] | None:
    """The instructions of a cubin in address order, or None without `nvdisasm`."""
    text = _run("nvdisasm", "-c", cubin=cubin)
    if text is None:
        return None
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", text)
    return [" ".join(line.split()) for line in found]


def sass_opcodes(cubin: bytes) -> Counter[str] | None:
    """How often each SASS opcode stands in a cubin, or None without `nvdisasm`.

    The endless branch and the NOPs that pad a kernel are not counted.
    """
    lines = sass_lines(cubin)
    if lines is None:
        return None
    words = [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in lines]
    while words and (words[-1] == "NOP" or words[-1] == "BRA"):
        words.pop()
    return Counter(words)


def resources(cubin: bytes) -> dict[str, int] | None:
    """Registers (REG), spilled bytes (STACK, LOCAL) and shared memory (SHARED) of a cubin."""
    text = _run("cuobjdump", "-res-usage", cubin=cubin)
    if text is None:
        return None
    return {
        name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)
    }
