"""Imports go down only, and `import fpemu` is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fpemu"

#: From the bottom up; a module imports from its own layer and below (DESIGN B1).
LAYERS = [
    {"errors"},
    {"formats", "casting", "scaling", "dialects", "blocks", "rng", "packing"},
    {"backends"},
    {"encoded", "files"},
    {
        "ops",
        "torch_op",
        "statistics",
        "comparison",
        "identification",
        "summary",
        "cvt",
        "rotation",
        "rotation_op",
    },
    {"gemm", "hw", "selfcheck", "checkpoints", "labels"},
    {"nn", "recipes", "monitor", "report"},
    {"cli", "__main__", "__init__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = ("torch", "numba", "triton", "matplotlib", "scipy", "rich", "typer", "ml_dtypes")


def _top(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path, everywhere: bool) -> set[str]:
    """Modules imported by a file: everywhere in it, or only when it is loaded."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                names = {f"{child.module}.{alias.name}" for alias in child.names}
                found.update({child.module} if child.module != "fpemu" else names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            if (everywhere or not inside) and not typing_only:
                walk(child)

    walk(ast.parse(path.read_text()))
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    top = _top(path)
    assert top in LEVEL, f"{top} has no layer yet; add it to LAYERS"
    for module in _imports(path, everywhere=False):
        parts = module.split(".")
        if parts[0] == "fpemu" and len(parts) > 1 and parts[1] in LEVEL:
            assert LEVEL[parts[1]] <= LEVEL[top], f"{path.name} imports {module}, a layer above"


def _fpemu_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, those of ``from fpemu.backends import x`` too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            folder = ROOT.joinpath(*node.module.split("."))
            inside = {a.name for a in node.names if (folder / f"{a.name}.py").exists()}
            found |= {f"{node.module}.{name}" for name in inside}
            if len(inside) < len(node.names):
                found.add(node.module)
    return {module for module in found if module.split(".")[0] == "fpemu"}


def test_the_oracle_is_independent() -> None:
    """It shares the format table and the shape of a request with what it checks, nothing else."""
    table = {"fpemu.backends", "fpemu.formats"}
    backends = PACKAGE / "backends"
    dialects = {"fpemu.backends.oracle_dialects"}  # which takes the dialects over
    assert _fpemu_modules(backends / "oracle.py") == table | dialects
    assert _fpemu_modules(backends / "oracle_dialects.py") == table | {"fpemu.backends.oracle"}
    assert _fpemu_modules(ROOT / "tests" / "reference.py") == {"fpemu.formats"}


def test_lower_layers_are_numpy_only() -> None:
    for path in FILES:
        if _top(path) in LAYERS[0] | LAYERS[1]:
            assert not {m.split(".")[0] for m in _imports(path, True)} & set(HEAVY), path


def test_no_module_reads_the_environment_at_import() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        top_level = [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
        source = "\n".join(ast.unparse(n) for n in top_level)
        assert "environ" not in source and "getenv" not in source, path


def _fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    show = f"import sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert _fresh(f"import fpemu; {show}") == "[]"
    assert _fresh(f"import fpemu; fpemu.get_format('nvfp4'); fpemu.list_formats(); {show}") == "[]"


def test_numpy_calls_do_not_load_torch() -> None:
    code = (
        "import sys, numpy as np, fpemu; x = np.ones(4, np.float32);"
        "fpemu.encode(x, 'nvfp4').decode(); fpemu.quantize(x, 'e4m3');"
        "print('torch' in sys.modules)"
    )
    assert _fresh(code) == "False"
