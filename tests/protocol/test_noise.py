"""Gaussian noise on smashed data: what is sent, and that the displacement stays free of it."""

import math
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load

from hf_coefsfl.flower.wire import chunk_of
from hf_coefsfl.protocol.context import RoundContext
from tests.support.deployed import LocalGrid, Site
from tests.support.federated import config, same, trainer, weights


def test_the_noise_of_a_batch() -> None:
    """The same in every pass of a round; another for another batch, round, client or secret; of the right size."""
    s = torch.randn(20, 50, 30)
    setting = RoundContext(0, round_index=1, client=2, noise=0.5)
    drawn = setting.with_noise(s, 3) - s
    assert torch.equal(setting.with_noise(s, 3) - s, drawn)
    assert math.isclose(drawn.std().item(), 0.5, rel_tol=0.02) and abs(drawn.mean().item()) < 0.01
    others = [
        (RoundContext(0, 1, 2, noise=0.5), 4),
        (RoundContext(0, 2, 2, noise=0.5), 3),
        (RoundContext(0, 1, 3, noise=0.5), 3),
    ]
    others.append((RoundContext(0, 1, 2, noise=0.5, noise_seed=7), 3))
    for other, batch in others:
        assert (
            abs(torch.corrcoef(torch.stack([(other.with_noise(s, batch) - s).flatten(), drawn.flatten()]))[0, 1]) < 0.05
        )
    assert RoundContext(0, 1, 2).with_noise(s, 3) is s


def test_training_with_noise(tmp_path: Path) -> None:
    """None changes nothing, some changes the weights, and the first displacement of a round is still 0."""
    runs = [trainer(tmp_path / str(noise), smashed_noise=noise, num_rounds=2) for noise in (0.0, 0.3)]
    plain = trainer(tmp_path / "plain", num_rounds=2)
    for run in (*runs, plain):
        run.train()
    assert same(weights(runs[0]), weights(plain)) and not same(weights(runs[1]), weights(plain))
    # The displacement is that of the weights, not of two draws, which would be 0.3 √(2 · 5 · 16) = 3.8.
    logged = [entry["displacement_norm"] for entry in runs[1].state.log_history if "displacement_norm" in entry]
    assert 0 < logged[-1] < 1


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "much"])
def test_what_is_no_noise(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="smashed_noise"):
        config(tmp_path, smashed_noise=value)


def test_a_deployed_client_draws_its_own(tmp_path: Path) -> None:
    """Two runs of the same seed send other noise, so that the server cannot subtract it."""
    site = Site(tmp_path)

    def sent(grid: LocalGrid) -> torch.Tensor:
        reply = next(m for m in grid.received if _is_upload(m))
        return load(chunk_of(reply.content))["0.activations"]

    def _is_upload(message: Message) -> bool:
        return "payload" in message.content and b"0.activations" in chunk_of(message.content)

    first, second = (sent(site.deployed(num_rounds=1, num_clients=1, smashed_noise=0.5)[1]) for _ in range(2))
    # Two independent draws over the same activations: their difference has a deviation of 0.5 √2.
    assert first.shape == second.shape and 0.5 < (first - second).std() < 0.9
