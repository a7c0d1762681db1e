"""Errors of the device while a model is split: they say nothing about the model, and come through as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_coefsfl.methods.parts import auxiliary
from hf_coefsfl.methods.parts.auxiliary import AuxiliaryNetwork
from hf_coefsfl.split import ServerHalf, exactness, split_model
from tests.support.models import MODELS

ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: unknown"), KeyboardInterrupt()]


def raising(error: BaseException, when: Callable[..., bool]) -> Callable[..., Any]:
    """Return a hook that raises an error in some calls of a module."""

    def hook(module: Any, *_: Any) -> None:
        if when(module):
            raise error

    return hook


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("training", [False, True])
def test_of_the_unsplit_model(error: BaseException, training: bool) -> None:
    model = MODELS["bert"].make()
    model.register_forward_pre_hook(raising(error, lambda module: module.training is training))
    with pytest.raises(type(error)) as raised:
        split_model(model, 2)
    assert raised.value is error


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_of_a_half(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ServerHalf, "forward", forward)
    with pytest.raises(type(error)) as raised:
        split_model(MODELS["bert"].make(), 2)
    assert raised.value is error


def test_of_the_check_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    error, run = ERRORS[0], exactness._run_unsplit

    def full_in_training(split: Any, inputs: Any) -> Any:
        if split.model.training:
            raise error
        return run(split, inputs)

    monkeypatch.setattr(exactness, "_run_unsplit", full_in_training)
    with pytest.raises(torch.OutOfMemoryError):
        split_model(MODELS["bert"].make(), 2)


def test_of_an_auxiliary_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(*_: Any) -> None:
        raise ERRORS[0]

    monkeypatch.setattr(auxiliary, "_used_parameters", used)
    with pytest.raises(torch.OutOfMemoryError):
        AuxiliaryNetwork(split_model(MODELS["bert"].make(), 2), 1)


def test_the_check_needs_no_dtype_that_a_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On MPS there is no float64."""

    def no_double(t: torch.Tensor) -> None:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    monkeypatch.setattr(torch.Tensor, "double", no_double)
    monkeypatch.setattr(exactness, "widest_float", lambda device: torch.float32)
    assert {part.dtype for part in exactness._sketch(torch.ones(3, 4))} == {torch.float32}
    split_model(MODELS["bert"].make(), 2)
    exact, apart = {"logits": torch.ones(2)}, {"logits": torch.tensor([1.0, 1.5])}
    assert exactness._output_gap(exact, apart) == 0.5
