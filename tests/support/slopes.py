"""Sides in double precision."""

from typing import Any

import torch

from hf_coefsfl.methods.mu_splitfed import MUSplitFed
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.toy import toy_sides

Sides = tuple[ClientSide, ServerSide]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def double_sides(task: LossSpec, num_batches: int = 2, **changes: Any) -> Sides:
    """The toy in double precision, where a difference of losses keeps its digits."""
    client, server = toy_sides(task, num_batches, **changes)
    client.half.double()
    server.half.double()
    client.batches = [{k: t.double() if t.is_floating_point() else t for k, t in b.items()} for b in client.batches]
    return client, server


def values(side: ClientSide | ServerSide) -> list[torch.Tensor]:
    return [p.detach().clone() for p in side.half.parameters()]


def run(method: MUSplitFed, sides: Sides, link: type[LocalLink] = LocalLink) -> LocalLink:
    connection = link(method, sides[0])
    method.round(connection, sides[1])
    return connection
