"""`coefsfl methods`: the methods, their options and what crosses the cut."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import textwrap
from itertools import zip_longest
from typing import Any, get_type_hints

from transformers import AutoConfig, AutoModelForImageClassification

from ..analysis.cost import EXTRAS, CostModel, Round
from ..analysis.tables import format_table
from ..methods import DEFAULT_METHOD, METHODS, Method, make_method, ordered_methods

EPILOG = f"""\
B is the number of batches of a client's round, N its samples, d the values of one sample's smashed data. What
crosses is read off a round that each method runs on a tiny model; labels, masks and adapters are left out.

examples:
  coefsfl methods
  coefsfl methods {DEFAULT_METHOD}
"""
_CUT = 1
_WIDTHS = {"method": 11, "paper": 17, "transfers": 12, "up": 18, "down": 30}  # a line has at most 100 characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("method", nargs="?", help="explain this one, with its equation")
    parser.add_argument(
        "--format", choices=["table", "json", "markdown"], default="table", help="of the list (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> str:
    """Return the list of methods, or the explanation of one."""
    if arguments.method is not None:
        if arguments.method not in METHODS:
            make_method(arguments.method)  # which refuses it
        return explain(arguments.method)
    toy = _tiny_model()
    rows = [describe(name, toy) for name in ordered_methods()]
    if arguments.format == "json":
        return json.dumps(rows, indent=2, ensure_ascii=False)
    if arguments.format == "markdown":
        for row in rows:
            row["options"] = ", ".join(f"{option['name']}={option['default']!r}" for option in row["options"])
        return format_table(rows, markdown=True)
    lines = [line for row in rows for line in _wrapped(row)]
    return f"{format_table(lines)}\n\n`coefsfl methods NAME` explains one and lists its options."


def _wrapped(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return the lines of a row whose columns are not wider than `_WIDTHS`."""
    cells = {name: textwrap.wrap(str(row[name]), width) for name, width in _WIDTHS.items()}
    return [dict(zip(cells, line, strict=True)) for line in zip_longest(*cells.values(), fillvalue="")]


def describe(name: str, toy: CostModel) -> dict[str, Any]:
    """Return a method's name, its name in the paper, what crosses the cut and its options."""
    return {"method": name, "paper": METHODS[name].title, **crossing(name, toy), "options": options(METHODS[name])}


def explain(name: str) -> str:
    """Return a method's docstrings, its options and what crosses the cut."""
    cls = METHODS[name]
    module = inspect.getdoc(inspect.getmodule(cls)) or ""
    crosses = crossing(name, _tiny_model())
    lines = [f"{name} ({cls.title})", "", module, "", inspect.getdoc(cls) or "", "", "Crosses the cut, by round:"]
    lines += [f"  {what:<9} {amount}" for what, amount in crosses.items()]
    lines += ["", "Options (method_kwargs):"]
    lines += [
        f"  {o['name']}: {o['type']} = {o['default']!r}{'  ' * bool(o['note'])}{o['note']}" for o in options(cls)
    ] or ["  none"]
    return "\n".join(lines)


def options(cls: type[Method]) -> list[dict[str, Any]]:
    """Return the options of a method: name, type, default and help."""
    types = get_type_hints(cls)
    return [
        {
            "name": f.name,
            "type": getattr(types[f.name], "__name__", None) if isinstance(types[f.name], type) else str(types[f.name]),
            "default": f.default,
            "note": f.metadata.get("help", ""),
        }
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]


def crossing(name: str, toy: CostModel) -> dict[str, str]:
    """Return the transfers of a round and what it sends each way, in the letters of the paper."""
    crosses = {"transfers": "", "up": "", "down": ""}
    for kind, counted in toy.kinds(make_method(name), _CUT, Round()):
        label = f" / {kind.label}: " if crosses["transfers"] else ""
        fixed, per_batch, _ = counted["transfers"]
        crosses["transfers"] += label + _sum((per_batch, "B"), (fixed, ""))
        for direction in ("up", "down"):
            parts = [
                _volume(heading.partition(".")[2], parts, toy)
                for heading, parts in counted.items()
                if heading.startswith(f"{direction}.") and heading.partition(".")[2] not in EXTRAS
            ]
            crosses[direction] += label + (" + ".join(filter(None, parts)) or "nothing")
    return crosses


def _volume(heading: str, parts: tuple[int, int, int], toy: CostModel) -> str:
    """Return for example "N·d gradients" for so many bytes fixed, per batch and per sample."""
    values = toy.model.config.hidden_size * ((toy.model.config.image_size // toy.model.config.patch_size) ** 2 + 1)
    fixed, per_batch, per_sample = (size / 4 for size in parts)  # float32
    amount = _sum((per_sample / values, "N·d"), (per_batch, "B"))
    named = heading.replace("_", " ")
    return f"{amount} {named}" if amount != "0" else named * bool(fixed)


def _sum(*terms: tuple[float, str]) -> str:
    shown = [f"{factor:g}"[: None if factor != 1 or not unit else 0] + unit for factor, unit in terms if factor]
    return " + ".join(shown) or "0"


def _tiny_model() -> CostModel:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 8}
    config = AutoConfig.for_model("vit", **sizes, image_size=8, patch_size=4, num_labels=3)
    return CostModel(AutoModelForImageClassification.from_config(config, attn_implementation="eager"))
