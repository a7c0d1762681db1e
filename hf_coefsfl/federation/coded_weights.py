"""Federated weights of a round on the server, if `adapter_codec` sends them in fewer bytes than they have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..protocol.adapters import AdapterCodec
from ..protocol.messages import Parameters

ADAPTERS, AUXILIARY = "adapters", "auxiliary"  # fields of `Parameters`
Residual = dict[str, Tensor]  # of one client: what encoding has taken from its updates, by field
PREFIX = "residual."  # of residuals in a checkpoint


class CodedWeights:
    """The weights that all clients of a round begin with, and what the server makes of what they send back.

    Args:
        codec: the name of the codec.
        adapters: the trained weights of the clients' side.
        auxiliary: those that the method federates beside them.
    """

    def __init__(self, codec: str, adapters: Mapping[str, Tensor], auxiliary: Mapping[str, Tensor]):
        self.weights = {ADAPTERS: adapters, AUXILIARY: auxiliary}
        self.codecs = {part: AdapterCodec(codec, weights) for part, weights in self.weights.items()}
        self.initial = {part: found.flat(self.weights[part]) for part, found in self.codecs.items()}
        self.sent = Parameters(*(found.encode(self.initial[part]) for part, found in self.codecs.items()))

    @torch.no_grad()
    def begin(self) -> None:
        """Give the weights the values that clients begin with."""
        for part, codec in self.codecs.items():
            for name, value in codec.named(codec.decode(getattr(self.sent, part))).items():
                self.weights[part][name].copy_(value)

    def received(self, part: str, coded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that a client's encoded update stands for, which must be finite, on its device."""
        update = self.codecs[part].decode(coded)
        flat = self.initial[part].to(update.device) + update
        if not bool(flat.isfinite().all()):
            raise ValueError(f"the {part} that a client sent hold NaN or infinity")
        return self.codecs[part].named(flat)

    def passed(
        self, part: str, trained: Mapping[str, Tensor], residual: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return what arrives here of a simulated client's weights, and the client's next residual."""
        device = self.initial[part].device
        here = {name: t.to(device) for name, t in trained.items()}
        before = None if residual is None else residual.to(device)
        coded, after = self.codecs[part].encode_update(getattr(self.sent, part), here, before)
        return self.received(part, coded), after


def to_state(residuals: Mapping[int, Residual]) -> dict[str, Tensor]:
    """Return residuals by client as named tensors."""
    return {f"{PREFIX}{client}.{part}": t for client, found in residuals.items() for part, t in found.items()}


def from_state(state: Mapping[str, Tensor]) -> dict[int, Residual]:
    """Return what `to_state` was given, on the CPU; other tensors of the state are passed over."""
    residuals: dict[int, Residual] = {}
    for name, t in state.items():
        if name.startswith(PREFIX):
            client, _, part = name.removeprefix(PREFIX).partition(".")
            residuals.setdefault(int(client), {})[part] = t.cpu()
    return residuals
