"""What crosses the cut: the only types a client and a server exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from operator import methodcaller
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

M = TypeVar("M", bound="Message")


@dataclass(frozen=True)
class Message:
    """A frozen dataclass whose fields are tensors or dicts of tensors.

    `kinds` says under which heading of the ledger each field is counted; a field that is not
    named there holds metadata (shapes) and weighs nothing.
    """

    kinds: ClassVar[dict[str, str]] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the message by name; entries of a dict field are `field.key`."""
        tensors: dict[str, Tensor] = {}
        for name in self.kinds:
            value = getattr(self, name)
            if isinstance(value, dict):
                tensors |= {f"{name}.{key}": t for key, t in value.items()}
            elif value is not None:
                tensors[name] = value
        return tensors

    def nbytes(self) -> dict[str, int]:
        """Bytes of the tensors by ledger heading."""
        sizes: dict[str, int] = {}
        for name, t in self.tensors().items():
            kind = self.kinds[name.split(".", 1)[0]]
            sizes[kind] = sizes.get(kind, 0) + t.numel() * t.element_size()
        return sizes

    def map(self: M, function: Callable[[Tensor], Tensor]) -> M:
        """Return the same message with `function` applied to each tensor."""

        def apply(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: function(t) for key, t in value.items()}
            return None if value is None else function(value)

        names = {f.name for f in fields(self)} & self.kinds.keys()
        return replace(self, **{name: apply(getattr(self, name)) for name in names})

    def detach(self: M) -> M:
        """Return what is sent: the same values, off the sender's graph."""
        return self.map(methodcaller("detach"))

    def to(self: M, device: torch.device | str) -> M:
        """Return the message with its tensors on `device`. Copies to the CPU are awaited, before they can be read."""
        awaited = torch.device(device).type == "cpu"
        return self.map(lambda t: t.to(device, non_blocking=not awaited))


@dataclass(frozen=True)
class SmashedData(Message):
    """Uplink: the activations s = f_c(x; θᶜ) at the cut and what else the server half needs.

    `context` holds tensors without raw content that the server cannot rebuild (the padding
    pattern, a position bias); `labels` is what the loss needs; `shapes` are the shapes of the
    raw inputs, from which the server makes its placeholders.
    """

    kinds: ClassVar[dict[str, str]] = {"activations": "smashed_data", "context": "extras", "labels": "extras"}

    activations: Tensor
    context: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Parameters(Message):
    """Either way: named weights, of the client's adapter or of an auxiliary network."""

    kinds: ClassVar[dict[str, str]] = {"adapters": "adapters", "auxiliary": "auxiliary_models"}

    adapters: dict[str, Tensor] = field(default_factory=dict)
    auxiliary: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientResult(Message):
    """Uplink at the end of a round over a network: what the client's round has come to."""

    kinds: ClassVar[dict[str, str]] = {"adapters": "adapters", "kept": "auxiliary_models", "observed": "extras"}

    adapters: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)  # what the method keeps of the client's round
    observed: dict[str, Tensor] = field(default_factory=dict)  # scalars seen during the round


@dataclass(frozen=True)
class Feedback(Message):
    """Downlink: g = ∇ₛL(s; θˢ), and what the method needs to build the curvature B̂."""

    kinds: ClassVar[dict[str, str]] = {"gradient": "gradients", "curvature": "curvature", "scalars": "extras"}

    gradient: Tensor
    curvature: Tensor | None = None
    scalars: Tensor | None = None
