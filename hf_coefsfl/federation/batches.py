"""The collated mini-batches of the clients of a round, made ahead by worker processes if there are any."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ..config import SplitFedConfig
from ..protocol.devices import MOST_INPUTS, pins_memory
from ..protocol.seeds import derive_seed, set_cpu_random_state
from .clients import Federation
from .columns import row_lengths
from .data_checks import RowCheck, unreadable_row
from .sampling import shuffled_batches

logger = logging.getLogger(__name__)
Batches = list[dict[str, Any]]
Place = tuple[int, int, int]  # round, client, batch


class ClientData:
    """What the clients train on.

    With `dataloader_num_workers` processes fetch, transform and collate the next batches (`dataloader_prefetch_factor`
    of them each, two by default) while a client trains.
    """

    def __init__(
        self,
        federation: Federation,
        collate: Callable[[list[Any]], dict[str, Any]],
        check: RowCheck,
        args: SplitFedConfig,
    ):
        self.federation, self.loss_spec, self.args = federation, check.loss_spec, args
        self.collated = CollatedBatches(federation, collate, check, args)
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None

    def round(self, round_index: int, clients: Sequence[int]) -> Iterator[list[Any]]:
        """Yield what was made of each client's data, for `checked` to look at."""
        made = self._made(round_index, clients)
        for number, client in enumerate(clients, start=1):
            try:
                batches = self.pinned(_own(next(made)) for _ in range(self._count(client)))
            except Exception as error:  # a worker died: this client fails, the others get new workers
                self.close()
                # Nothing may hold the old workers, nor a traceback: PyTorch raises in this thread, at any moment, as
                # long as it knows of a dead worker, even in the middle of forking the new ones.
                del made
                batches = [error.with_traceback(None)]
                made = self._made(round_index, clients[number:])
            yield batches

    def _made(self, round_index: int, clients: Sequence[int]) -> Iterator[Any]:
        places = [(round_index, client, batch) for client in clients for batch in range(self._count(client))]
        if not self.args.dataloader_num_workers:
            return map(self.collated.__getitem__, places)
        return iter(self._workers(places))

    def pinned(self, batches: Iterable[Any]) -> list[Any]:
        """Return the batches of a client, those that fit pinned if they go to an accelerator."""
        ready: list[Any] = []
        left = MOST_INPUTS if self._pins else 0
        for batch in batches:
            tensors = [t for t in batch.values() if isinstance(t, Tensor)] if isinstance(batch, Mapping) else []
            left -= sum(t.nbytes for t in tensors)
            fits = tensors and left >= 0
            ready.append({n: t.pin_memory() if _is_pageable(t) else t for n, t in batch.items()} if fits else batch)
        return ready

    @property
    def _pins(self) -> bool:
        """Whether batches wait in memory that an accelerator reads without the processor."""
        return self.args.dataloader_pin_memory and pins_memory(self.args.device)

    def close(self) -> None:
        """End the workers; the next round starts new ones."""
        self._loader = None

    def batches(self, round_index: int, client: int) -> Batches:
        """Return the mini-batches of one client's round."""
        places = [(round_index, client, batch) for batch in range(self._count(client))]
        return self.checked(client, [self.collated[place] for place in places])

    def checked(self, client: int, batches: list[Any]) -> Batches:
        """Return the batches in which a label enters the loss; raise what the data raised or what is wrong with it."""
        name = self.federation.name(client)
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
        labelled = [batch for batch in batches if self.loss_spec.has_labels(batch)]
        if not labelled:
            raise ValueError(
                f"Client {name} has no label that enters the loss: all are -100. Leave the client out, or look at the "
                "truncation of its samples."
            )
        if len(labelled) < len(batches):
            logger.warning("Client %s: %d batches without a label are left out.", name, len(batches) - len(labelled))
        return labelled

    def _count(self, client: int) -> int:
        full, left = divmod(self.federation.sizes[client], self.args.per_device_train_batch_size)
        return full + (1 if left and not self.args.dataloader_drop_last else 0)

    def _workers(self, places: Sequence[Place]) -> DataLoader[Any]:
        self._plan.places = places
        if self._loader is None:
            args = self.args
            self._loader = DataLoader(
                self.collated,
                sampler=self._plan,
                batch_size=None,
                num_workers=args.dataloader_num_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                persistent_workers=True,
                pin_memory=self._pins,
            )
        return self._loader


class CollatedBatches(Dataset[Any]):
    """Mini-batches by (round, client, batch): what is in one depends on nothing else."""

    def __init__(
        self,
        federation: Federation,
        collate: Callable[[list[Any]], dict[str, Any]],
        check: RowCheck,
        args: SplitFedConfig,
    ):
        self.federation, self.collate, self.check = federation, collate, check
        self.seed, self.data_seed = args.seed, args.seed if args.data_seed is None else args.data_seed
        self.batch_size, self.drop_last = args.per_device_train_batch_size, args.dataloader_drop_last
        self._order: dict[tuple[int, int], list[list[int]]] = {}  # rows of the batches, of the last client asked for
        self.by_length = args.train_sampling_strategy == "group_by_length"
        self._lengths: dict[int, NDArray[np.int64]] = {}  # of the rows of each dataset, by the number of it
        for example in federation.examples() if self.by_length else ():
            self.lengths(example)  # which refuses data without

    def __getitem__(self, place: Place) -> Any:
        """Return a collated batch, or the exception that its data raised or deserves."""
        round_index, client, batch = place
        if (round_index, client) not in self._order:
            size = self.federation.sizes[client]
            order = shuffled_batches(
                self.data_seed, round_index, client, size, self.batch_size, self.drop_last, self.lengths(client)
            )
            self._order = {(round_index, client): order}
        set_cpu_random_state(derive_seed(self.seed, "data", *place))  # for random augmentation
        places = self._order[round_index, client][batch]
        rows, owner = self.federation.partition.indices[client][places], f"client {self.federation.name(client)}"
        try:
            collated = self.collate(self.federation.rows(client, places))
            fault = self.check.batch(collated)
        except Exception as error:
            told = (
                unreadable_row(rows, lambda row: self.collate([self.federation.dataset(client)[int(row)]]), owner)
                or error
            )
            return told if get_worker_info() is None else _portable(told)
        return collated if fault is None else fault.error(owner, rows[fault.row])

    def lengths(self, client: int) -> Any:
        """Return the lengths of a client's samples; None: batches are not made by length."""
        if not self.by_length:
            return None
        dataset = client if len(self.federation.datasets) > 1 else 0
        if dataset not in self._lengths:
            self._lengths[dataset] = row_lengths(self.federation.dataset(client))
        return self._lengths[dataset][self.federation.partition.indices[client]]


def _own(batch: Any) -> Any:
    """Return a batch in memory of this process: each tensor that a worker shares holds a file open."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: t.clone() if isinstance(t, Tensor) and t.is_shared() else t for name, t in batch.items()}


def _is_pageable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and not value.is_pinned()


def _portable(error: Exception) -> Exception:
    """Return an exception that can leave its process: the same, or one that says as much."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Plan(Sampler[Place]):
    """The places of the round that is being run; the loader and its workers outlive it."""

    def __init__(self) -> None:
        self.places: Sequence[Place] = ()

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
