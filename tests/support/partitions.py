"""Rows and labels for the tests of partitions."""

import datasets
import numpy as np

from hf_coefsfl.federation.partition import Partition

LABELS = np.random.default_rng(0).integers(0, 10, 10_000)


def rows(partition: Partition) -> list[list[int]]:
    return [client.tolist() for client in partition.indices]


def hf_dataset(**columns) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)
