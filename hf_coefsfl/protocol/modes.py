"""Running modules in evaluation or training mode for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules in evaluation mode and each of their submodules back afterwards."""
    with _modes(modules, lambda m: False):
        yield


@contextmanager
def training(*modules: nn.Module) -> Iterator[None]:
    """The same for training mode, but for layers that would then change their running statistics."""
    with _modes(modules, lambda m: getattr(m, "running_mean", None) is None):
        yield


@contextmanager
def _modes(modules: tuple[nn.Module, ...], mode: Callable[[nn.Module], bool]) -> Iterator[None]:
    flags = [(m, m.training) for module in modules for m in module.modules()]
    for m, _ in flags:
        _set(m, mode(m))
    try:
        yield
    finally:
        for m, training in flags:
            _set(m, training)


def _set(module: nn.Module, training: bool) -> None:
    if module.training is not training:  # to assign takes longer than to look
        module.training = training
