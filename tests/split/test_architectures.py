"""Every architecture in transformers: exact, or refused with a reason. See docs/architectures.md."""

from __future__ import annotations

import re

import pytest

from benchmarks.architectures import sweep
from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_architecture_is_exact_or_refused_with_a_reason() -> None:
    results = sweep()
    assert [r for r in results if r.verdict in ("wrong", "error")] == []
    assert all("`" in r.reason or "Use a model" in r.reason for r in results if r.verdict == "refused")
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    documented = re.search(r"\*\*(\d+) are exact\*\*", page)
    assert documented, "docs/architectures.md does not say how many are exact"
    assert sum(r.verdict == "exact" for r in results) >= int(documented[1])


@pytest.mark.parametrize("model_type", ["roformer", "xlm", "poolformer", "squeezebert"])
def test_mechanisms(model_type: str) -> None:
    """Positions made under no_grad; parallel lists; lists of lists; blocks that are called by `forward`."""
    results = sweep([model_type])
    assert results
    assert {r.name: r.verdict for r in results} == {r.name: "exact" for r in results}, results


def test_weights_that_the_model_changes_itself() -> None:
    (result,) = sweep(["rwkv"])
    assert result.verdict == "refused"
    assert re.search(r"changes its own parameters \('rwkv.blocks.0.*' and \d+ others\).*Use a model", result.reason)
