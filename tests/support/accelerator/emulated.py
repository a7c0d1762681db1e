"""The module `torch.emulated`, as `torch.cuda` is one: importing it registers the device in this process."""

from __future__ import annotations

import importlib.util
import sys
from types import TracebackType
from typing import Any

import torch

from tests.support.accelerator import NAME, compiled

_spec = importlib.util.spec_from_file_location(NAME, compiled())
assert _spec is not None and _spec.loader is not None
device_code: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(device_code)

_initialized = True  # else torch.utils.checkpoint leaves the device's random state alone
device_count, current_device = device_code.device_count, device_code.current_device


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def _index(place: Any) -> int:
    index = place if isinstance(place, int) else None if place is None else torch.device(place).index
    return current_device() if index is None else index


def set_device(place: Any) -> None:
    device_code.set_device(_index(place))


def synchronize(place: Any = None) -> None:
    device_code.synchronize()


def empty_cache() -> None:
    pass


def memory_allocated(place: Any = None) -> int:
    return int(device_code.live_bytes(_index(place)))


def max_memory_allocated(place: Any = None) -> int:
    return int(device_code.peak_bytes(_index(place)))


def reset_peak_memory_stats(place: Any = None) -> None:
    device_code.reset_peak(_index(place))


def get_rng_state(place: Any = None) -> torch.Tensor:
    return device_code.default_generator(_index(place)).get_state()


def set_rng_state(state: torch.Tensor, place: Any = None) -> None:
    device_code.default_generator(_index(place)).set_state(state)


def manual_seed(seed: int) -> None:
    device_code.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        device_code.default_generator(index).manual_seed(seed)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


class device:  # its name in torch.cuda
    """The context of another current device."""

    def __init__(self, place: Any):
        self.inside = _index(place)

    def __enter__(self) -> None:
        self.outside = current_device()
        device_code.set_device(self.inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        device_code.set_device(self.outside)


torch.utils.rename_privateuse1_backend("emulated")
torch._register_device_module("emulated", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
