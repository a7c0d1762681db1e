"""AccSFL (Han et al., 2022): the client trains on the loss of an auxiliary head of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..protocol.client_side import ClientSide
from ..protocol.devices import to_host
from ..protocol.link import ClientLink
from ..protocol.loss import LossSpec
from ..protocol.messages import Message
from ..protocol.server_side import ServerSide
from .base import Method, at_least, option
from .parts.auxiliary import HEADS, AuxiliaryHead, check_head_loss

if TYPE_CHECKING:
    from ..split import SplitModel


@dataclass
class AccSFL(Method):
    """s₀ up once for the server's local updates; the client minimises L_aux(s) and gets nothing back. 1 transfer.

    One optimizer trains the client's side and its auxiliary head together, without distillation. The
    head travels to the clients and is averaged with their adapters, in every round after the warm-up.
    """

    name: ClassVar[str] = "acc_sfl"
    title: ClassVar[str] = "AccSFL"
    table_position: ClassVar[int] = 4

    head: str = option("fc", "kind of auxiliary head: fc, fc_lora or mlp")
    rank: int = option(2, "r, for head='fc_lora'")
    hidden_layers: int = option(1, "for head='mlp'; the paper sweeps 1, 4, 8 and 12")

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        if self.head not in HEADS:
            raise ValueError(f"head={self.head!r} is not an auxiliary head. Choose one of: {', '.join(HEADS)}.")
        at_least("rank", self.rank, 1)
        at_least("hidden_layers", self.hidden_layers, 1)

    def effective_options(self) -> dict[str, Any]:
        """Return the options without those of another kind of head."""
        idle = {"fc": ("rank", "hidden_layers"), "fc_lora": ("hidden_layers",), "mlp": ("rank",)}[self.head]
        return {name: value for name, value in super().effective_options().items() if name not in idle}

    def check_loss(self, loss_spec: LossSpec) -> None:
        """Refuse a loss that the head cannot compute."""
        check_head_loss(loss_spec)

    def setup(self, split: SplitModel, loss_spec: LossSpec, seed: int, first_round: int = 0) -> None:
        """Build the head that all clients start from."""
        self.network = AuxiliaryHead.of(
            split, loss_spec, self.head, seed, rank=self.rank, hidden_layers=self.hidden_layers
        )

    def federated(self) -> dict[str, Tensor]:
        """Return the trained weights of the head; both sides draw the frozen ones from the seed."""
        return {f"auxiliary.{name}": p for name, p in self.network.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the head with its frozen weights."""
        return {f"auxiliary.{name}": t for name, t in self.network.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the head."""
        self.network.load_state_dict({name.removeprefix("auxiliary."): t for name, t in state.items()})

    @torch.no_grad()
    def adopt(self, averaged: Mapping[str, Tensor]) -> None:
        """Go on with the average of the heads."""
        for name, p in self.federated().items():
            p.copy_(averaged[name])

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Train each side on its own loss."""
        smashed = client.upload()
        client.update()
        server.local_updates(smashed, client.local_epochs)

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Do the local updates on the head's loss. Runs on the client."""
        network = copy.deepcopy(self.network)
        options = {name: value for name, value in client.optimizer.param_groups[0].items() if name != "params"}
        client.optimizer.add_param_group({"params": list(network.parameters()), **options})
        for _ in range(client.context.local_epochs):
            for batch in range(len(client.batches)):
                client.smash(batch)
                with client.context.autocast():
                    loss = network(client.live)
                client.observed.add("client_loss", loss)
                client.minimize(loss)
        trained = {f"auxiliary.{name}": p.detach() for name, p in network.named_parameters()}
        client.kept |= zip(trained, to_host(list(trained.values())), strict=True)
