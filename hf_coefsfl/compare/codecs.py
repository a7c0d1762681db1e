"""Rows that differ in their codecs only: the one in float32 that each is compared with, and what they send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from ..protocol.adapters import AS_THEY_ARE
from ..protocol.codecs import resolve_codecs
from .differences import Difference, Place, headings, paired
from .results import Result, exchange_mib, mean_or_none

_CODECS = ("exchange_dtype", "exchange_codec", "adapter_codec")  # options of a run
FLOAT32 = "float32"


def families(results: Sequence[Result]) -> list[list[Result]]:
    """Return the rows of one place that differ in their codecs only, the one in float32 first.

    A row without such others is left out, and so are rows of which none is in float32.
    """
    alike: dict[str, list[Result]] = {}
    for result in results:
        if result.cell.refused is None:
            others = {name: value for name, value in _options(result).items() if name not in _CODECS}
            alike.setdefault(json.dumps(others, sort_keys=True, default=str), []).append(result)
    found = []
    for members in alike.values():
        plain = [result for result in members if _in_float32(_options(result))]
        if plain and len(members) > 1:
            found.append([plain[0], *(result for result in members if result is not plain[0])])
    return found


def float32_rows(places: Mapping[Place, Sequence[Result]]) -> dict[str, str]:
    """Return the name of the row in float32 for each row with codecs."""
    groups = [family for results in places.values() for family in families(results)]
    return {r.cell.variant.name: plain.cell.variant.name for plain, *others in groups for r in others}


def codec_name(result: Result, plain: Result) -> str:
    """Return what a row's name says of its codecs: "A, int4" beside the method "A" is "int4"."""
    name = result.cell.variant.name.removeprefix(plain.cell.variant.name).strip(" ,:()")
    return name or FLOAT32


def has_all_seeds(result: Result, plain: Result) -> bool:
    """Return whether a row has a run for each run of its float32 row: their means can be compared."""
    seeds, wanted = ({run.options["seed"] for run, _ in r.runs} for r in (result, plain))
    return seeds >= wanted


def mib_rows(places: Mapping[Place, Sequence[Result]]) -> list[dict[str, str]]:
    """Return a row for each method and codec: MiB of the exchange and of all at each place, means over the seeds.

    The last column is how many times fewer bytes the exchange has than in float32, in the mean over the places.
    """
    columns = headings(list(places))
    shown: dict[str, dict[str, str]] = {}
    fewer: dict[str, list[float]] = {}
    for place, results in places.items():
        for family in families(results):
            for result in family:
                name = result.cell.variant.name
                exchange = mean_or_none([exchange_mib(summary) for _, summary in result.runs])
                cells = shown.setdefault(name, {})
                if exchange is not None:
                    total = mean(float(summary["mib"]) for _, summary in result.runs)
                    mark = "" if has_all_seeds(result, family[0]) else "*"
                    cells[columns[place]] = f"{exchange:.1f} / {total:.1f}{mark}"
                if result is not family[0] and (ratio := _ratio(family[0], result)) is not None:
                    fewer.setdefault(name, []).append(ratio)
    return [
        {"Method": name}
        | {heading: cells.get(heading, "") for heading in columns.values()}
        | {"fewer": f"{mean(fewer[name]):.1f}" if name in fewer else ""}
        for name, cells in shown.items()
        if cells
    ]


def mean_difference_rows(places: Mapping[Place, Sequence[Result]]) -> list[dict[str, str]]:
    """Return a row for each codec that every method has: its difference to float32 in the mean over the methods."""
    columns = headings(list(places))
    pairs: dict[str, dict[Place, dict[str, list[float]]]] = {}  # by codec, place and method
    methods: dict[str, None] = {}
    for place, results in places.items():
        by_name = {result.cell.variant.name: result for result in results}
        for plain, *others in families(results):
            method = plain.cell.variant.name
            methods[method] = None
            for result in others:
                found = paired(by_name, result.cell.variant.name, method)
                if found is not None:
                    pairs.setdefault(codec_name(result, plain), {}).setdefault(place, {})[method] = found
    rows = []
    for codec, by_place in pairs.items():
        groups = {place: list(d.values()) for place, d in by_place.items() if len(d) == len(methods) > 1}
        if groups:
            row = {heading: str(Difference.of(groups[p])) if p in groups else "" for p, heading in columns.items()}
            everywhere = [group for found in groups.values() for group in found]
            all_of_them = {"all": str(Difference.of(everywhere)) if len(groups) == len(places) else ""}
            rows.append({"Codecs": codec} | row | (all_of_them if len(places) > 1 else {}))
    return rows


def _ratio(plain: Result, result: Result) -> float | None:
    """Return by how much more the float32 row sends, over the seeds that both have."""
    theirs, ours = ({run.options["seed"]: exchange_mib(s) for run, s in r.runs} for r in (plain, result))
    both = [seed for seed in ours if theirs.get(seed) is not None and ours[seed]]
    return sum(theirs[seed] or 0.0 for seed in both) / sum(ours[seed] or 0.0 for seed in both) if both else None


def _options(result: Result) -> Mapping[str, Any]:
    return result.cell.first()[0].options


def _in_float32(options: Mapping[str, Any]) -> bool:
    codecs = resolve_codecs(options.get("exchange_dtype", FLOAT32), options.get("exchange_codec"))
    return {*codecs.values(), options.get("adapter_codec", AS_THEY_ARE)} == {FLOAT32, AS_THEY_ARE}
