"""The examples in docstrings give what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import hf_coefsfl

ROOT = Path(hf_coefsfl.__file__).parent
SHOWN = sorted(path.relative_to(ROOT.parent) for path in ROOT.rglob("*.py") if ">>> " in path.read_text())


@pytest.mark.parametrize("path", SHOWN, ids=str)
def test_examples_of(path: Path) -> None:
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    assert not doctest.testmod(import_module(name)).failed
