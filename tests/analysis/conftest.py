"""A tiny model whose costs are known in closed form."""

from __future__ import annotations

import pytest

from hf_coefsfl.analysis.cost import CostModel
from tests.support.federated import tiny_vit


@pytest.fixture(scope="module")
def tiny() -> CostModel:
    return CostModel(tiny_vit(attn_implementation="eager"))
