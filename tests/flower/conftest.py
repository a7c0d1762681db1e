"""The files of a run with two sites."""

import pytest

from tests.support.deployed import Site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("two"))
