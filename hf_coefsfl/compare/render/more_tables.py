"""Tables beside those in the paper's layout: paired differences, and where the error of gradients comes from."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from ...analysis.tables import format_table
from ..differences import difference_rows
from ..results import Result, staleness
from .plots import by_place, place_name

_PROBED = {
    "error": "used_error", "by activations": "activation_error", "by server": "server_error",
    "cosine": "used_cosine", "displacement": "displacement", "best λ": "best_lambda",
}  # fmt: skip


def more_tables(results: Sequence[Result], baselines: Sequence[str]) -> str:
    """Return the tables as Markdown, empty if there is nothing to show."""
    return "\n".join([*(_differences(results, baseline) for baseline in baselines), *_staleness(results)])


def _differences(results: Sequence[Result], baseline: str) -> str:
    rows = difference_rows(by_place(results), baseline)
    if not rows:
        return ""
    note = (
        "Paired by seed, with 95 % bootstrap intervals over seeds; positive is better. With three seeds an interval is "
        "hardly more than their range."
    )
    return f"**Difference to {baseline}**\n\n{format_table(rows, markdown=True)}\n\n{note}\n"


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
