"""Devices that this machine does not have: what differs there, and which errors are the device's own."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.devices import is_device_error, widest_float
from hf_coefsfl.protocol.messages import Feedback
from hf_coefsfl.protocol.seeds import preserved_random_state, set_random_state

MPS, SECOND_GPU = torch.device("mps"), torch.device("cuda:1")


class FakeModule:
    """What `torch.mps` or `torch.cuda` offers for random numbers; notes what is called."""

    def __init__(self, *seeding: str):
        self.calls: list[tuple[Any, ...]] = []
        for name in seeding:
            setattr(self, name, lambda seed, name=name: self.calls.append((name, seed)))

    def get_rng_state(self, device: torch.device) -> str:
        self.calls.append(("get", device))
        return "state"

    def set_rng_state(self, state: str, device: torch.device) -> None:
        self.calls.append(("set", device))

    def device_count(self) -> int:
        return 2


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeModule]:
    found = {"mps": FakeModule("manual_seed"), "cuda": FakeModule("manual_seed", "manual_seed_all")}
    usual = torch.get_device_module

    def module_of(device: Any = None) -> Any:
        return found.get(torch.device(device or "cuda").type) or usual(device)

    monkeypatch.setattr(torch, "get_device_module", module_of)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    return found


def test_each_accelerator_is_seeded_by_what_it_has(modules: dict[str, FakeModule]) -> None:
    set_random_state(5, MPS)
    set_random_state(6, SECOND_GPU)
    assert modules["mps"].calls == [("manual_seed", 5)] and modules["cuda"].calls == [("manual_seed_all", 6)]


def test_a_run_on_the_cpu_leaves_accelerators_alone(modules: dict[str, FakeModule]) -> None:
    context = RoundContext(seed=0, round_index=0, client=0)
    with preserved_random_state(context.device):
        context.synchronize_masks(torch.nn.Dropout(), "client_forward", 0)
        masked = torch.rand(3)
        context.synchronize_masks(torch.nn.Dropout(), "client_forward", 0)
        assert torch.equal(torch.rand(3), masked)
    assert not modules["mps"].calls and not modules["cuda"].calls


def test_only_the_device_in_use_is_preserved(modules: dict[str, FakeModule], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.random, "_fork_rng_warned_already", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in (SECOND_GPU, MPS, torch.device("cpu")):
            with preserved_random_state(device):
                pass
    assert modules["cuda"].calls == [("get", SECOND_GPU), ("set", SECOND_GPU)]
    assert modules["mps"].calls == [("get", MPS), ("set", MPS)]


def test_the_cpu_is_preserved_whatever_the_device() -> None:
    for device in ("cpu", "meta"):
        before = torch.get_rng_state()
        with preserved_random_state(torch.device(device)):
            torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before)


def test_the_widest_dtype() -> None:
    assert widest_float(MPS) == torch.float32
    assert widest_float(torch.device("cpu")) == widest_float(SECOND_GPU) == torch.float64


def test_only_copies_to_the_cpu_are_awaited() -> None:
    asked: list[tuple[Any, bool]] = []
    tensor: Any = SimpleNamespace(to=lambda device, non_blocking: asked.append((device, non_blocking)))
    for device in ("cpu", torch.device("cpu"), SECOND_GPU, "mps"):
        Feedback(tensor).to(device)
    assert asked == [("cpu", False), (torch.device("cpu"), False), (SECOND_GPU, True), ("mps", True)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), False),
        (ValueError("the data says: out of memory"), False),
    ],
)
def test_errors_of_the_device(error: Exception, expected: bool) -> None:
    assert is_device_error(error) is expected
