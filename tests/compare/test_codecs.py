"""Rows that differ in their codecs only: their float32 row, bytes, differences and picture."""

from pathlib import Path
from typing import Any

import pytest

from hf_coefsfl.compare import expand, parse_spec
from hf_coefsfl.compare.codecs import codec_name, families, float32_rows, mean_difference_rows, mib_rows
from hf_coefsfl.compare.differences import difference_rows
from hf_coefsfl.compare.render.more_tables import more_tables
from hf_coefsfl.compare.render.plots import by_place, write_plots
from hf_coefsfl.compare.results import Result, exchange_mib, gather, run_rows
from tests.support.comparisons import content, summary

KEPT = {"keep_server_optimizer": True}
ROWS: list[Any] = [
    {"method": "vanilla", "name": "V, int4", "settings": {"exchange_codec": "int4"}},
    {"method": "vanilla", "name": "V"},
    {"method": "vanilla", "name": "V, kept", "settings": KEPT},
    {"method": "coef_p", "name": "P", "settings": {"exchange_dtype": "float32"}},
    {"method": "coef_p", "name": "P, int4", "settings": {"exchange_codec": "int4"}},
    {"method": "coef_p", "name": "P, adapters in int8", "settings": {"adapter_codec": "int8"}},
    {"method": "coef_p", "name": "P, 1 pass", "method_kwargs": {"server_passes": 1}},
    {"method": "coef_d", "name": "D, int3", "settings": {"exchange_codec": "int3"}},
    {"method": "coef_d", "name": "D, int4", "settings": {"exchange_codec": "int4"}},
]
SPLITS = [{"name": "IID", "partition": "iid"}, {"name": "skewed", "partition": "dirichlet"}]
SCORES = {"V": 70.0, "V, int4": 69.0, "P": 75.0, "P, int4": 72.0, "P, adapters in int8": 75.5}
SENT = {"V": 80.0, "V, int4": 10.0, "P": 80.0, "P, int4": 8.0}


def results(*missing: tuple[str, str, int], rows: list[Any] = ROWS) -> list[Result]:
    """Two splits and two seeds; of `missing` (row, split, seed) there is no run."""
    spec = parse_spec(content(methods=rows, splits=SPLITS, learning_rates=[0.1], seeds=[0, 1]), "t")
    cells = expand(spec)
    finished = {}
    for cell in cells:
        name = cell.variant.name
        for (_, seed), run in cell.runs.items():
            if (name, cell.split.name, seed) not in missing:
                sent = SENT.get(name, 40.0) * (1 + seed)  # the clients of another seed have more samples
                finished[run.id] = summary(SCORES.get(name, 60.0) + seed) | {"exchange_mib": sent, "mib": sent + 5}
    return gather(spec, cells, finished)


def names(found: list[list[Result]]) -> list[list[str]]:
    return [[result.cell.variant.name for result in family] for family in found]


def test_a_family_differs_in_codecs_only_and_begins_with_float32() -> None:
    places = by_place(results())
    expected = [["V", "V, int4"], ["P", "P, int4", "P, adapters in int8"]]
    assert [names(families(found)) for found in places.values()] == [expected, expected]
    assert float32_rows(places) == {"V, int4": "V", "P, int4": "P", "P, adapters in int8": "P"}


def test_a_row_is_called_by_its_codec() -> None:
    vanilla, coef_p = families(results())[:2]
    assert [codec_name(r, coef_p[0]) for r in coef_p] == ["float32", "int4", "adapters in int8"]
    assert codec_name(coef_p[1], vanilla[0]) == "P, int4"  # of another method: the whole name


def test_each_row_is_compared_with_its_own_method() -> None:
    places = by_place(results())
    rows = {row["Method"]: row for row in difference_rows(places, float32_rows(places))}
    assert {name: row["all"] for name, row in rows.items()} == {
        "V, int4": "-1.0 [-1.0, -1.0]",
        "P, int4": "-3.0 [-3.0, -3.0]",
        "P, adapters in int8": "+0.5 [+0.5, +0.5]",
    }


def test_the_mean_over_methods_is_of_codecs_that_all_have() -> None:
    (row,) = mean_difference_rows(by_place(results()))
    mean = "-2.0 [-2.0, -2.0]"
    assert row == {"Codecs": "int4", "CIFAR-100, IID": mean, "CIFAR-100, skewed": mean, "all": mean}
    (row,) = mean_difference_rows(by_place(results(("P, int4", "IID", 1))))  # one pair is left there
    assert row["CIFAR-100, IID"] == row["all"] == "" and row["CIFAR-100, skewed"] == mean
    assert mean_difference_rows(by_place(results(rows=ROWS[:2]))) == []  # one method


def test_bytes_are_means_over_seeds_and_the_ratio_is_of_the_same_seeds() -> None:
    rows = {row["Method"]: row for row in mib_rows(by_place(results(("P, int4", "IID", 1))))}
    assert list(rows) == ["V", "V, int4", "P", "P, int4", "P, adapters in int8"]
    assert rows["V"] == {
        "Method": "V", "CIFAR-100, IID": "120.0 / 125.0", "CIFAR-100, skewed": "120.0 / 125.0", "fewer": "",
    }  # fmt: skip
    assert rows["V, int4"]["CIFAR-100, IID"] == "15.0 / 20.0" and rows["V, int4"]["fewer"] == "8.0"
    assert rows["P, int4"]["CIFAR-100, IID"] == "8.0 / 13.0*"  # its first seed only,
    assert rows["P, int4"]["fewer"] == "10.0"  # which has fewer bytes in float32 too


def test_adapters_are_taken_off_older_summaries() -> None:
    """Two of 20 clients in each of 3 rounds get and send 2**17 weights: 1 MiB a client and round."""
    old = summary(1.0) | {"mib": 10.0, "num_clients": 20, "participation": 0.1, "num_rounds": 3}
    assert exchange_mib(old) is None
    assert exchange_mib(old | {"client_parameters": 2**17}) == 4.0
    assert exchange_mib(old | {"client_parameters": 2**17, "adapter_codec": "int8"}) is None
    assert exchange_mib(old | {"exchange_mib": 3.0, "adapter_codec": "int8"}) == 3.0


def test_the_report_has_tables_and_a_picture(tmp_path: Path) -> None:
    found = results()
    text = more_tables(found, [])
    titles = [line.strip("*") for line in text.splitlines() if line.startswith("**")]
    assert titles == [
        "Codecs: MiB",
        "Codecs: difference to the same method in float32",
        "Codecs: difference to float32, mean over the methods",
    ]
    assert {row["exchange_mib"] for row in run_rows(found) if row["name"] == "P, int4"} == {8.0, 16.0}
    path, *_ = write_plots(found, tmp_path)
    assert path.name == "codecs.png" and path.stat().st_size > 10_000


@pytest.mark.parametrize("rows", [["vanilla", "coef_p"], ROWS[7:]])
def test_without_a_row_in_float32_nothing_is_shown(tmp_path: Path, rows: list[Any]) -> None:
    found = results(rows=rows)
    assert more_tables(found, []) == ""
    assert "codecs.png" not in [path.name for path in write_plots(found, tmp_path)]


def test_rows_that_have_not_run_are_not_drawn(tmp_path: Path) -> None:
    missing = [("V, int4", split, seed) for split in ("IID", "skewed") for seed in (0, 1)]
    found = results(*missing, rows=ROWS[:2])
    assert [path.name for path in write_plots(found, tmp_path)] == [
        "cifar-100-vit-iid-cut-2.png", "cifar-100-vit-skewed-cut-2.png",
    ]  # fmt: skip
    assert "Codecs: MiB" in more_tables(found, []) and "difference" not in more_tables(found, [])
