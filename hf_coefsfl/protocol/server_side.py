"""The server's side of the cut during one client's round: feedback and local updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .context import RoundContext, Side
from .loss import LossSpec
from .messages import SmashedData


class ServerSide(Side):
    """θˢ of one client (SplitFed V1 keeps one per sampled client). Lives on the server."""

    def __init__(self, half: nn.Module, optimizer: torch.optim.Optimizer, context: RoundContext, loss_spec: LossSpec):
        super().__init__(half, optimizer, context)
        self.loss_spec = loss_spec
        self._trains_on_feedback = False

    def forward(self, smashed: SmashedData, batch: int) -> Any:
        """Return the model's output with its loss, on the graph of `smashed.activations`.

        The loss of clients that are stacked is the sum of theirs.
        """
        self.context.synchronize_masks(self.half, "server_forward", batch)
        with self.context.autocast():
            output = self.half(smashed)
        if self.context.stacked:  # each client has the mean over its own samples
            output.loss = output.loss * self.context.num_stacked
        return output

    def losses(self, output: Any, smashed: SmashedData) -> Tensor:
        """Return the loss of a batch (1,), or of clients that are stacked each one's (clients,)."""
        if not self.context.stacked:
            loss: Tensor = output.loss.detach().float()
            return loss.reshape(1)
        samples = self.loss_spec.sample_losses(output.logits, smashed.labels["labels"])
        return samples.view(self.context.num_stacked, -1).mean(1)

    def gradient(self, smashed: SmashedData, batch: int) -> Tensor:
        """g = ∇ₛL(s; θˢ) of the batch-mean loss at the present weights."""
        leaf = on_graph(smashed)
        return torch.autograd.grad(self.forward(leaf, batch).loss, leaf.activations)[0]

    def answer(self, smashed: SmashedData, batch: int) -> Tensor:
        """g of one pass over a batch, as `feedback_gradient` takes it."""
        leaf = on_graph(smashed)
        return self.feedback_gradient(self.forward(leaf, batch).loss, leaf)

    def feedback_gradient(self, loss: Tensor, leaf: SmashedData, retain_graph: bool = False) -> Tensor:
        """g of a loss on the graph of `leaf`, for the client; within `training_on_feedback` for `step` too."""
        self.observed.add("feedback_loss", loss)
        if not self._trains_on_feedback:
            return torch.autograd.grad(loss, leaf.activations, retain_graph=retain_graph)[0]
        self.observed.add("loss", loss)
        self.backward(loss, retain_graph)
        assert leaf.activations.grad is not None
        return leaf.activations.grad

    @contextmanager
    def training_on_feedback(self) -> Iterator[None]:
        """Have the passes that give feedback give the gradients of the weights too, for a `step` after each."""
        self._trains_on_feedback = True
        try:
            yield
        finally:
            self._trains_on_feedback = False

    def repeated(self, work: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return work that costs the same each time it is called in a pass; a count of operations does it once."""
        return work

    def train_step(self, smashed: SmashedData, batch: int) -> Tensor:
        """θˢ ← θˢ − η ∇L(s; θˢ). Return ∇ₛL of the same backward pass, at the weights before the step."""
        leaf = on_graph(smashed)
        self._train(leaf, batch)
        assert leaf.activations.grad is not None
        return leaf.activations.grad

    def local_updates(self, smashed: Sequence[SmashedData], epochs: int) -> None:
        """Walk the cached smashed data for some epochs, one step on θˢ for each batch."""
        for _ in range(epochs):
            for batch, data in enumerate(smashed):
                self.train_step(data, batch)

    def train_again(self, smashed: Sequence[SmashedData], epochs: int) -> None:
        """Do `local_updates` by backward passes that end before the cut; the paper's count includes ∇ₛL."""
        for _ in range(epochs):
            for batch, data in enumerate(smashed):
                self._train(data, batch)

    def _train(self, smashed: SmashedData, batch: int) -> None:
        loss = self.forward(smashed, batch).loss
        self.observed.add("loss", loss)
        self.backward(loss)
        self.step()


def on_graph(smashed: SmashedData) -> SmashedData:
    """Return `smashed` with its activations as a leaf that collects a gradient."""
    return replace(smashed, activations=smashed.activations.detach().requires_grad_())
