"""Federated averaging by hand."""

import pytest
import torch
from accelerate import Accelerator

from hf_coefsfl.federation.averaging import federated_average, flatten, unflatten_


def test_weighted_mean_by_hand() -> None:
    vectors = {2: torch.tensor([1.0, 2.0]), 5: torch.tensor([3.0, -2.0]), 9: torch.tensor([5.0, 0.0])}
    mean = federated_average(vectors, {2: 1.0, 5: 1.0, 9: 2.0}, {2: 0, 5: 0, 9: 0}, 2, Accelerator(cpu=True))
    assert mean.tolist() == [3.5, 0.0]


def test_one_client_is_kept_to_the_bit() -> None:
    vector = torch.randn(1000)
    assert torch.equal(federated_average({0: vector}, {0: 7.0}, {0: 0}, 1000, Accelerator(cpu=True)), vector)


def test_flatten_round_trip() -> None:
    tensors = [torch.randn(2, 3), torch.randn(4), torch.randn(1, 1, 2)]
    copies = [torch.zeros_like(t) for t in tensors]
    unflatten_(copies, flatten(tensors))
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    with pytest.raises(RuntimeError):
        unflatten_(copies, torch.zeros(5))
