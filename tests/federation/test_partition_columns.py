"""What a column that decides the partition may hold."""

import datasets
import numpy as np
import pytest
import torch

from hf_coefsfl.federation.partition import by_column, column_values, dirichlet
from tests.support.partitions import LABELS, hf_dataset, rows


@pytest.mark.parametrize(
    "labels",
    [
        LABELS.tolist(),
        LABELS.astype(np.uint8),
        LABELS.astype(float),
        torch.tensor(LABELS),
        list(torch.tensor(LABELS)),
        list(LABELS),
        [f"class {label}" for label in LABELS],
        np.array([f"class {label}" for label in LABELS]),
    ],
    ids=["ints", "uint8", "whole floats", "tensor", "tensors", "numpy ints", "strings", "numpy strings"],
)
def test_equal_labels_of_any_type_give_equal_partitions(labels):
    partition = dirichlet(labels, 5, 0.5, 0)
    assert rows(partition) == rows(dirichlet(LABELS, 5, 0.5, 0))
    assert (partition.counts(labels)[1] == partition.counts(LABELS)[1]).all()


class DictDataset(torch.utils.data.Dataset):
    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        if row >= len(self):
            raise IndexError(row)
        return {"pixel_values": torch.zeros(2), "label": torch.tensor(self.labels[row])}


def test_column_values_of_every_kind_of_dataset():
    labels = [2, 0, 1, 2]
    class_label = hf_dataset(text=list("abcd"), label=labels).cast_column(
        "label", datasets.ClassLabel(names=["x", "y", "z"])
    )
    for dataset in (
        class_label,
        class_label.with_format("torch"),
        class_label.with_transform(lambda batch: {"n": [len(text) for text in batch["text"]]}),
        [{"labels": label} for label in labels],
        DictDataset(labels),
        torch.utils.data.Subset(DictDataset([9, *labels]), [1, 2, 3, 4]),
    ):
        assert column_values(dataset).tolist() == labels
    assert column_values(class_label, "text").tolist() == list("abcd")
    assert column_values(class_label.select([3, 1])).tolist() == [2, 0]  # rows as the dataset shows them


def test_labels_come_before_label():
    assert column_values(hf_dataset(label=[0, 1], labels=[1, 1])).tolist() == [1, 1]


def test_images_are_not_decoded():
    dataset = hf_dataset(image=[{"bytes": b"not an image", "path": None}] * 3, label=[0, 1, 0])
    dataset = dataset.cast_column("image", datasets.Image())
    with pytest.raises(Exception, match="identify image"):
        dataset[0]
    assert column_values(dataset).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match=r"column 'image': one discrete value per row.*Image"):
        column_values(dataset, "image")


@pytest.mark.parametrize(
    ("dataset", "column", "message"),
    [
        (
            hf_dataset(text=["a"], x=[1]),
            "speaker",
            r"partition_column='speaker': .*only text(, x)?\. Name one of these",
        ),
        ([{"text": "a"}], "speaker", r"partition_column='speaker': .*only text(, x)?\. Name one of these"),
        (hf_dataset(text=["a"], x=[1]), None, r"no label column \(labels or label\).*one of \['text', 'x'\]"),
        (hf_dataset(labels=[[0, 1], [1]]), None, r"column 'labels': one discrete value per row.*partition='iid'"),
        (hf_dataset(answers=[{"start": 1}]), "answers", "column 'answers': one discrete value per row"),
        ([{"labels": [0, 1]}, {"labels": [1]}], None, "column 'labels': one discrete value per row"),
        ([{"labels": torch.tensor([0, 1])}], None, "column 'labels': one discrete value per row"),
        (hf_dataset(label=[0.5, 1.0]), None, r"continuous \(e.g. 0.5\).*bin them"),
        (hf_dataset(label=[0, None, None]), None, "2 of 3 values are missing .* row 1"),
        (hf_dataset(label=["a", None]), None, "1 of 2 values are missing .* row 1"),
        ([{"label": 0.0}, {"label": float("nan")}], None, "1 of 2 values are missing .* row 1"),
        ([{"label": 1}, {"label": "1"}], None, "mix strings with other types"),
        ([(1, 2)], None, "must be dicts to read a column, got tuple"),
        (hf_dataset(label=[]), None, "no rows"),
        (datasets.DatasetDict(train=hf_dataset(label=[1])), None, r"pass one of them: \['train'\]"),
        (hf_dataset(label=[1]).to_iterable_dataset(), None, "with a length is needed.*IterableDataset"),
    ],
)
def test_column_errors_say_what_is_there(dataset, column, message):
    with pytest.raises(ValueError, match=message):
        column_values(dataset, column)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0, 1], [1]], "one discrete value per row"),
        (np.zeros((4, 2)), "one discrete value per row"),
        (torch.zeros(4, 2), "one discrete value per row"),
        (np.array([0.0, np.nan]), "missing"),
        (np.linspace(0, 1, 8), "continuous"),
        (["a", 1], "mix strings"),
        ([], "no rows"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels, message):
    for refuse in (lambda: dirichlet(labels, 1, 1.0, 0), lambda: by_column(labels)):
        with pytest.raises(ValueError, match=message):
            refuse()
