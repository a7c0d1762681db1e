"""Passes that were counted once: of another one over the same shapes the counts are known.

A round consists of few kinds of passes, and methods share most of them. The sides here run each kind once for a split
model. For the others they add what the first counted, and return what it returned, which has the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..protocol.client_side import ClientSide, _Batch
from ..protocol.messages import Message, SmashedData
from ..protocol.server_side import ServerSide
from .flops import OperationCounter

T = TypeVar("T")


@dataclass(frozen=True)
class _Counted:
    """What a pass has counted, and its result off the graph."""

    flops: int
    placeholder_flops: int
    result: Any


class Passes:
    """The passes of the two halves of one split model that were counted."""

    def __init__(self) -> None:
        self._known: dict[Any, _Counted] = {}

    def once(self, key: Any, counter: OperationCounter, run: Callable[[], T]) -> T:
        """Return the result of a pass: the first under a key is run, of others the counts are added."""
        side = counter.side
        known = self._known.get(key)
        if known is None:
            before = counter.flops[side], counter.placeholder_flops[side]
            result = run()
            flops, placeholder_flops = counter.flops[side] - before[0], counter.placeholder_flops[side] - before[1]
            self._known[key] = _Counted(flops, placeholder_flops, tree_map(_off_graph, result))
            return result
        counter.flops[side] += known.flops
        counter.placeholder_flops[side] += known.placeholder_flops
        return tree_map(_copied, known.result)


class CountedServer(ServerSide):
    """A server side that runs each kind of pass once, and knows which operations belong to its own training.

    Without `passes` it runs all of them.
    """

    counter: OperationCounter
    passes: Passes | None = None
    train_flops = 0
    train_placeholder_flops = 0

    def forward(self, smashed: SmashedData, batch: int) -> Any:
        """Return the model's output; without a graph, from the first pass over these shapes."""
        if torch.is_grad_enabled():
            return super().forward(smashed, batch)
        return self._once("forward", smashed, lambda: super(CountedServer, self).forward(smashed, batch))

    def gradient(self, smashed: SmashedData, batch: int) -> Tensor:
        """Return g of the first pass over these shapes."""
        return self._once("gradient", smashed, lambda: super(CountedServer, self).gradient(smashed, batch))

    def answer(self, smashed: SmashedData, batch: int) -> Tensor:
        """Return g of the first such pass. Later ones leave no gradients of the weights: `step` does nothing then."""
        name = f"answer, training: {self._trains_on_feedback}"
        return self._once(name, smashed, lambda: super(CountedServer, self).answer(smashed, batch))

    def repeated(self, work: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return work that is done once; what it is called with is made up, and so is what it returns."""
        if self.passes is None:
            return work
        passes = Passes()  # of the graph that the work is done on
        return lambda given: passes.once(_outline(given), self.counter, lambda: work(given))

    def _train(self, smashed: SmashedData, batch: int) -> None:
        """Count a training step; it leaves the gradient of the first such step at the activations."""
        flops, placeholder_flops = self.counter.flops["server"], self.counter.placeholder_flops["server"]

        def run() -> Tensor | None:
            super(CountedServer, self)._train(smashed, batch)
            return smashed.activations.grad

        gradient = self._once("train", smashed, run)
        if smashed.activations.is_leaf:
            smashed.activations.grad = gradient
        self.train_flops += self.counter.flops["server"] - flops
        self.train_placeholder_flops += self.counter.placeholder_flops["server"] - placeholder_flops

    def _once(self, name: str, smashed: SmashedData, run: Callable[[], T]) -> T:
        if self.passes is None:
            return run()
        return self.passes.once((name, self.half.training, *_message_outline(smashed)), self.counter, run)


class CountedClient(ClientSide):
    """A client side that runs its half without a graph once for batches of the same shapes.

    On a graph it runs each time, because what autograd keeps is followed. Without `passes` it always does.
    """

    counter: OperationCounter
    passes: Passes | None = None

    def _run(self, given: _Batch) -> SmashedData:
        if self.passes is None or torch.is_grad_enabled():
            return super()._run(given)
        inputs = {name: _outline(value) for name, value in given.inputs.items()}
        key = "client", self.half.training, *inputs.items()
        return self.passes.once(key, self.counter, lambda: super(CountedClient, self)._run(given))


def _message_outline(message: Message) -> tuple[Any, ...]:
    return type(message), *((name, *_outline(t)) for name, t in message.tensors().items())


def _outline(value: Any) -> Any:
    """Return what decides what an operation on a tensor costs, or the value itself."""
    return (value.shape, value.dtype, value.requires_grad) if isinstance(value, Tensor) else value


def _off_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, (Tensor, Message)) else value


def _copied(value: Any) -> Any:
    return (
        value.map(torch.clone) if isinstance(value, Message) else value.clone() if isinstance(value, Tensor) else value
    )
