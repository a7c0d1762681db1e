"""Tables beside those in the paper's layout: paired differences, codecs, learning rates, errors of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean

from ...analysis.tables import format_table
from ..codecs import float32_rows, mean_difference_rows, mib_rows
from ..differences import difference_rows, headings
from ..grid import Summary, score
from ..results import Result, staleness
from .plots import by_place, place_name

_PROBED = {
    "error": "used_error", "by activations": "activation_error", "by server": "server_error",
    "cosine": "used_cosine", "displacement": "displacement", "best λ": "best_lambda",
}  # fmt: skip

_PAIRED = (
    "Paired by seed, with 95 % bootstrap intervals over seeds; positive is better. With three seeds an interval is "
    "hardly more than their range."
)
_SENT = (
    "The exchange / all, with adapters: of a run, both directions, all clients, means over the seeds. Fewer: how many "
    "times fewer bytes the exchange has than in float32, also without padding; of the same method and seeds, in the "
    "mean over the columns. *: fewer seeds than in float32, so the MiB are of other samples."
)


def more_tables(results: Sequence[Result], baselines: Sequence[str]) -> str:
    """Return the tables as Markdown, empty if there is nothing to show."""
    differences = [_differences(results, baseline) for baseline in baselines]
    return "\n".join([*differences, *_codecs(results), *_learning_rates(results), *_staleness(results)])


def _differences(results: Sequence[Result], baseline: str) -> str:
    rows = difference_rows(by_place(results), baseline)
    return _titled(f"Difference to {baseline}", rows, _PAIRED) if rows else ""


def _codecs(results: Sequence[Result]) -> list[str]:
    """Return what rows that differ in their codecs only send, and what that costs, if there are such rows."""
    places = by_place(results)
    plain = float32_rows(places)
    if not plain:
        return []
    tables = {
        "Codecs: MiB": (mib_rows(places), _SENT),
        "Codecs: difference to the same method in float32": (difference_rows(places, plain), _PAIRED),
        "Codecs: difference to float32, mean over the methods": (mean_difference_rows(places), _PAIRED),
    }
    return [_titled(title, rows, note) for title, (rows, note) in tables.items() if rows]


def _titled(title: str, rows: Sequence[Mapping[str, str]], note: str) -> str:
    return f"**{title}**\n\n{format_table(rows, markdown=True)}\n\n{note}\n"


def _learning_rates(results: Sequence[Result]) -> list[str]:
    """Return the table of what each learning rate gave with the first seed, where several have been tried."""
    places = by_place(results)
    columns = headings(list(places))
    rows: dict[str, dict[str, str]] = {}
    for place, found in places.items():
        for result in found:
            tried = [
                (run, summary) for run, summary in result.tried if run.options["seed"] == result.cell.spec.seeds[0]
            ]
            shown = [f"{run.options['learning_rate']:g}: {_shown(summary)}" for run, summary in tried]
            if len(shown) > 1:
                rows.setdefault(result.cell.variant.name, {})[columns[place]] = ", ".join(shown)
    if not rows:
        return []
    kept = [column for column in columns.values() if any(column in row for row in rows.values())]
    table = [{"Method": name} | {column: row.get(column, "") for column in kept} for name, row in rows.items()]
    note = "The first seed with each learning rate that has been tried; a mean if there are several scores."
    return [f"**Learning rates**\n\n{format_table(table, markdown=True)}\n\n{note}\n"]


def _shown(summary: Summary) -> str:
    value = score(summary) * (1 if summary.get("higher_is_better", True) else -1)
    return f"{value:.1f}" if math.isfinite(value) else "diverged"


def _staleness(results: Sequence[Result]) -> list[str]:
    texts = []
    for place, found in by_place(results).items():
        rows = []
        for result in found:
            points = staleness(result)
            if points:
                means = {
                    label: mean(known) if (known := [p[key] for p in points if key in p]) else None
                    for label, key in ((label, f"probe_{name}") for label, name in _PROBED.items())
                }
                rows.append({"Method": result.cell.variant.name} | means)
        if rows:
            table = format_table(rows, {"Method": ""} | dict.fromkeys(_PROBED, ".2f"), markdown=True)
            note = (
                "Relative error of the gradient that enters the client half against vanilla's of the same step, the "
                "parts of it that the activations' and the server's move cause, its cosine with vanilla's, ‖δ‖, and "
                "the median λ* of Proposition 1: means over the local updates of the probed rounds in which the "
                "activations have moved."
            )
            texts.append(f"**Staleness: {place_name(place)}**\n\n{table}\n\n{note}\n")
    return texts
