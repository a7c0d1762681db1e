"""A round of a method that answers along the server's walk, as a loop of plain autograd."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_coefsfl.methods import make_method
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec

from .toy import toy_sides

Weights = list[Tensor]


def same(ours: tuple[Weights, Weights], theirs: tuple[Weights, Weights]) -> bool:
    """Return whether the weights of both halves are the same bits."""
    return all(torch.equal(x, y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True))


def assert_close(ours: tuple[Weights, Weights], theirs: tuple[Weights, Weights]) -> None:
    """Assert that the weights of both halves are the same but for rounding."""
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)


def trained(method: str, sides: Any, **options: Any) -> tuple[Weights, Weights]:
    """Return the weights of both halves after a round of the package's own code."""
    client, server = sides
    rule = make_method(method, options)
    rule.round(LocalLink(rule, client), server)
    return [p.detach().clone() for p in client.half.parameters()], [
        p.detach().clone() for p in server.half.parameters()
    ]


def trained_by_hand(
    task: LossSpec, epochs: int, passes: int, compensate: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Weights, Weights]:
    """Return the same of three batches, with g̃ = compensate(g₀, loss, δ) and g₀ of the server's first pass."""
    client, server = toy_sides(task, 3, local_epochs=epochs)
    smashed = [copy.deepcopy(data) for data in client.exchange()]
    answers = []
    for step in range(passes * epochs):
        for data in smashed:
            leaf = data.activations.detach().requires_grad_()
            loss = server.half(type(data)(leaf, data.context, data.labels, data.shapes)).loss
            server.optimizer.zero_grad()
            loss.backward()
            server.optimizer.step()
            if step == 0:
                assert leaf.grad is not None
                answers.append((leaf.grad, loss.detach()))
    for _ in range(epochs):
        for (g, loss), data, inputs in zip(answers, smashed, client.batches, strict=True):
            now = client.half(**task.separate(inputs)[0]).activations
            used = compensate(g, loss, now.detach() - data.activations)
            client.optimizer.zero_grad()
            now.backward(used)
            client.optimizer.step()
    return [p.detach() for p in client.half.parameters()], [p.detach() for p in server.half.parameters()]
