"""`coefsfl env`: versions, devices and settings of this machine, for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from .. import __version__
from .._bfloat16 import remembered_problem

EPILOG = """\
example:
  coefsfl env >> issue.md
"""
PACKAGES = (
    "torch", "torchvision", "transformers", "peft", "accelerate", "datasets", "evaluate", "timm", "safetensors",
    "huggingface_hub", "numpy", "bitsandbytes", "flwr",
)  # fmt: skip
# Settings that change what a run does, by the start of their names. Values of tokens are never shown.
_PREFIXES = ("ACCELERATE_", "CUDA_", "DNNL_", "HF_", "HIP_", "MKL_", "NCCL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_",
             "TRANSFORMERS_", "TOKENIZERS_", "WORLD_SIZE", "LOCAL_RANK")  # fmt: skip
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
SHOWS_ALL = True  # PyTorch keeps its threads, which are told here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no options."""


def run(arguments: argparse.Namespace) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {name}: {value}" for name, value in facts())


def facts() -> Iterator[tuple[str, str]]:
    """Yield what a bug report should tell, as pairs of name and value."""
    yield "hf_coefsfl", __version__
    yield "Python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    yield "platform", platform.platform()
    yield "CPU", f"{_cpu()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in PyTorch"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"
    yield "devices", ", ".join(_devices()) or "none besides the CPU"
    yield "bfloat16 on the CPU", _bfloat16()
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _is_shown(name)]
    yield "environment", ", ".join(f"`{setting}`" for setting in settings) or "nothing that matters is set"


def _is_shown(name: str) -> bool:
    return name.startswith(_PREFIXES) and not any(word in name for word in _SECRET)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _devices() -> Iterator[str]:
    for kind in (torch.cuda, torch.xpu):
        for index in range(kind.device_count()):
            gib = kind.get_device_properties(index).total_memory / 2**30
            yield f"{kind.__name__.rpartition('.')[2]}:{index} {kind.get_device_name(index)} ({gib:.1f} GiB)"
    if torch.backends.mps.is_available():
        yield "mps"


def _bfloat16() -> str:
    problem = remembered_problem()
    if problem is None:
        return "not tried yet"
    return f"fails: {problem}" if problem else "works"
