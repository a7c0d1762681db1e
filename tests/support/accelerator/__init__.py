"""An emulated accelerator, compiled from `device.cpp`: device code that runs and is checked on a machine without one.

A device is registered for the whole process and for good. The tests therefore only start processes: nothing but a
process of `process.py` imports `emulated`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "emulated_device"


def unavailable() -> str | None:
    """Say why the device cannot be compiled here; None: it can, or is already."""
    if library().exists():
        return None
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "the emulated accelerator needs a C++ compiler"
    if shutil.which("ninja") is None:
        return "the emulated accelerator needs ninja"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the emulated accelerator needs the headers of Python"
    return None


def library() -> Path:
    """Return where the compiled device is, beside the environments of the Makefile, or will be."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("HF_COEFSFL_VENVS") or "~/.cache/hf_coefsfl").expanduser().absolute()
    return cache / f"accelerator-{key}" / f"{NAME}.so"


def compiled() -> Path:
    """Return the compiled device; the first process compiles it, in about a minute, and others wait."""
    found = library()
    found.parent.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{found.parent}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            from torch.utils import cpp_extension

            shutil.rmtree(found.parent, ignore_errors=True)  # of a process that died: its lock would be waited for
            found.parent.mkdir()
            flags = ["-O1", "-g0", "-std=c++20"]
            cpp_extension.load(NAME, [str(SOURCE)], build_directory=str(found.parent), extra_cflags=flags)
    return found
