"""The deployment: the same results as in a simulation, whatever the network and its clients do."""

import json
from pathlib import Path

import pytest
from deployed import Site
from federated import FEWER_PASSES, rounds, same, weights

from hf_coefsfl import METHODS


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("HF_COEFSFL_WORK", str(tmp_path / "work"))
    return Site(tmp_path)


@pytest.mark.parametrize("method", sorted(name for name in METHODS if METHODS[name].deployable))
def test_the_network_changes_nothing(site: Site, method: str) -> None:
    options = {"method": method, "method_kwargs": json.dumps(FEWER_PASSES.get(method, {}))}
    simulated = site.simulated(**options)
    deployed, _ = site.deployed(**options)
    assert same(weights(simulated), weights(deployed))
    assert simulated.ledger.entries == deployed.ledger.entries
    assert rounds(simulated) == rounds(deployed)
