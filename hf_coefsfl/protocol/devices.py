"""What differs between devices, and which errors are the device's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CPU_LIKE = ("cpu", "meta")
MOST_INPUTS = 2**28  # bytes of a client's inputs that are pinned, and that stay on an accelerator for the round
_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError)
# What devices without an error class of their own say, and PyTorch's allocator of the main memory.
_DEVICE_WORDS = ("out of memory", "can't allocate memory", "CUDA error", "HIP error", "XPU error")


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has a queue and random numbers of its own."""
    return device.type not in _CPU_LIKE


def pins_memory(device: torch.device) -> bool:
    """Return whether a device reads pinned memory of the host. MPS shares its memory, and pinning failed there."""
    return is_accelerator(device) and device.type != "mps"


def to_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host without waiting, but on MPS: there it could be freed before it is read."""
    return t.to(device, non_blocking=device.type != "mps")


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors on the host. Those of an accelerator come in one copy, so that it is waited for once."""
    away = [t.detach().reshape(-1).view(torch.uint8) for t in tensors if is_accelerator(t.device)]
    arrived = iter(torch.cat(away).cpu().split([t.numel() for t in away]) if away else ())
    # Cloned, because whoever pickles a part would send them all.
    return [next(arrived).clone().view(t.dtype).view(t.shape) if is_accelerator(t.device) else t for t in tensors]


def widest_float(device: torch.device) -> torch.dtype:
    """Return the most precise floating-point dtype that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_device_error(error: BaseException) -> bool:
    """Return whether an error says that the device is full or broken, and so nothing about what was computed."""
    if type(error) is RuntimeError:  # not of a class whose words may be a client's
        return any(words in str(error) for words in _DEVICE_WORDS)
    return isinstance(error, _DEVICE_ERRORS)
