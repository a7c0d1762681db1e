"""The code in the documentation runs."""

import re
from pathlib import Path
from typing import Any

import pytest

from hf_coefsfl import METHODS
from tests.support.federated import trainer
from tests.support.paths import ROOT


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_no_placeholder_is_left() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    assert not [page.name for page in pages if re.search(r"@[A-Z]+@", page.read_text())]


def test_the_method_of_the_page_is_short_and_trains(tmp_path: Path) -> None:
    source = code_blocks("docs/adding_a_method.md")[0]
    assert len([line for line in source.splitlines() if line.strip()]) < 20
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(source, "adding_a_method.md", "exec", dont_inherit=True), scope)
    try:
        run = trainer(tmp_path, method="fading_reuse", method_kwargs={"half_life": 0.5}, num_rounds=2)
        run.train()
        assert run.state.log_history[1]["correction_ratio"] > 0
        with pytest.raises(ValueError, match="no option 'halflife'"):
            trainer(tmp_path, method="fading_reuse", method_kwargs={"halflife": 0.5})
    finally:
        METHODS.pop("fading_reuse")
