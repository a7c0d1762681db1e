"""Gaussian noise on smashed data: what is sent, and that the displacement stays free of it."""

import math
from pathlib import Path

import pytest
import torch

from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.noise import lasting_noise
from tests.support.federated import config, same, trainer, weights


def test_the_noise_of_a_batch() -> None:
    """The same in every pass of a round; another for another batch, round or client; of the right size."""
    s = torch.randn(20, 50, 30)
    setting = RoundContext(0, round_index=1, client=2, noise=0.5)
    drawn = setting.with_noise(s, 3, {}) - s
    assert torch.equal(setting.with_noise(s, 3, {}) - s, drawn)
    assert math.isclose(drawn.std().item(), 0.5, rel_tol=0.02) and abs(drawn.mean().item()) < 0.01
    others = [
        (RoundContext(0, 1, 2, noise=0.5), 4),
        (RoundContext(0, 2, 2, noise=0.5), 3),
        (RoundContext(0, 1, 3, noise=0.5), 3),
        (RoundContext(0, 1, 2, noise=0.5, noise_secret=b"7"), 3),
    ]
    for other, batch in others:
        assert abs(correlation(other.with_noise(s, batch, {}) - s, drawn)) < 0.05
    assert RoundContext(0, 1, 2).with_noise(s, 3, {}) is s


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_the_lasting_noise_is_normal() -> None:
    drawn = lasting_noise(b"secret", {"x": torch.arange(40)}, torch.empty(40, 100, 25)).double()
    assert abs(drawn.mean()) < 0.02 and abs(drawn.var() - 1) < 0.03 and abs((drawn**4).mean() - 3) < 0.15
    assert abs(correlation(drawn[:, ::2], drawn[:, 1::2])) < 0.02  # neighbours
    rows = torch.corrcoef(drawn.flatten(1)) - torch.eye(40)
    assert rows.abs().max() < 0.12  # 0.02 is the deviation of each of 780


@pytest.mark.parametrize("left", [False, True])
def test_a_sample_keeps_its_noise_in_every_batch(left: bool) -> None:
    """Whatever stands beside it, before or after it, and however long the padding is; not so with another secret."""
    texts = [torch.arange(1, 4), torch.arange(4, 11), torch.arange(2, 7)]

    def noise(order: list[int], length: int, secret: bytes = b"s") -> list[torch.Tensor]:
        ids, mask = torch.zeros(len(order), length, dtype=torch.long), torch.zeros(len(order), length)
        places = {n: slice(length - len(texts[n]), None) if left else slice(len(texts[n])) for n in order}
        for row, n in enumerate(order):
            ids[row, places[n]], mask[row, places[n]] = texts[n], 1
        drawn = lasting_noise(secret, {"input_ids": ids, "attention_mask": mask}, torch.empty(len(order), length, 6))
        return [drawn[order.index(n), places[n]] for n in sorted(order)]

    expected = noise([0, 1, 2], 7)
    assert all(map(torch.equal, noise([2, 0, 1], 12), expected))
    assert torch.equal(noise([1], 30)[0], expected[1])
    assert not any(torch.isclose(a, b).any() for a, b in zip(noise([0, 1, 2], 7, b"t"), expected, strict=True))
    assert not torch.isclose(expected[0], expected[2][:3]).any()


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
