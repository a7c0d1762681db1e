"""The files of a run with two sites; no pictures."""

import pytest

from tests.support.deployed import Site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("two"))


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have model cards come without their picture, which takes longer than a round of these runs."""
    monkeypatch.setattr("hf_coefsfl.trainer.model_card.can_plot", lambda: False)
