"""The client's side of the cut during one round: its data, its half, its local updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .context import RoundContext, Side
from .devices import MOST_INPUTS, is_accelerator, to_device
from .injection import inject
from .loss import LossSpec, OutputBlock
from .masks import known_masks
from .messages import SmashedData
from .packing import Exchange, Places
from .padding import kept_positions, without_padding


class ClientSide(Side):
    """θᶜ and the local data of one client. Lives where the data is."""

    def __init__(
        self,
        half: nn.Module,
        batches: Sequence[dict[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        context: RoundContext,
        loss_spec: LossSpec,
    ):
        super().__init__(half, optimizer, context)
        self.batches = batches
        self.loss_spec = loss_spec
        self.initial: Exchange[SmashedData] = Exchange(context.store)  # s₀ of each batch, once exchanged
        self._bytes_given = 0
        self._given: dict[int, _Batch] = {}  # on an accelerator, of the first batches
        self._kept: dict[int, tuple[Tensor | None, Places | None]] = {}  # what the loss depends on, and what is sent
        self._current: SmashedData | None = None
        self._first: tuple[SmashedData, list[int]] | None = None  # batch 0 on its graph, at the weights of that version

    def exchange(self) -> Exchange[SmashedData]:
        """Return and remember the smashed data s₀ of every batch (the round-initial exchange).

        Batch 0 keeps its graph: at the first local update the weights, and so the pass, are still the same.
        """
        self.initial = self.pack(self._smash_all())
        return self.initial

    def _smash_all(self) -> Iterator[SmashedData]:
        for batch in range(len(self.batches)):
            with torch.set_grad_enabled(batch == 0):
                smashed = self._smash(batch)
            if batch == 0:
                self._first = smashed, self._versions()
            yield smashed.detach()

    def pack(self, messages: Iterable[SmashedData], batches: Sequence[int] | None = None) -> Exchange[SmashedData]:
        """Return the smashed data of the whole round (None), or of some batches, in the form in which it is sent.

        There is one message for each batch, in order, made of what `smash` gave.
        """
        count = len(self.batches)  # a method may count the batches over all epochs
        numbers = range(count) if batches is None else [batch % count for batch in batches]

        def places(index: int, _: SmashedData) -> Places | None:
            if index >= len(numbers) or numbers[index] not in self._kept:
                raise RuntimeError("An upload must have one message for each batch, in order, of what `smash` gave.")
            return self._kept[numbers[index]][1]

        return Exchange.of(messages, self.context.store, places, batches)

    def smash(self, batch: int) -> SmashedData:
        """Run the client half on a batch, keep its graph for `descend`, and return what is sent."""
        if batch == 0 and self._first is not None and self._first[1] == self._versions():
            self._current, self._first = self._first[0], None
        else:
            self._current = self._smash(batch)
        return self._current.detach()

    def displacement(self, batch: int) -> Tensor:
        """δ = s − s₀ of the batch last smashed, 0 at padding."""
        delta = self.live.activations.detach() - self.initial[batch].activations
        places = self.initial.places(batch)
        return delta if places is None else without_padding(delta, places.kept)

    def unpadded(self, batch: int) -> Tensor | None:
        """Return which positions of a batch that was smashed the loss depends on (b, T); None: all."""
        return self._kept[batch][0]

    @property
    def live(self) -> SmashedData:
        """The batch last smashed, on its graph."""
        if self._current is None:
            raise RuntimeError("The client has no activations on a graph: call smash(batch) before each update.")
        return self._current

    def descend(self, gradient: Tensor) -> None:
        """θᶜ ← θᶜ − η Jᵀ g̃: inject g̃ at the cut of the batch last smashed, then one step."""
        self.minimize(inject(self.live.activations, gradient))

    def minimize(self, loss: Tensor) -> None:
        """Take one step on a loss that was computed from `live`."""
        self._first = None
        self.backward(loss)
        self.step()
        self._current = None  # its graph is spent

    def output_blocks(self, batch: int) -> list[OutputBlock]:
        """Return the outputs of the loss that this batch's labels speak of; none if the loss is not known."""
        if not self.loss_spec.has_known_curvature:
            return []
        smashed = self.initial[batch]
        return self.loss_spec.output_blocks(smashed.labels, smashed.activations.shape[1])

    def _versions(self) -> list[int]:
        """Count how often each trained weight of the half has been written to; a method may train more than those."""
        return [parameter._version for parameter in self.trained]

    def _smash(self, batch: int) -> SmashedData:
        given = self._given.get(batch) or self._give(batch)
        self.context.synchronize_masks(self.half, "client_forward", batch)
        smashed = self._run(given)
        noisy = self.context.with_noise(smashed.activations, batch, given.inputs)
        self.observed.add("activations", noisy.sum())  # NaN and infinity survive a sum
        smashed = replace(smashed, activations=noisy, labels={**smashed.labels, **given.labels})
        if batch not in self._kept:
            labels_here = {name: self.batches[batch][name] for name in smashed.labels}
            kept = kept_positions(replace(smashed, context=given.here, labels=labels_here), self.loss_spec)
            device = self.context.device
            unpadded = None if kept is None else to_device(kept, device)
            self._kept[batch] = unpadded, self.context.store.places(kept, device)
        return smashed

    def _run(self, given: _Batch) -> SmashedData:
        """Run the half on a batch."""
        with self.context.autocast():
            smashed: SmashedData = self.half(crossing=given.context, **given.inputs)
        return smashed

    def _give(self, batch: int) -> _Batch:
        """Bring a batch to the device. What is asked about it is asked here, where no answer has to be waited for."""
        device = self.context.device
        half: Any = self.half
        inputs_here, labels_here = self.loss_spec.separate(self.batches[batch])
        here = half.context(inputs_here)
        inputs, labels = _on_device(inputs_here, device), _on_device(labels_here, device)
        context = {
            name: inputs[name] if t is inputs_here.get(name) else to_device(t, device) for name, t in here.items()
        }
        if is_accelerator(device) and not self.context.compiled:
            inputs, context = known_masks(inputs, inputs_here), known_masks(context, here)
        given = _Batch(inputs, labels, context, here)
        if is_accelerator(device):
            self._bytes_given += sum(t.nbytes for t in (inputs | labels).values() if isinstance(t, Tensor))
            if self._bytes_given <= MOST_INPUTS:  # later ones come again in each pass
                self._given[batch] = given
        return given


@dataclass(frozen=True)
class _Batch:
    """A batch on the device."""

    inputs: dict[str, Any]
    labels: dict[str, Any]
    context: dict[str, Tensor]  # what the server needs of the inputs
    here: dict[str, Tensor]  # the same where the batch came from


def _on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: to_device(t, device) if isinstance(t, Tensor) else t for name, t in batch.items()}
