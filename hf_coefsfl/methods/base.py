"""The seam: what a training method has to say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_type_hints

from ..links import ClientLink
from ..messages import Feedback, SmashedData
from ..outputs import Task
from ..sides import ClientSide, ServerSide

METHODS: dict[str, type[Method]] = {}


class Method:
    """One training method: a round script (server) and two handlers (client).

    A subclass is a dataclass whose fields are its hyper-parameters, the `method_kwargs` of the
    config; giving it a `name` registers it. It raises ValueError from `__post_init__` for values
    it cannot work with.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # what the paper calls it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the method under its name."""
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            METHODS[cls.name] = cls

    def check_task(self, task: Task) -> None:
        """Raise ValueError if the method cannot train for this task. Called before training starts."""

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Run one communication round with one client. Runs on the server."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a round goes.")

    def upload(self, client: ClientSide, batches: Sequence[int] | None) -> list[SmashedData]:
        """Return smashed data: of the whole round (None), or of some batches, on a graph kept for `update`."""
        if batches is None:
            return client.exchange()
        return [client.smash(batch) for batch in batches]

    def update(self, client: ClientSide, feedback: Sequence[Feedback] | None, batches: Sequence[int] | None) -> None:
        """Descend along the gradient of the batch last uploaded. Runs on the client."""
        assert feedback is not None
        for message in feedback:
            client.descend(message.gradient)


def make_method(name: str, kwargs: Mapping[str, Any] | None = None) -> Method:
    """Return the method of that name with its hyper-parameters, or say what is wrong with them."""
    if name not in METHODS:
        raise ValueError(f"Unknown method {name!r}. Choose one of: {', '.join(sorted(METHODS))}.")
    cls, kwargs = METHODS[name], dict(kwargs or {})
    options = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    for key, value in kwargs.items():
        if key not in options:
            known = ", ".join(f"{n} (default {f.default!r})" for n, f in options.items()) or "none"
            raise ValueError(f"Method {name!r} has no option {key!r} in method_kwargs. Its options: {known}.")
        if not _fits(value, types[key]):
            raise ValueError(
                f"Option {key!r} of method {name!r} must be {_describe(types[key])}, got {value!r} "
                f"({type(value).__name__})."
            )
    return cls(**kwargs)


def _members(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", None) or (hint,)


def _fits(value: Any, hint: Any) -> bool:
    for member in _members(hint):
        if member is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return True
        if isinstance(value, member) and not (member is int and isinstance(value, bool)):
            return True
    return False


def _describe(hint: Any) -> str:
    return " or ".join("None" if m is type(None) else m.__name__ for m in _members(hint))
