"""Clients that train honestly and then send something else."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from hf_coefsfl.federation.ledger import ClientReport
from hf_coefsfl.federation.simulation import Simulation

Attack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # the initial and the trained weight -> what is sent


def poison(patch: pytest.MonkeyPatch, clients: Collection[int], attack: Attack, rounds: Collection[int] = (0,)) -> None:
    """Have some clients of a simulation send other weights of the client side in some rounds."""
    train = Simulation._train_client

    def hostile(self: Simulation, round_index: int, client: int, *args: Any) -> ClientReport:
        initial = [p.detach().clone() for p in self.client_parameters.values()]
        report = train(self, round_index, client, *args)
        if client in clients and round_index in rounds:
            with torch.no_grad():
                for start, p in zip(initial, self.client_parameters.values(), strict=True):
                    p.copy_(attack(start, p))
        return report

    patch.setattr(Simulation, "_train_client", hostile)


def huge(initial: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Finite numbers that leave no room for arithmetic."""
    return torch.full_like(trained, 3e38)
