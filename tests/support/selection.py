"""A few cases for `make test`, all of them for `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(*fast: Any, of: Iterable[Any]) -> list[Any]:
    """Return the cases of a `parametrize`; all but the named ones are marked slow."""
    cases = list(of)
    missing = [case for case in fast if case not in cases]
    assert not missing, f"{missing} are not among {cases}"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*value, marks=[] if case in fast else pytest.mark.slow)
        for case, value in zip(cases, values, strict=True)
    ]
