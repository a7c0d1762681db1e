"""The spec of a comparison: a YAML file that is read and checked before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .._recipes import find_spec
from .._suggest import did_you_mean
from ..config import SplitFedConfig
from ..methods import METHODS, make_method
from ..tasks import TASKS
from .paper import paper_tables

# Options that a spec must not give, and what sets them.
_SET_BY = {
    "method": "methods", "method_kwargs": "methods", "learning_rate": "learning_rates", "seed": "seeds",
    "output_dir": "--output_dir", "resume_from_checkpoint": "every run itself", "max_steps": "num_rounds",
    "cut": "cut or cuts", "push_to_hub": "nothing: a comparison does not push",
    "hub_token": "nothing: the content of a spec is copied into many files",
}  # fmt: skip
_LISTS = ("splits", "cuts", "methods", "learning_rates", "seeds")  # those of a task replace those of the spec
_SPEC_KEYS = ("title", "settings", "tasks", "cut", *_LISTS, "paper_tables", "baselines")
_TASK_KEYS = ("task", "model", "title", "cut", *_LISTS, "method_options")


@dataclass(frozen=True)
class Split:
    """One way to spread the data over the clients."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A row of the tables: a method with its options, and the options of runs that are this row's own."""

    name: str
    method: str
    kwargs: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True)
class TaskSpec:
    """One task with one model, and the lists whose product is its runs."""

    task: str
    model: str  # the label of its rows
    title: str | None  # the label of its columns; None: the title of the task
    options: dict[str, Any]
    splits: tuple[Split, ...]
    cuts: tuple[int, ...]
    methods: tuple[Variant, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Spec:
    """A whole comparison."""

    name: str
    title: str
    tasks: tuple[TaskSpec, ...]
    paper_tables: tuple[str, ...]  # tables of the paper to show beside ours; empty: any that has the setting
    baselines: tuple[str, ...] = ()  # names of variants that the others are compared with, seed by seed


def load_spec(path: str | Path) -> Spec:
    """Read and check a spec, a file or a name. Raise ValueError with what is wrong and what is allowed."""
    path = find_spec(path)
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"The spec {path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    try:
        return parse_spec(content, path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_spec(content: Any, name: str) -> Spec:
    """Check the content of a spec."""
    content = _mapping(content, "the spec")
    _known(content, _SPEC_KEYS, "the spec", hint="Options of every run go under `settings`.")
    settings = _options(content.get("settings", {}), "settings")
    tasks = _list(content.get("tasks"), "tasks")
    specs = tuple(_task(entry, content, settings, f"tasks[{i}]") for i, entry in enumerate(tasks))
    return Spec(
        name=name,
        title=_text(content.get("title", name), "title"),
        tasks=specs,
        paper_tables=_paper_tables(content.get("paper_tables")),
        baselines=_baselines(content.get("baselines"), specs),
    )


def data_options(task: str | None = None) -> list[str]:
    """Return the options of a task's model and data, or of all tasks (None)."""
    tasks = TASKS.values() if task is None else [TASKS[task]]
    return list(dict.fromkeys(f.name for t in tasks for f in dataclasses.fields(t.arguments_class)))


def _task(entry: Any, content: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> TaskSpec:
    entry = dict(_mapping(entry, where))
    name = _text(entry.get("task"), f"{where}.task")
    if name not in TASKS:
        raise ValueError(
            f"{where}.task: unknown task {name!r}.{did_you_mean(name, TASKS)} Choose one of: {', '.join(TASKS)}."
        )
    where = f"{where} ({name})"
    own = {key: entry.pop(key) for key in _TASK_KEYS if key in entry}
    options = {**settings, **_options(entry, where, name, _TASK_KEYS)}
    own_cut, shared_cut = ([level["cut"]] if "cut" in level else None for level in (own, content))
    cuts = own.get("cuts", own_cut) or content.get("cuts", shared_cut)
    lists: dict[str, Any] = {key: own.get(key, content.get(key)) for key in _LISTS} | {"cuts": cuts}
    extra = _method_options(own.get("method_options", {}), f"{where}.method_options")
    rows = _flat(_list(lists["methods"], f"{where}.methods"))
    variants = tuple(_variant(row, extra, name, f"{where}.methods") for row in rows)
    _distinct([v.name for v in variants], f"{where}.methods", 'Give variants of a method a "name" each.')
    splits: tuple[Split, ...] = (_default_split(options),)
    if lists["splits"] is not None:
        splits = tuple(_split(s, f"{where}.splits") for s in _list(lists["splits"], f"{where}.splits"))
    _distinct([s.name for s in splits], f"{where}.splits", "Give each a name of its own.")
    model = own.get("model") or Path(str(options.get("model_name_or_path", "model"))).name
    _options(options, where, name)  # options of the settings and splits must fit this task too
    for split in splits:
        _options(split.options, f"{where}.splits", name)
    return TaskSpec(
        task=name,
        model=_text(model, f"{where}.model"),
        title=own.get("title") and _text(own["title"], f"{where}.title"),
        options=options,
        splits=splits,
        cuts=_numbers(lists["cuts"], f"{where}.cuts", int, lambda n: n >= 1, "whole numbers of at least 1"),
        methods=variants,
        learning_rates=_numbers(
            lists["learning_rates"], f"{where}.learning_rates", float, lambda x: 0 < x < 1e9, "numbers above 0"
        ),
        seeds=_numbers(lists["seeds"], f"{where}.seeds", int, lambda n: n >= 0, "whole numbers of at least 0"),
    )


def _paper_tables(entry: Any) -> tuple[str, ...]:
    tables = _list(entry, "paper_tables") if entry is not None else []
    for table in tables:
        if table not in paper_tables():
            raise ValueError(f"paper_tables: there is no {table!r}. Choose from: {', '.join(paper_tables())}.")
    return tuple(tables)


def _baselines(entry: Any, tasks: Sequence[TaskSpec]) -> tuple[str, ...]:
    names = _list(entry, "baselines") if entry is not None else []
    known = list(dict.fromkeys(variant.name for task in tasks for variant in task.methods))
    for name in names:
        if name not in known:
            near = did_you_mean(str(name), known)
            raise ValueError(f"baselines: no row is called {name!r}.{near} Choose from: {', '.join(known)}.")
    return tuple(names)


def _variant(entry: Any, extra: Mapping[str, Mapping[str, Any]], task: str, where: str) -> Variant:
    entry = {"method": entry} if isinstance(entry, str) else _mapping(entry, f"{where}: a method")
    _known(entry, ("method", "name", "method_kwargs", "settings"), f"{where}: a method")
    method = _text(entry.get("method"), f"{where}: method")
    if method not in METHODS:
        raise ValueError(
            f"{where}: unknown method {method!r}.{did_you_mean(method, METHODS)} Choose one of: {', '.join(METHODS)}."
        )
    kwargs = {**extra.get(method, {}), **_mapping(entry.get("method_kwargs") or {}, f"{where}: method_kwargs")}
    try:
        title = make_method(method, kwargs).full_title
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    name = _text(entry.get("name", title), f"{where}: name")
    return Variant(name, method, kwargs, _options(entry.get("settings") or {}, f"{where}: settings of {name}", task))


def _method_options(entry: Any, where: str) -> dict[str, dict[str, Any]]:
    options = _mapping(entry, where)
    _known(options, tuple(METHODS), where)
    return {method: dict(_mapping(kwargs, f"{where}.{method}")) for method, kwargs in options.items()}


def _default_split(options: Mapping[str, Any]) -> Split:
    """Return the split of a spec that lists none: what the other options say."""
    partition = str(options.get("partition", "iid"))
    return Split({"iid": "IID", "dirichlet": "non-IID"}.get(partition, partition), {})


def _split(entry: Any, where: str) -> Split:
    entry = dict(_mapping(entry, f"{where}: a split"))
    name = _text(entry.pop("name", entry.get("partition")), f"{where}: name")
    return Split(name, _options(entry, f"{where} ({name})", others=("name",)))


def _options(entry: Any, where: str, task: str | None = None, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return options of runs, or raise ValueError if one is unknown or set elsewhere."""
    options = dict(_mapping(entry, where))
    for key, setter in _SET_BY.items():
        if key in options:
            raise ValueError(f"{where} gives {key!r}, which is set by {setter}.")
    allowed = [*others, *data_options(task)]
    fields = {f.name for f in dataclasses.fields(SplitFedConfig) if f.init}
    unknown = [key for key in options if key not in fields and key not in allowed]
    if unknown:
        raise ValueError(
            f"{where} gives {unknown[0]!r}, which is not an option. Allowed: {', '.join(allowed)}, and the fields of "
            "SplitFedConfig."
        )
    return options


# ---- Kinds of values ----


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping of names to values, got {value!r} ({type(value).__name__}).")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        got = "nothing" if value is None else f"{value!r} ({type(value).__name__})"
        raise ValueError(f"{where} must be a list with at least one entry, got {got}.")
    return value


def _flat(values: list[Any]) -> list[Any]:
    """Return a list with the entries of the lists in it, so that a YAML anchor can stand for several rows."""
    return [entry for value in values for entry in (_flat(value) if isinstance(value, list) else [value])]


def _numbers(value: Any, where: str, kind: type, allowed: Callable[[Any], bool], what: str) -> tuple[Any, ...]:
    numbers = _list(value, where)
    for number in numbers:
        fits = isinstance(number, (int, float) if kind is float else int) and not isinstance(number, bool)
        if not fits or not allowed(number):
            hint = " YAML reads 1e-4 as text; write 1.0e-4." if isinstance(number, str) else ""
            raise ValueError(f"{where} must hold {what}, got {number!r} ({type(number).__name__}).{hint}")
    _distinct(numbers, where, "Name each once.")
    return tuple(kind(number) for number in numbers)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} must be a text, got {value!r} ({type(value).__name__}).")
    return value


def _known(entry: Mapping[str, Any], allowed: Sequence[str], where: str, hint: str = "") -> None:
    unknown = [key for key in entry if key not in allowed]
    if unknown:
        raise ValueError(f"{where} has no key {unknown[0]!r}. Allowed: {', '.join(allowed)}. {hint}".rstrip())


def _distinct(values: Sequence[Any], where: str, hint: str) -> None:
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise ValueError(f"{where} holds {twice[0]!r} twice. {hint}")
