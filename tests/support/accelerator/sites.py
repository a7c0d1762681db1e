"""Flower's deployment on the emulated device: the clients' process has it too."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.support.accelerator.runs import DEVICE
from tests.support.deployed import ImageSite, Site
from tests.support.federated import rounds, same, weights


def equals_the_simulation(folder: Path, kind: type[Site], method: str) -> None:
    """Over a grid to the same bits as in one process, with dropout."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = DEVICE
    site = kind(folder, dropout=0.1)
    simulated = site.simulated(method=method, use_cpu=False)
    deployed, _ = site.deployed(method=method, use_cpu=False)
    for run in (simulated, deployed):
        assert {str(p.device) for p in run.split.model.parameters()} == {DEVICE}
    assert same(weights(simulated), weights(deployed)), "other weights"
    assert rounds(simulated) == rounds(deployed)
    assert simulated.ledger.entries == deployed.ledger.entries


def sites() -> dict[str, Callable[[Path], None]]:
    return {
        "coef_j on texts": partial(equals_the_simulation, kind=Site, method="coef_j"),
        "acc_sfl on texts": partial(equals_the_simulation, kind=Site, method="acc_sfl"),
        "gas on images": partial(equals_the_simulation, kind=ImageSite, method="gas"),
    }
