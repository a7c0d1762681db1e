"""A text without a token is refused the same way in a simulation and at a client of a deployment."""

from typing import Any

import pytest
from datasets import load_dataset

from hf_coefsfl.federation.data_checks import DataError
from hf_coefsfl.flower.client_node import ClientNode
from hf_coefsfl.flower.errors import ClientFailure
from tests.support.deployed import Site

EMPTY = r"The text of client {}, row 3, is empty: the tokenizer gives no token that a model could read. Fill it in"


class Silent(Site):
    """One site has a row without words, and the tokenizer adds no tokens of its own."""

    def row(self, site: int, i: int) -> dict[str, Any]:
        return super().row(site, i) | ({"text": ""} if (site, i) == (1, 3) else {})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Silent:
    return Silent(tmp_path_factory.mktemp("silent"))


def test_simulated(site: Silent) -> None:
    row = load_dataset(str(site.folder / "all"))["train"]["text"].index("")
    told = EMPTY.replace("row 3", f"row {row}").format(1)
    with pytest.raises(DataError, match=told):
        site.simulated(on_client_failure="raise")
    run = site.simulated(num_rounds=4, method="vanilla")  # skips a client that fails
    failed = [entry["round"] for entry in run.ledger.entries if "failure" in entry and entry["client"] == "1"]
    assert failed == [1, 2, 3, 4]  # wherever the row stands in its batch


def test_deployed(site: Silent) -> None:
    """The client does not join, as it would fail in every round."""
    site.make_half()
    config = site.run_config()
    assert ClientNode(config, site.node_config(0)).num_samples == 7
    with pytest.raises(ClientFailure, match=EMPTY.format(1)):
        ClientNode(config, site.node_config(1))
