"""docs/bytes.md has the figures of the archive: what `coefsfl compare codecs --report_only` prints."""

from __future__ import annotations

from statistics import mean

import pytest

from hf_coefsfl.compare.differences import Difference, paired
from hf_coefsfl.compare.results import Result, exchange_mib
from tests.support.archived import named, results

PAGE, SPEC = "docs/bytes.md", "compare/codecs.yaml"
MIB = {"float32": "CoeF-W", "`compact`": "CoeF-W, int3 and topk8"}


def place(column: str) -> dict[str, Result]:
    """The results of a column, by row."""
    return {row: result for (found, row), result in results(SPEC).items() if found == column}


def row_of(text: str) -> str:
    """The spec's row of one in the page: "CoeF-W" under `compact` is "CoeF-W, int3 and topk8"."""
    return text if ", " in text else f"{text}, int3 and topk8"


def minus(difference: Difference) -> str:
    return str(difference).replace("-", "−")


@pytest.mark.parametrize("corner", ["`compact` to float32", "other codecs to float32"])
def test_differences_are_those_of_the_archive(corner: str) -> None:
    wrong, shown = {}, set()
    for text, cells in named(PAGE, corner).items():
        row, method = row_of(text), text.partition(", ")[0]
        groups = []
        for column in (c for c in cells if c not in ("mean", "fewer")):
            found = paired(place(column), row, method)
            assert found is not None and len(found) == 3
            groups.append(found)
            shown.add((column, row))
            if cells[column] != minus(Difference.of([found])):
                wrong[text, column] = f"{cells[column]!r}, the archive has {minus(Difference.of([found]))!r}"
        if cells["mean"] != minus(Difference.of(groups)):
            wrong[text, "mean"] = f"{cells['mean']!r}, the archive has {minus(Difference.of(groups))!r}"
        if "fewer" in cells:
            ratios = [exchange(place(c)[method]) / exchange(place(c)[row]) for c in cells if c not in ("mean", "fewer")]
            if cells["fewer"] != f"{mean(ratios):.1f}":
                wrong[text, "fewer"] = f"{cells['fewer']!r}, the archive has {mean(ratios):.1f}"
    assert not wrong
    few = {(c, r) for c, r in results(SPEC) if r.endswith(", int3 and topk8")}
    assert shown == (few if "compact" in corner else {(c, r) for c, r in results(SPEC) if ", " in r} - few)


def exchange(result: Result) -> float:
    found = [exchange_mib(summary) for _, summary in result.runs]
    return mean(value for value in found if value is not None)


def test_mib_are_those_of_the_archive() -> None:
    for text, cells in named(PAGE, "CoeF-W, exchange in MiB").items():
        expected = {column: f"{exchange(place(column)[MIB[text]]):.1f}" for column in cells}
        assert cells == expected


def test_the_comparison_is_complete() -> None:
    assert not [where for where, result in results(SPEC).items() if not result.complete]
