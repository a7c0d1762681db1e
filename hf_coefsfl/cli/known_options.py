"""The options of a command, read off source files: a typo is told at once, before PyTorch is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .._suggest import did_you_mean
from ..tasks import TASKS

# Options that recipes add.
_RECIPES = {"help", "help_all", "config"}
_PACKAGE = Path(__file__).parents[1]


def check_options(argv: Sequence[str], known: Iterable[str]) -> None:
    """Refuse an option that no command line of the command could have."""
    known = set(known)
    for word in argv:
        name = word.partition("=")[0][2:].replace("-", "_")
        if word.startswith("--") and name and name not in known and name.removeprefix("no_") not in known:
            near = did_you_mean(word.partition("=")[0], [f"--{option}" for option in known])
            raise ValueError(f"unrecognized arguments: {word}.{near}")


def check_task(command: str, given: Sequence[str]) -> None:
    """Refuse a task that does not exist, and options that it cannot have."""
    options = options_of_training() | _RECIPES
    if given and given[0].startswith("--"):
        check_options(given, options | {f.name for task in TASKS.values() for f in fields(task.arguments)})
        if given[0] != "--help":
            raise ValueError(f"the task comes before its options: coefsfl {command} TASK {given[0]} ...")
    elif given and not given[0].startswith("-"):
        if given[0] not in TASKS:
            near = did_you_mean(given[0], TASKS)
            raise ValueError(f"unknown task {given[0]!r}.{near} Choose from {', '.join(TASKS)}.")
        check_options(given[1:], options | {f.name for f in fields(TASKS[given[0]].arguments)})


def options_of_command(name: str) -> set[str]:
    """Return the options that the module of a command declares: the texts in it that begin with two dashes."""
    tree = ast.parse((_PACKAGE / "cli" / f"{name}_command.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [a.value for call in calls for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return {"help", *(text[2:].replace("-", "_") for text in given if text.startswith("--"))}


def options_of_training() -> set[str]:
    """Return the fields of `SplitFedConfig`, which has those of `TrainingArguments` too."""
    library = find_spec("transformers")
    assert library is not None and library.origin is not None
    return {
        *_fields(_PACKAGE / "config.py", "SplitFedConfig"),
        *_fields(Path(library.origin).parent / "training_args.py", "TrainingArguments"),
    }


@cache
def _fields(path: Path, name: str) -> tuple[str, ...]:
    """Return the fields that a dataclass of a file declares."""
    body = next(
        node.body
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return tuple(
        node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )
