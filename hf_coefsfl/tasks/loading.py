"""Reading a dataset from the Hub or from local files, and bringing its columns to the names a task uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)

from .._suggest import did_you_mean
from ..federation.columns import chunks
from ..federation.data_checks import DataError
from . import digits

logger = logging.getLogger(__name__)
_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
_FEW_CLASSES, _SPREAD = 1000, 10  # numbers below these, the second times the distinct labels, may be classes
_SUBSET_SEED = 0  # a smaller run is the same smaller run whatever its seed


def load_splits(name: str, config: str | None = None) -> Mapping[str, Dataset]:
    """Return the splits of a dataset: a Hub id, `digits`, a folder of files or images, one file, or a saved one."""
    path = Path(name)
    if name == digits.DATASET and not path.exists():
        return digits.load_digits()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded: Any = load_from_disk(name)
        elif path.is_file():
            if path.suffix not in _FILES:
                raise ValueError(f"its ending is not one of {', '.join(_FILES)}")
            loaded = load_dataset(_FILES[path.suffix], data_files=name)
        else:
            loaded = load_dataset(name, config)
    except Exception as error:  # the Hub, the network, the cache and the files each have their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "of the local files" if path.exists() else "from the Hub"
        raise ValueError(
            f"The dataset {name!r} cannot be loaded {where} ({reason}). --dataset_name takes the id of a dataset on "
            "the Hub, or a local copy: a folder or file (parquet, json, csv, an image folder, or what save_to_disk "
            "wrote)."
        ) from error
    return loaded if isinstance(loaded, DatasetDict) else {"train": loaded}


def shortened(splits: Mapping[str, Dataset], split: str, most: int | None, name: str) -> Dataset:
    """Return a split, or at most `most` rows drawn from it."""
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}, only {', '.join(splits)}. See --train_split, --eval_split.")
    rows = splits[split]
    if most is not None and most < 1:
        raise ValueError(f"max_train_samples and max_eval_samples must be at least 1, got {most}.")
    if most is None or most >= len(rows):
        return rows
    return rows.shuffle(seed=_SUBSET_SEED).select(range(most))


def pick(rows: Dataset, roles: Mapping[str, str], given: Collection[str], optional: Collection[str]) -> Dataset:
    """Return the columns of the roles, renamed to them.

    A column that was not given and is not there may also bear the role's own name.
    """
    found: dict[str, str] = {}
    for role, column in roles.items():
        if column not in rows.column_names and role not in given and role in rows.column_names:
            column = role
        if column in found:
            raise ValueError(f"--columns gives {column!r} two roles: {found[column]} and {role}.")
        if column in rows.column_names:
            found[column] = role
        elif role in given or role not in optional:
            raise ValueError(
                f"The dataset has no column {column!r} for the {role}, only {', '.join(rows.column_names)}. Say which "
                f"it is with --columns {role}=...{did_you_mean(column, rows.column_names)}"
            )
    return rows.select_columns(list(found)).rename_columns({c: role for c, role in found.items() if c != role})


def with_column_of(rows: Dataset, source: Dataset, column: str) -> Dataset:
    """Return `rows` with a further column of `source`, which has the same rows."""
    if column not in source.column_names:
        raise ValueError(
            f"partition_column={column!r}: the dataset has no such column, only {', '.join(source.column_names)}."
            f"{did_you_mean(column, source.column_names)}"
        )
    return concatenate_datasets([rows, source.select_columns([column])], axis=1)


def check_texts(rows: Dataset, role: str, where: str, *, missing: bool) -> None:
    """Refuse a column that does not hold texts, and unless `missing` one with an empty cell."""
    feature = rows.features[role]
    texts = rows.with_format("arrow").select_columns([role])[:][role] if len(rows) else None
    if texts is None or (missing and not len(texts.drop_null())):
        return
    if texts.null_count and not missing:
        row = texts.is_null().index(True).as_py()
        raise DataError(f"The {role} of {where}, row {row}, is missing. Fill it in, or leave the row out.")
    if "string" not in str(getattr(feature, "dtype", "")):
        row = texts.is_valid().index(True).as_py()
        value = repr(texts[row].as_py())
        raise DataError(
            f"The {role} of {where}, row {row}, is not a text, but {value[:60]}. Say which column holds the texts with "
            f"--columns {role}=..., or make them strings."
        )


def with_class_labels(
    train: Dataset, evals: Mapping[str, Dataset], names: list[str] | None = None
) -> tuple[Dataset, dict[str, Dataset], list[str]]:
    """Return all sets with the label as a number from 0 on in the column `labels`, and the names of the classes.

    Labels may be a `ClassLabel`, numbers, strings or bools. Rows without a label, or with the label -1, are left out.
    `names` are the classes if they are known already: the sets need not hold all of them.
    """
    sets = {name: _discrete(rows, name or "the training set") for name, rows in {"": train, **evals}.items()}
    train, evals = sets[""], {name: sets[name] for name in evals}
    if names is not None:
        sets = {name: _as_known(rows, names) for name, rows in sets.items()}
    elif isinstance(train.features["label"], ClassLabel):
        names = list(train.features["label"].names)
        for name, rows in evals.items():
            other = rows.features["label"]
            if list(getattr(other, "names", names)) != names or "int" not in other.dtype:
                raise ValueError(f"The labels of {name!r} are not those of the training set, but {other}.")
    else:
        values = _distinct_labels(sets)
        if all(isinstance(value, int) for value in values):
            names = numbered_classes(values, lambda value: _first_with(sets, value))
        else:
            names = [str(value) for value in values]
            sets = {name: _numbered(rows, values) for name, rows in sets.items()}
    for name, rows in sets.items():
        labels = rows.with_format(None)["label"][:]
        if any(label is None or label < 0 for label in labels):
            keep = [i for i, label in enumerate(labels) if label is not None and label >= 0]
            if not keep and len(labels):
                raise ValueError(f"No row of {name or 'the training set'} has a label: its labels are hidden.")
            first = next(i for i, label in enumerate(labels) if label is None or label < 0)
            logger.warning(
                "%d of %d rows of %s have no label, the first is row %d. They are left out.",
                len(labels) - len(keep), len(labels), name or "the training set", first,
            )  # fmt: skip
            sets[name] = rows.select(keep)
    renamed = {name: rows.rename_column("label", "labels") for name, rows in sets.items()}
    return renamed.pop(""), renamed, names


def numbered_classes(values: Sequence[int], place: Callable[[int], str]) -> list[str]:
    """Return the names of the classes 0, 1, ... up to the last of some sorted numbers; `place` tells where one is.

    Data with few rows need not hold all classes, but a number far above their count is not a class's: a head would get
    an output for every number below it.
    """
    lowest, highest = values[0], values[-1]
    if lowest < 0:
        raise DataError(f"Label {lowest} of {place(lowest)}, is below 0: classes are numbered 0, 1, ... (-1: none).")
    if highest >= max(_FEW_CLASSES, _SPREAD * len(values)):
        raise DataError(
            f"Label {highest} of {place(highest)}, is far above the number of distinct labels, {len(values)}: classes "
            "are numbered 0, 1, ... without large gaps. If max_train_samples leaves most of them out, raise it. Else "
            "number them anew (dataset.class_encode_column), make them strings, or say which column holds the "
            "classes with --columns."
        )
    return [str(value) for value in range(highest + 1)]


def _first_with(sets: Mapping[str, Dataset], label: Any) -> str:
    """Return the set and the row of a label."""
    for name, rows in sets.items():
        labels = rows.with_format(None)["label"][:]
        if label in labels:
            return f"{name or 'the training set'}, row {labels.index(label)}"
    raise KeyError(label)


def _discrete(rows: Dataset, where: str) -> Dataset:
    """Return the rows with labels that are whole numbers or strings; whole floats come from files with empty cells."""
    feature = rows.features["label"]
    if getattr(feature, "dtype", "list") in ("list", "dict"):
        row, label = next(
            ((i, x) for i, x in enumerate(rows.with_format(None)["label"][:]) if x is not None), (0, None)
        )
        raise DataError(
            f"Label {str(label)[:60]} of {where}, row {row}, is not one class, but {feature}. "
            "Say which column holds the classes with --columns label=..."
        )
    if feature.dtype == "bool":
        return rows.cast_column("label", Value("string"))
    if "float" not in feature.dtype:
        return rows
    labels = np.array(rows.with_format(None)["label"][:], dtype=float)
    odd = np.flatnonzero(~np.isnan(labels) & (labels != np.round(labels)))
    if len(odd):
        raise DataError(
            f"Label {labels[odd[0]]} of {where}, row {odd[0]}, is a fraction, and a class is a whole number or a name. "
            "Say which column holds the classes with --columns label=..., or group the values into classes."
        )
    return rows.map(
        lambda labels: {"label": [None if label is None or label != label else int(label) for label in labels]},
        input_columns="label",
        batched=True,
        features=Features({**rows.features, "label": Value("int64")}),
    )


def _as_known(rows: Dataset, names: list[str]) -> Dataset:
    """Return the rows with their labels as places among known names."""
    feature = rows.features["label"]
    if isinstance(feature, ClassLabel) and list(feature.names) != names:
        rows = rows.map(
            lambda labels: {"label": [None if x is None or x < 0 else feature.names[x] for x in labels]},
            input_columns="label",
            batched=True,
            features=Features({**rows.features, "label": Value("string")}),
        )
    given, values = rows, _distinct_labels({"": rows}) if len(rows) else []
    if all(isinstance(value, int) for value in values):
        unknown = [value for value in values if not 0 <= value < len(names)]
    else:
        unknown = [value for value in values if value not in names]
        rows = _numbered(rows, names)
    if unknown:
        row = given.with_format(None)["label"][:].index(unknown[0])
        raise DataError(
            f"The label {unknown[0]!r} (row {row}) is none of the model's {len(names)}: {', '.join(names[:5])} ..."
        )
    return rows


def tell_truncated(sets: Mapping[str, Dataset], length: int) -> None:
    """Log how many texts of each set were cut off at `length` tokens, or end just there."""
    for name, rows in sets.items():
        lists = chunks(rows, "input_ids") if len(rows) else ()
        full = sum(int(np.sum(values.widths >= length)) for _, values in lists if values.widths is not None)
        if full:
            logger.warning(
                "%d of %d texts of %s fill max_length=%d tokens: what is longer is cut off. --max_length keeps more.",
                full, len(rows), name, length,
            )  # fmt: skip


def _distinct_labels(sets: Mapping[str, Dataset]) -> list[Any]:
    """Return the labels of all sets in order, without -1 and empty ones."""
    found = {label for rows in sets.values() for label in rows.with_format(None)["label"][:]} - {-1, None}
    if not found:
        raise ValueError("No row has a label: all are empty or -1.")
    if len({type(label) for label in found}) > 1:
        raise ValueError(f"The labels are of several kinds: {', '.join(sorted({type(x).__name__ for x in found}))}.")
    return sorted(found)


def _numbered(rows: Dataset, values: list[Any]) -> Dataset:
    """Return the rows with the place of their label among `values`, -1 for an empty one."""
    index = {value: i for i, value in enumerate(values)}
    return rows.map(
        lambda labels: {"label": [index.get(label, -1) for label in labels]},
        input_columns="label",
        batched=True,
        features=Features({**rows.features, "label": Value("int64")}),  # else it stays the strings' kind
    )
