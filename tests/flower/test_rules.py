"""The robust rules are those of Flower's strategies."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from flwr.server.strategy.aggregate import aggregate_krum, aggregate_median, aggregate_trimmed_avg

from hf_coefsfl.federation import averaging
from hf_coefsfl.federation.averaging import federated_average


@pytest.mark.parametrize("clients", [7, 10])
@pytest.mark.parametrize("hostile", [1, 2])
@pytest.mark.parametrize("block", [2**24, 50])
def test_rules_are_flowers(clients: int, hostile: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in blocks of a few entries, and whatever samples clients claim."""
    monkeypatch.setattr(averaging, "_BLOCK", block)
    generator = torch.Generator().manual_seed(clients)
    vectors = {3 * k: torch.randn(40, generator=generator) * (1 + k % 4) for k in range(clients)}
    samples = {client: float(1 + client) for client in vectors}
    results = [([vector.numpy()], 1) for vector in vectors.values()]
    expected = {
        "median": aggregate_median(results),
        "trimmed_mean": aggregate_trimmed_avg(results, (hostile + 0.5) / clients),
        "krum": aggregate_krum(results, hostile, clients - hostile - 2),
    }
    for rule, (vector,) in expected.items():
        owners = dict.fromkeys(vectors, 0)
        found = federated_average(vectors, samples, owners, 40, Accelerator(cpu=True), rule, hostile)
        np.testing.assert_allclose(found.numpy(), vector, rtol=1e-5, atol=1e-6, err_msg=rule)
