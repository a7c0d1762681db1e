"""Helpers for the tests of GAS."""

import torch

from hf_coefsfl.methods.parts.class_statistics import ClassStatistics, to_tensors


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def identical(a: ClassStatistics, b: ClassStatistics) -> bool:
    ours, theirs = to_tensors(a), to_tensors(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
