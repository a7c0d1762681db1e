"""Tables as text and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MIB = 2**20


def format_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | Mapping[str, str] | None = None,
    *,
    markdown: bool = False,
) -> str:
    """Return rows as an aligned text table, numbers to the right, or as a Markdown one.

    Args:
        rows: one dict a row. A missing entry or None stays empty.
        columns: which entries to show, in this order: names, or a dict from name to format specification such as
            `{"accuracy": ".1%"}` (applied to numbers only). Default: every entry in order of first appearance.
        markdown: return a Markdown table.

    ```python
    >>> rows = [{"task": "mnli", "MiB": 12.5}, {"task": "cifar100", "MiB": 104.0}]
    >>> print(format_table(rows, {"task": "", "MiB": ".1f"}))
    task     |   MiB
    ---------+------
    mnli     |  12.5
    cifar100 | 104.0

    ```
    """
    if columns is None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
    formats = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, "")
    cells = [[_cell(row.get(name), spec, markdown) for name, spec in formats.items()] for row in rows]
    table = [list(formats), *cells]
    least = 3 if markdown else 1  # Markdown's rule under the header has at least three characters
    widths = [max(least, *(len(line[i]) for line in table)) for i in range(len(formats))]
    right = [_is_numeric([row.get(name) for row in rows]) for name in formats]
    header, *body = [
        [cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(line, widths, right, strict=True)]
        for line in table
    ]
    if markdown:
        rule = ["-" * (width - 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)]
        return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *body))
    text = [" | ".join(line).rstrip() for line in (header, *body)]
    return "\n".join([text[0], "-+-".join("-" * width for width in widths), *text[1:]])


def _is_numeric(values: Sequence[Any]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(map(_is_number, known))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any, spec: str, markdown: bool) -> str:
    if value is None:
        return ""
    text = format(value, spec) if _is_number(value) else str(value)
    return text.replace("|", "\\|") if markdown else text
