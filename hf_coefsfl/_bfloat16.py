"""Whether this CPU can multiply bfloat16 matrices.

Some virtual machines announce AMX instructions but do not grant them. There the first bfloat16 product of PyTorch kills
the process with an illegal instruction, which Python cannot catch. So a child process tries one product first, and its
answer is kept in the user's cache folder. This module loads no PyTorch: `ONEDNN_MAX_CPU_ISA` has to be set before that.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from ._io import write_atomically

VARIABLE, REMEDY = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
_OLD_VARIABLE = "DNNL_MAX_CPU_ISA"  # which oneDNN reads as well
CHILD = """
import torch
layer = torch.nn.Linear(64, 64).bfloat16()
layer(torch.ones(32, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
"""
_TIME_LIMIT = 600  # seconds: PyTorch may be loaded from a slow disk on a busy machine
_SIGILL = "a child process that tried one was killed by SIGILL"


def check_bfloat16(request: str) -> None:
    """Refuse a `request`, such as bf16=True, that this CPU cannot serve."""
    problem = bfloat16_problem()
    if problem:
        raise ValueError(
            f"{request} needs bfloat16 products, which this CPU cannot run: {problem} ({VARIABLE} is "
            f"{os.environ.get(VARIABLE, 'not set')}). Set {VARIABLE}={REMEDY} in the environment before Python starts, "
            "or train in float32."
        )


def bfloat16_problem() -> str:
    """Return why a bfloat16 product fails on this CPU; "" if it works."""
    return _try_product(_machine())


def remembered_problem() -> str | None:
    """Return the answer of an earlier `bfloat16_problem`, or None if there is none. Nothing is tried."""
    with suppress(OSError):
        return _answer_file(_machine()).read_text()
    return None


def _machine() -> str:
    """Return all that the answer depends on."""
    facts = [*platform.uname(), version("torch"), *(os.environ.get(n, "") for n in (VARIABLE, _OLD_VARIABLE))]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return "\n".join(facts)


def _answer_file(machine: str) -> Path:
    name = f"bfloat16-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.txt"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hf_coefsfl" / name


@functools.cache
def _try_product(machine: str) -> str:
    answer = _answer_file(machine)
    with suppress(OSError):
        return answer.read_text()
    command = [sys.executable, "-c", CHILD]
    try:
        child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return f"a child process that tried one did not end within {_TIME_LIMIT} seconds"
    problem = _SIGILL if child.returncode == -signal.SIGILL else ""
    if child.returncode and not problem:  # perhaps for a reason that passes, such as memory: not to be remembered
        last_line = (child.stderr.strip() or "no message").splitlines()[-1]
        return f"a child process that tried one ended with status {child.returncode} ({last_line})"
    with suppress(OSError):
        answer.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(answer, problem)
    return problem
