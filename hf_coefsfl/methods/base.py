"""The seam: what a training method has to say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_type_hints

from torch import Tensor

from ..protocol.client_side import ClientSide
from ..protocol.link import ClientLink
from ..protocol.loss import LossSpec
from ..protocol.messages import Feedback, Message, SmashedData
from ..protocol.packing import Exchange
from ..protocol.server_side import ServerSide

if TYPE_CHECKING:
    from ..split import SplitModel

M = TypeVar("M", bound=Message)
METHODS: dict[str, type[Method]] = {}


@dataclass(frozen=True)
class ClientState:
    """What a method kept of one client's round, on both sides."""

    client: int
    num_samples: int
    tensors: dict[str, Tensor]


class Method:
    """One training method: a round script (server) and two handlers (client).

    A subclass is a dataclass whose fields are its hyper-parameters, the `method_kwargs` of the
    config; giving it a `name` registers it. It raises ValueError from `__post_init__` for values
    it cannot work with.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # what the paper calls it
    deployable: ClassVar[bool] = True  # whether a client needs no more than its own half

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the method under its name."""
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            METHODS[cls.name] = cls

    def check_loss(self, loss_spec: LossSpec) -> None:
        """Raise ValueError if the method cannot train for this task. Called before training starts."""

    def exchanges_each_batch(self) -> bool:
        """Return whether every batch crosses the cut on its own, which a network makes slow."""
        return bool(getattr(self, "per_batch", False))

    def setup(self, split: SplitModel, loss_spec: LossSpec, seed: int, first_round: int = 0) -> None:
        """Build what lives beside the model (auxiliary networks, statistics). Called once, before training.

        `first_round` is the round in which the method takes over from the warm-up.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return what lives beside the model, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` returned."""

    def federated(self) -> dict[str, Tensor]:
        """Return the weights that go to each client and back with its adapter, beside it."""
        return {}

    def merge(self, kept: Sequence[ClientState]) -> None:
        """Take up what the clients' rounds kept, in client order. Called at the end of each of the method's rounds."""

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Run one communication round with one client. Runs on the server."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a round goes.")

    def upload(self, client: ClientSide, batches: Sequence[int] | None) -> Sequence[SmashedData]:
        """Return smashed data: of the whole round (None), or of some batches, on a graph kept for `update`."""
        if batches is None:
            return client.exchange()
        return [client.smash(batch) for batch in batches]

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Descend along the gradient of the batch last uploaded. Runs on the client."""
        for message in expect(Feedback, messages):
            client.descend(message.gradient)


def expect(kind: type[M], messages: Sequence[Message] | None) -> Sequence[M]:
    """Return the messages if they are all of one kind."""
    if messages is None:
        raise ValueError(f"The client expected {kind.__name__} messages, got none.")
    for found in messages.types() if isinstance(messages, Exchange) else map(type, messages):
        if not issubclass(found, kind):
            raise ValueError(f"The client expected {kind.__name__} messages, got {found.__name__}.")
    return cast("Sequence[M]", messages)


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


def at_least(name: str, value: Any, least: int) -> None:
    """Refuse a value that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")


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
