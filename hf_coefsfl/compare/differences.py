"""Paired differences between methods over seeds, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .results import Result

Place = tuple[str, str, str, int]
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and the interval that holds 95 % of its bootstrap means."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return "+1.2 [+0.4, +2.0]"."""
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> Difference:
        """Return the mean over groups (a task with a split each) of the means over their seeds.

        Seeds are drawn anew within each group, groups are not: the interval is about these tasks and other seeds.
        """
        generator = np.random.default_rng(0)
        drawn = np.zeros(_RESAMPLES)
        for group in groups:
            values = np.asarray(group)
            drawn += generator.choice(values, (_RESAMPLES, len(values))).mean(1) / len(groups)
        low, high = np.quantile(drawn, [0.025, 0.975])
        return cls(float(np.mean([np.mean(group) for group in groups])), float(low), float(high))


def paired(results: Mapping[str, Result], name: str, baseline: str) -> list[float] | None:
    """Return a method's first score minus the baseline's, for each seed that both have; None if fewer than two do.

    Positive is better: the sign is turned for scores of which less is better.
    """
    ours, theirs = (_first_scores(results.get(method)) for method in (name, baseline))
    both = [seed for seed in ours if seed in theirs]
    if len(both) < 2:
        return None
    higher = results[name].runs[0][1].get("higher_is_better", True)
    return [(ours[seed] - theirs[seed]) * (1 if higher else -1) for seed in both]


def _first_scores(result: Result | None) -> dict[int, float]:
    """Return the first score of each seed that has one."""
    runs = result.runs if result else ()
    firsts = {run.options["seed"]: next(iter(summary["scores"].values()), None) for run, summary in runs}
    return {seed: float(value) for seed, value in firsts.items() if value is not None}


def headings(places: Sequence[Place]) -> dict[Place, str]:
    """Return a heading for each place: its task, and of split, model and cut what tells it from the others."""

    def told_apart(by: Sequence[int]) -> int:
        return len({tuple(place[i] for i in by) for place in places})

    shown = [0]
    for more in (2, 1, 3):
        if told_apart([*shown, more]) > told_apart(shown):
            shown = sorted([*shown, more])
    patterns = ("{}", "{}", "{}", "cut {}")
    return {place: ", ".join(patterns[i].format(place[i]) for i in shown) for place in places}


def difference_rows(
    places: Mapping[Place, Sequence[Result]], baseline: str | Mapping[str, str]
) -> list[dict[str, str]]:
    """Return a row for each method: its difference to the baseline at each place, and over all of them.

    Args:
        places: the results of each place.
        baseline: the name of a row, or the names of the rows to compare, each with that of its baseline.
    """
    by_name = {place: {r.cell.variant.name: r for r in found} for place, found in places.items()}
    names = dict.fromkeys(name for found in by_name.values() for name in found if name != baseline)
    baselines = dict.fromkeys(names, baseline) if isinstance(baseline, str) else baseline
    rows = []
    for name in (name for name in names if name in baselines):
        pairs = {place: paired(found, name, baselines[name]) for place, found in by_name.items()}
        groups = {place: differences for place, differences in pairs.items() if differences is not None}
        if not groups:
            continue
        columns = headings(list(places)).items()
        row = {"Method": name} | {h: str(Difference.of([groups[p]])) if p in groups else "" for p, h in columns}
        if len(places) > 1:
            row["all"] = str(Difference.of(list(groups.values()))) if len(groups) == len(places) else ""
        rows.append(row)
    return rows
