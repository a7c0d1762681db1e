"""The clients and their data: one dataset that is partitioned, or a dataset for each client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import DatasetDict
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from ..config import SplitFedConfig
from ..protocol.seeds import derive_seed
from .partition import LABEL_COLUMNS, Partition, column_values, make_partition

_DEFAULT_CLIENTS = 50


@dataclass(frozen=True)
class Federation:
    """Datasets and, for each client, which of them it reads and which rows of it are its own."""

    datasets: list[Any]  # one that all clients share, or one a client
    partition: Partition
    _change: Callable[[Any], Any] | None = None  # what is done to a dataset before it is read
    _changed: dict[int, Any] = field(default_factory=dict)  # the datasets to which it was done, by their index

    @classmethod
    def of(cls, data: Any, args: SplitFedConfig) -> Federation:
        """Make the federation of `train_dataset`: partitioned by the config, or a list or dict of client datasets."""
        if isinstance(data, DatasetDict):
            raise ValueError(
                f"train_dataset is a DatasetDict of the splits {', '.join(map(repr, data))}, which are not clients. "
                "Pass one of them, e.g. dataset['train']."
            )
        if isinstance(data, (Mapping, list, tuple)) and not _is_single(data):
            return cls._natural(data, args)
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise ValueError(
                f"train_dataset is a {type(data).__name__} without a length, which cannot be partitioned over clients. "
                "Pass a dataset with rows to index, or a list or dict with one dataset for each client."
            )
        by_column = args.partition == "column"
        partition = make_partition(
            data,
            scheme=args.partition,  # type: ignore[arg-type]
            num_clients=args.num_clients if by_column else args.num_clients or _DEFAULT_CLIENTS,
            alpha=args.dirichlet_alpha,
            column=args.partition_column,
            min_size=args.min_client_samples,
            seed=derive_seed(args.seed if args.data_seed is None else args.data_seed, "partition"),
        )
        return cls([data], partition)._checked(args)

    @classmethod
    def _natural(cls, data: Mapping[Any, Any] | Sequence[Any], args: SplitFedConfig) -> Federation:
        named = data if isinstance(data, Mapping) else {str(i): dataset for i, dataset in enumerate(data)}
        if args.num_clients not in (None, len(named)):
            raise ValueError(
                f"num_clients={args.num_clients}, but train_dataset holds the data of {len(named)} clients. Leave "
                "num_clients out."
            )
        if not named:
            raise ValueError("train_dataset is an empty collection: it has no client to train.")
        rows = tuple(np.arange(len(dataset)) for dataset in named.values())
        return cls(list(named.values()), Partition(rows, tuple(map(str, named))))._checked(args)

    def _checked(self, args: SplitFedConfig) -> Federation:
        least = args.per_device_train_batch_size if args.dataloader_drop_last else 1
        short = [name for name, size in zip(self.partition.names, self.sizes, strict=True) if size < least]
        if short:
            why = "no data" if least == 1 else f"fewer than the {least} samples of one batch, and dataloader_drop_last"
            raise ValueError(
                f"{len(short)} of {len(self)} clients have {why}: {', '.join(short[:5])}{' ...' * (len(short) > 5)}. "
                "Leave them out, use fewer clients, or raise min_client_samples (partition='dirichlet')."
            )
        return self

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.partition)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of samples of each client."""
        return self.partition.sizes()

    def name(self, client: int) -> str:
        """Return what the client is called."""
        return self.partition.names[client]

    def rows(self, client: int, places: Sequence[int]) -> list[Any]:
        """Return the samples at some places of a client's data."""
        dataset = self.dataset(client)
        indices = [int(i) for i in self.partition.indices[client][list(places)]]
        if hasattr(dataset, "__getitems__"):
            return list(dataset.__getitems__(indices))
        return [dataset[i] for i in indices]

    def dataset(self, client: int) -> Any:
        """Return the dataset that a client reads, which it may share with others."""
        return self._dataset(client if len(self.datasets) > 1 else 0)

    def owner(self, row: int) -> str:
        """Return the name of the client that has a row of the dataset that all share."""
        names = zip(self.partition.names, self.partition.indices, strict=True)
        return next((name for name, rows in names if (rows == row).any()), "")

    def _dataset(self, index: int) -> Any:
        if self._change is None:
            return self.datasets[index]
        if index not in self._changed:
            self._changed[index] = self._change(self.datasets[index])
        return self._changed[index]

    def map_datasets(self, function: Callable[[Any], Any]) -> Federation:
        """Return the same federation over changed datasets (columns removed, say).

        Of many datasets, each is changed when it is first read: a round needs those of a few clients only.
        """
        if len(self.datasets) == 1:
            return Federation([function(self.datasets[0])], self.partition)
        return replace(self, _change=function, _changed={})

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the changed datasets to another process, and not the function, which may not be sent."""
        return Federation, ([self._dataset(index) for index in range(len(self.datasets))], self.partition)

    def examples(self) -> list[int]:
        """Return clients whose samples stand for all: one for each set of columns, or all if these are not known."""
        examples: dict[Any, int] = {}
        for client, dataset in enumerate(self.datasets):
            features = getattr(dataset, "features", None)
            examples.setdefault(client if features is None else str(features), client)
        return list(examples.values())

    def labels(self, column: str | None = None) -> tuple[Partition, NDArray[Any], Sequence[str] | None]:
        """Return each client's rows among all clients' samples, their labels, and the names of the classes if known."""
        values = np.concatenate([column_values(dataset, column) for dataset in self.datasets])
        features = getattr(self.datasets[0], "features", {})
        label = column or next((name for name in LABEL_COLUMNS if name in features), "")
        names = getattr(features.get(label), "names", None)
        ends = np.cumsum([0, *self.sizes])
        rows = self.partition.indices
        if len(self.datasets) > 1:  # each client's rows, as places in the concatenation
            rows = tuple(np.arange(start, stop) for start, stop in pairwise(ends))
        return Partition(rows, self.partition.names), values, names


def _is_single(data: Any) -> bool:
    """Tell a plain list of samples (dicts) from a list of datasets."""
    if isinstance(data, Mapping):
        return False
    return len(data) > 0 and isinstance(data[0], Mapping)
