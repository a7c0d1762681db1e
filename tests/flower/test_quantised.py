"""Clients whose half of the base is quantised."""

from pathlib import Path
from typing import Any

import pytest

from hf_coefsfl.split import load_client
from hf_coefsfl.split.quantized import bits_of
from tests.support.deployed import Site
from tests.support.federated import rounds, same, weights
from tests.support.quantised import need_bitsandbytes

need_bitsandbytes()


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "nf4"])
def test_the_network_changes_nothing(kind: str, tmp_path: Path) -> None:
    """The half is the one that `coefsfl split` writes, and the server compares its bits with its own."""

    class Quantised(Site):
        def options(self, **changes: Any) -> dict[str, Any]:
            return super().options(**{f"load_in_{8 if kind == 'int8' else 4}bit": True}, **changes)

    site = Quantised(tmp_path)
    simulated = site.simulated(num_rounds=1)
    deployed, _ = site.deployed(num_rounds=1)
    assert bits_of(load_client(tmp_path / "half").model) == kind
    assert same(weights(simulated), weights(deployed))
    assert simulated.ledger.entries == deployed.ledger.entries and rounds(simulated) == rounds(deployed)
