"""Which client holds which rows: IID, Dirichlet over the labels, or one client per value of a column.

A partition is made of row indices only, so it fits any dataset with a length; labels or client
names are read from one column, without decoding the images or audio of the others.

This is not `flwr-datasets` because its newest release (0.6.1) needs `datasets<5` and Python 3.11.
Partitions made with it, or by hand, can be handed to the trainer as a list of datasets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from .._suggest import did_you_mean

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Scheme = Literal["iid", "dirichlet", "column"]
LABEL_COLUMNS = ("labels", "label")
# Beyond these, numpy's Dirichlet sampler underflows or overflows; the partitions no longer change by then.
ALPHA_RANGE = (1e-6, 1e9)
# Give up after so many draws if even the best leaves more than so many clients with too few samples.
_HOPELESS_DRAWS, _HOPELESS_CLIENTS = 20, 50
# One stream per scheme: IID and Dirichlet partitions of one seed do not share their randomness.
_IID_STREAM, _DIRICHLET_STREAM = 0, 1


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of each client: `indices[k]` are those of the client called `names[k]`.

    Example:
        >>> partition = by_column(["ann", "bob", "ann"])
        >>> partition.names, [rows.tolist() for rows in partition.indices]
        (('ann', 'bob'), [[0, 2], [1]])
    """

    indices: tuple[NDArray[np.int64], ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.indices) != len(self.names):
            raise ValueError(f"got rows for {len(self.indices)} clients but {len(self.names)} client names")

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.indices)

    def sizes(self) -> list[int]:
        """Return the number of rows of each client."""
        return [len(rows) for rows in self.indices]

    def counts(self, labels: ArrayLike) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the sorted classes, and how many rows of each class a client has: (clients, classes)."""
        classes, codes = _distinct(labels, "labels")
        if len(codes) != sum(self.sizes()):
            raise ValueError(f"got {len(codes)} labels for a partition of {sum(self.sizes())} rows")
        owners = np.repeat(np.arange(len(self)), self.sizes())
        cells = owners * len(classes) + codes[np.concatenate(self.indices)]
        counts = np.bincount(cells, minlength=len(self) * len(classes)).reshape(len(self), len(classes))
        return classes, counts.astype(np.int64)


def iid(num_samples: int, num_clients: int, seed: int) -> Partition:
    """Deal `num_samples` shuffled rows to clients whose sizes differ by at most one."""
    _check_sizes(num_samples, num_clients, min_size=1)
    rows = _generator(seed, _IID_STREAM).permutation(num_samples)
    return Partition(tuple(np.array_split(rows, num_clients)), _numbered(num_clients))


def dirichlet(
    labels: ArrayLike, num_clients: int, alpha: float, seed: int, min_size: int = 1, max_tries: int = 1000
) -> Partition:
    """Share out each class in proportions drawn from Dir(alpha, ..., alpha) over the clients.

    Small `alpha`: a client has few classes and sizes differ much; large `alpha`: close to IID.
    The proportions of all classes are drawn again, at most `max_tries` times, until each client
    has `min_size` rows; fewer times if the draws are far from it. The rows of a client come shuffled.

    Args:
        labels: one discrete label per row: ints, strings or booleans, in a list, array or tensor.
        num_clients: number of clients.
        alpha: concentration of the Dirichlet distribution.
        seed: equal seeds give equal partitions.
        min_size: fewest rows a client may have.
        max_tries: number of draws after which to give up.

    Raises:
        ValueError: if no draw gives each client `min_size` rows, or the arguments rule it out.
    """
    classes, codes = _distinct(labels, "labels")
    _check_sizes(len(codes), num_clients, min_size)
    low, high = ALPHA_RANGE
    if not low <= alpha <= high:
        raise ValueError(f"dirichlet_alpha must be between {low:g} and {high:g}, got {alpha}")
    rng = _generator(seed, _DIRICHLET_STREAM)
    class_sizes = np.bincount(codes, minlength=len(classes))

    best: NDArray[np.int64] | None = None  # sizes of the draw that came closest
    tries = 0
    while True:
        fewest = len(codes) if best is None else (best < min_size).sum()
        if tries == max_tries or (tries == _HOPELESS_DRAWS and fewest > _HOPELESS_CLIENTS):
            reached = "" if best is None else _describe_shortfall(best, min_size)
            raise ValueError(
                f"none of {tries} draws of Dir({alpha:g}) gave each of {num_clients} clients "
                f"min_client_samples={min_size} of the {len(codes)} rows{reached}; use a larger dirichlet_alpha, fewer "
                "clients or a smaller min_client_samples"
            )
        tries += 1
        counts = _draw_counts(rng, class_sizes, num_clients, alpha)
        sizes = counts.sum(axis=0)
        if sizes.min() >= min_size:
            break
        if (sizes < min_size).sum() < fewest:
            best = sizes

    rows = rng.permutation(len(codes))
    rows = rows[np.argsort(codes[rows], kind="stable")]  # class by class, shuffled within each
    owners = np.empty_like(codes)
    owners[rows] = np.repeat(np.tile(np.arange(num_clients), len(classes)), counts.ravel())
    rows = rng.permutation(len(codes))
    rows = rows[np.argsort(owners[rows], kind="stable")]  # client by client, shuffled within each
    return Partition(tuple(np.split(rows, np.cumsum(sizes)[:-1])), _numbered(num_clients))


def by_column(values: ArrayLike) -> Partition:
    """Make one client of each distinct value, in sorted order; its rows keep the order of the dataset."""
    distinct, codes = _distinct(values, "column values")
    rows = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes, minlength=len(distinct))
    return Partition(tuple(np.split(rows, np.cumsum(sizes)[:-1])), tuple(str(value) for value in distinct))


def make_partition(
    dataset: Any,
    *,
    scheme: Scheme = "iid",
    num_clients: int | None = None,
    alpha: float = 0.5,
    column: str | None = None,
    min_size: int = 1,
    seed: int = 0,
) -> Partition:
    """Partition the rows of `dataset`.

    Args:
        dataset: a `datasets.Dataset`, or anything with a length whose items are dicts.
        scheme: `"iid"`, `"dirichlet"` (over the labels in `column`) or `"column"` (one client per value of `column`).
        num_clients: number of clients; for `"column"` None, or the number of distinct values.
        alpha: for `"dirichlet"`, its concentration.
        column: for `"dirichlet"` the labels, by default `labels` or `label`; for `"column"` what names the client.
        min_size: fewest rows a client may have.
        seed: equal seeds give equal partitions.
    """
    if scheme not in get_args(Scheme):
        raise ValueError(f"partition must be one of {list(get_args(Scheme))}, got {scheme!r}")
    if scheme == "column":
        if column is None:
            raise ValueError(f"partition='column' needs partition_column, one of {_column_names(dataset)}")
        partition = by_column(column_values(dataset, column))
        if num_clients not in (None, len(partition)):
            raise ValueError(
                f"num_clients={num_clients}, but column {column!r} has {len(partition)} distinct values and each is a "
                f"client: leave num_clients out, or set it to {len(partition)}"
            )
        sizes = np.array(partition.sizes())
        if sizes.min() < min_size:
            raise ValueError(
                f"column {column!r} leaves clients with fewer rows than min_client_samples={min_size}"
                f"{_describe_shortfall(sizes, min_size)}; filter them out of the dataset or use a smaller "
                "min_client_samples"
            )
        return partition
    if num_clients is None:
        raise ValueError(f"partition={scheme!r} needs num_clients")
    if scheme == "dirichlet":
        return dirichlet(column_values(dataset, column), num_clients, alpha, seed, min_size)
    _check_sizes(_length(dataset), num_clients, min_size)
    return iid(_length(dataset), num_clients, seed)


def column_values(dataset: Any, column: str | None = None) -> NDArray[Any]:
    """Return one value per row: those of `column`, or if it is None of the first of `LABEL_COLUMNS` there is.

    Strings come as an object array. Only this column of a `datasets.Dataset` is read; of any other
    dataset each item is fetched once.
    """
    present = _column_names(dataset)
    if column is None:
        column = next((name for name in LABEL_COLUMNS if name in present), None)
        if column is None:
            raise ValueError(
                f"the dataset has no label column ({' or '.join(LABEL_COLUMNS)}): name the column that "
                f"holds the labels, one of {present}"
            )
    elif column not in present:
        raise ValueError(
            f"partition_column={column!r}: the dataset has no such column, only {', '.join(present)}."
            f"{did_you_mean(column, present) or ' Name one of these.'}"
        )
    if _is_hf_dataset(dataset):
        feature = dataset.features[column]
        if not hasattr(feature, "dtype") or feature.dtype in ("list", "dict") or hasattr(feature, "decode"):
            raise ValueError(_not_scalar(f"column {column!r}", feature))
        # Without the user's format or transform, which may want other columns too.
        return _scalars(dataset.with_format(None)[column][:], f"column {column!r}")
    return _scalars([dataset[row][column] for row in range(_length(dataset))], f"column {column!r}")


def _draw_counts(
    rng: np.random.Generator, class_sizes: NDArray[np.int64], num_clients: int, alpha: float
) -> NDArray[np.int64]:
    """Draw rows per class and client (classes, clients): each class in Dirichlet proportions, rounded."""
    shares = rng.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))
    ends = np.rint(np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(np.int64)
    counts = np.diff(ends, axis=1, prepend=0)
    # Rounding favours fixed places in the row (for a large alpha always the same clients would get
    # the rows of a class smaller than num_clients). The shares are exchangeable: shuffle the places.
    return rng.permuted(counts, axis=1)


def _distinct(values: ArrayLike, what: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the sorted distinct values, and for each row the index of its value among them."""
    array = _scalars(values, what)
    if not len(array):
        raise ValueError(f"{what}: there are no rows to partition")
    try:
        distinct, codes = np.unique(array, return_inverse=True)
    except TypeError as error:  # not comparable, e.g. a datetime and a string
        raise ValueError(f"{what} mix types that cannot be sorted: {error}") from error
    return distinct, codes


def _scalars(values: Any, what: str) -> NDArray[Any]:
    """Return `values` as a one-dimensional array of discrete values, or say why they are not."""
    if hasattr(values, "detach"):  # a torch tensor, perhaps on a GPU
        values = values.detach().cpu().numpy()
    if not isinstance(values, np.ndarray):
        values = list(values)
        for value in values:
            if value is None or isinstance(value, str | bool | int | float | np.generic):
                continue
            if isinstance(value, Sequence | Mapping | set) or getattr(value, "ndim", 0) > 0:
                raise ValueError(_not_scalar(what, value))
        if any(isinstance(value, str) for value in values):
            # Objects: a fixed-width array would take the longest string's size for each row.
            array = np.empty(len(values), dtype=object)
            array[:] = values
        else:
            array = np.array([value.item() if hasattr(value, "item") else value for value in values])
        values = array
    if values.ndim != 1:
        raise ValueError(_not_scalar(what, values[0] if values.ndim else values))
    if values.dtype == object:
        missing = [row for row, value in enumerate(values) if value is None or value != value]
        is_string = {isinstance(value, str) for value in values if value is not None}
        if not missing and len(is_string) > 1:
            raise ValueError(f"{what} mix strings with other types: make them all strings or all integers")
    else:
        missing = np.flatnonzero(values != values).tolist()
    if missing:
        raise ValueError(
            f"{what}: {len(missing)} of {len(values)} values are missing (None or NaN), the first in row "
            f"{missing[0]}: fill them in, or filter these rows out"
        )
    if values.dtype.kind == "f" and (values != np.round(values)).any():
        raise ValueError(
            f"{what} are continuous (e.g. {values[values != np.round(values)][0]}): discrete values are needed, "
            f"so bin them into a new column, or use partition='iid'"
        )
    return values


def _not_scalar(what: str, value: object) -> str:
    text = repr(value)
    return (
        f"{what}: one discrete value per row is needed, got {text if len(text) <= 60 else text[:57] + '...'} "
        f"(the labels of token classification and question answering are like this): "
        f"name another column, or use partition='iid'"
    )


def _is_hf_dataset(dataset: Any) -> bool:
    return hasattr(dataset, "features") and hasattr(dataset, "with_format") and not isinstance(dataset, Mapping)


def _length(dataset: Any) -> int:
    if isinstance(dataset, Mapping):
        raise ValueError(f"got a dict of datasets, pass one of them: {list(dataset)}")
    if not hasattr(dataset, "__len__"):
        raise ValueError(f"a dataset with a length is needed to partition it by rows, got {type(dataset).__name__}")
    return len(dataset)


def _column_names(dataset: Any) -> list[str]:
    if not _length(dataset):
        raise ValueError("the dataset has no rows to partition")
    if _is_hf_dataset(dataset):
        return list(dataset.column_names)
    first = dataset[0]
    if not isinstance(first, Mapping):
        raise ValueError(f"the items of the dataset must be dicts to read a column, got {type(first).__name__}")
    return list(first)


def _check_sizes(num_samples: int, num_clients: int, min_size: int) -> None:
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_clients}")
    if min_size < 1:
        raise ValueError(f"min_client_samples must be at least 1, got {min_size}")
    if num_clients * min_size > num_samples:
        raise ValueError(
            f"{num_samples} rows cannot give {num_clients} clients {min_size} each: use at most "
            f"{num_samples // min_size} clients (num_clients), or a smaller min_client_samples"
        )


def _describe_shortfall(sizes: NDArray[np.int64], min_size: int) -> str:
    short = int((sizes < min_size).sum())
    return f" ({short} of {len(sizes)} clients fell short, sizes were {sizes.min()} to {sizes.max()})"


def _generator(seed: int, stream: int) -> np.random.Generator:
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return np.random.default_rng([seed, stream])


def _numbered(num_clients: int) -> tuple[str, ...]:
    return tuple(str(client) for client in range(num_clients))
