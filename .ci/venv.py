"""Set up the virtual environment of the Makefile and print its path; on stderr, say what is being done.

Python rather than shell: its lock is there on every Unix, ends with the process that held it however that died, and
pyproject.toml can be read properly. The environment lies outside the clone, under a name made of what is installed in
it, so that every clone with the same requirements shares it. A stamp written last marks it as complete.

What only some tests want beside the rest lies in the environment's folder beside/, for their PYTHONPATH.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(
        f"error: the versions in constraints.txt need Python 3.11 or newer, {sys.executable} is "
        f"{platform.python_version()}: make PYTHON=python3.11 ..."
    )
import tomllib

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
BESIDE = ["torchao"]  # it makes every start a second slower: `make test-torchao` alone has it


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def requirements() -> list[str]:
    """What the package and all its extras need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return sorted({*project["dependencies"], *(r for e in project["optional-dependencies"].values() for r in e)})


def usable(venv: Path) -> bool:
    """Complete, and the Python it was made from is still there."""
    return (venv / ".complete").exists() and subprocess.run([venv / "bin/python", "-c", ""]).returncode == 0


def pip(venv: Path, arguments: list[str | Path], lock_fd: int) -> None:
    command = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS]
    process = subprocess.Popen(
        [*command, *arguments], stderr=subprocess.PIPE, stdout=sys.stderr, text=True, pass_fds=[lock_fd]
    )
    assert process.stderr is not None
    for line in process.stderr:
        if not line.startswith("WARNING: Location "):  # a local index without the package: pip looks on
            say(line.rstrip())
    if process.wait():
        sys.exit(f"error: pip could not install the versions of constraints.txt into {venv}")


def install(venv: Path, wanted: list[str], lock_fd: int) -> None:
    start = time.time()
    if venv.exists():
        say(f"removing the unfinished {venv}")
        shutil.rmtree(venv)
    say(f"setting up {venv} (once; 2 to 5 minutes, about 6 GB)")
    # Passing the lock on: a pip that outlives this process holds it until it ends.
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, pass_fds=[lock_fd])
    pip(venv, wanted, lock_fd)
    pip(venv, ["--no-deps", "--target", venv / "beside", *BESIDE], lock_fd)
    (venv / ".complete").touch()
    say(f"set up {venv} in {time.time() - start:.0f} s")


def main() -> None:
    wanted = requirements()
    content = "\n".join([sys.version, platform.machine(), CONSTRAINTS.read_text(), *wanted, *BESIDE])
    folder = Path(os.environ.get("HF_COEFSFL_VENVS") or "~/.cache/hf_coefsfl").expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    venv = folder / f"venv-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    if not usable(venv):
        with open(f"{venv}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another run that sets up {venv}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not usable(venv):
                install(venv, wanted, lock.fileno())
    print(venv)


main()
