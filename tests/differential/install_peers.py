"""Sets up the environment of the libraries that fpemu is compared with: `make peers`.

    python tests/differential/install_peers.py [DIR]

Makes a virtual environment in DIR (.venv-peers) and installs each package that the first part of
constraints-peers.txt names, one by one; then it fetches the checkouts. What fails is reported at the
end and stops nothing: the tests of a library that is not there say so and skip. Nothing here becomes
a dependency of fpemu. Needs the standard library alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints-peers.txt"
#: Ends the list of what is asked for; the rest of the file pins what comes along.
REST = "# What they bring along"
#: Sources at the commits that fpemu's dialects name, for what was never released so.
CHECKOUTS = {
    "torchao": ("https://github.com/pytorch/ao", "36027d82d1ad9949597ea16002ff4940374b1b94"),
    "fouroversix": (
        "https://github.com/mit-han-lab/fouroversix",
        "dadfad6901d473a734fe71e0b082e70ee993e23a",
    ),
    "microxcaling": (
        "https://github.com/microsoft/microxcaling",
        "7bc41952de394f5cc5e782baf132e7c7542eb4e4",
    ),
}
#: fouroversix builds CUDA kernels unless told not to, and its build imports torch.
ENVIRONMENT = {"SKIP_CUDA_BUILD": "1"}
OPTIONS = {"fouroversix": ["--no-build-isolation"]}


def asked() -> list[str]:
    """The requirements of the first part: ``name==version``."""
    lines = PINS.read_text(encoding="utf-8").split(REST)[0].splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def attempt(command: list[str], log: Path) -> str:
    """Run a command, its output into `log`; '' or why it failed."""
    with log.open("a", encoding="utf-8") as out:
        print("$", *command, file=out, flush=True)
        try:
            subprocess.run(
                command, check=True, stdout=out, stderr=out, env=os.environ | ENVIRONMENT
            )
        except OSError as error:
            return str(error)
        except subprocess.CalledProcessError as error:
            return f"exit status {error.returncode}"
    return ""


def install(folder: Path, requirement: str, log: Path) -> str:
    name = requirement.split("==")[0]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    return attempt([*pip, "-c", str(PINS), *OPTIONS.get(name, []), requirement], log)


def check_out(folder: Path, name: str, log: Path) -> str:
    """One commit, without history; ``COMMIT`` says which, and is written last."""
    url, commit = CHECKOUTS[name]
    target = folder / "src" / name
    stamp = target / "COMMIT"
    if stamp.exists() and stamp.read_text().strip() == commit:
        return ""
    target.mkdir(parents=True, exist_ok=True)
    git = ["git", "-C", str(target)]
    for command in (
        [*git, "init", "--quiet"],
        [*git, "fetch", "--quiet", "--depth", "1", url, commit],
        [*git, "checkout", "--quiet", "--force", "FETCH_HEAD"],
    ):
        failed = attempt(command, log)
        if failed:
            return failed
    stamp.write_text(commit + "\n")
    return ""


def main(folder: Path) -> int:
    if not (folder / "bin" / "python").exists():
        print(f"Making {folder} ...", flush=True)
        venv.create(folder, with_pip=True)
    log, failures = folder / "install.log", []
    jobs = [(requirement.split(";")[0], install, requirement) for requirement in asked()]
    jobs += [(f"{name} at {CHECKOUTS[name][1][:7]}", check_out, name) for name in CHECKOUTS]
    for title, job, what in jobs:
        print(f"  {title:30}", end=" ", flush=True)
        failed = job(folder, what, log)
        print(failed or "ok", flush=True)
        failures += [title] if failed else []
    if failures:
        print(f"Not there: {', '.join(failures)}. Their tests will skip; why: {log}")
    else:
        (folder / ".peers").touch()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-peers")))
