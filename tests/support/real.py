"""Real data and weights, which lie beside the clone on some machines and are never committed."""

import os
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDER = Path(os.environ.get("HF_COEFSFL_SHARED", ROOT.parent / "shared"))


def real(path: str) -> str:
    """Return the whole path of, say, data/sick_nli; without it the test is skipped, with the reason."""
    if not (FOLDER / path).exists():
        pytest.skip(f"no {path} beside the clone; HF_COEFSFL_SHARED may name the folder that holds it")
    return str(FOLDER / path)
