"""A client on another machine, as a round script sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..federation.averaging import flatten, unflatten_
from ..methods import Method
from ..protocol.context import Observations, RoundContext
from ..protocol.messages import Message, Parameters, SmashedData
from ..protocol.meter import Meter
from ..protocol.packing import Exchange
from ..protocol.padding import kept_positions
from ..protocol.wire import read_exchange, write_exchange
from .channel import Channel
from .checks import UploadCheck, check_observed, check_tensors
from .wire import TransferError, whole

_REPORT = 2**23  # bytes: room for the losses that come with the trained weights, and the names of all


class Turn:
    """The server half computes for one client at a time, with that client's weights in it.

    A client's thread gives its turn up while it waits for the network.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        self._lock = threading.Lock()
        self._since = 0.0
        self.seconds: dict[int, float] = {}  # for which each client had its turn

    @contextmanager
    def taken(self, client: int, weights: Tensor) -> Iterator[None]:
        """Compute for a client with these weights."""
        with self._lock:
            self._begin(weights)
            try:
                yield
            finally:
                self._end(client)

    @contextmanager
    def given_up(self, client: int) -> Iterator[None]:
        """Let others compute; at the end this client's weights are back."""
        weights = flatten(self.parameters)
        self._end(client)
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._begin(weights)

    def _begin(self, weights: Tensor) -> None:
        unflatten_(self.parameters, weights)
        self._since = time.perf_counter()

    def _end(self, client: int) -> None:
        self.seconds[client] = self.seconds.get(client, 0.0) + time.perf_counter() - self._since


class FlowerLink:
    """The client is on the other side of a channel.

    Updates of single batches wait for the next upload and go with it: one message each way for a batch. The update of
    the whole round starts at once, in the background.

    Args:
        method: of the round.
        channel: to the client.
        context: of the round.
        check: what an upload must be.
        turn: given up while waiting.
        weights: what the client begins with.
        num_samples: that the client has.
    """

    def __init__(
        self,
        method: Method,
        channel: Channel,
        context: RoundContext,
        check: UploadCheck,
        turn: Turn,
        weights: Parameters,
        num_samples: int,
    ):
        self.method, self.channel, self.context, self.check, self.turn = method, channel, context, check, turn
        self.weights, self.num_samples = weights, num_samples
        self.local_epochs = context.local_epochs
        self.meter = Meter()
        self.client_seconds = 0.0
        self.observed = Observations()
        self.kept: dict[str, Tensor] = {}
        self.trained: dict[str, Tensor] = {}
        self._num_batches: int | None = None
        self._ahead: Exchange[SmashedData] | None = None  # batch 0, if it was uploaded before it was asked for
        self._positions: dict[int, Tensor | None] = {}
        self._waiting: list[dict[str, Any]] = []
        self._payload: Path | None = None
        self._finishing: Future[None] | None = None

    @property
    def num_batches(self) -> int:
        """How many batches the client has. Where nothing has told so yet, the first is uploaded ahead, which does."""
        if self._num_batches is None:
            self._ahead = self._fetch([0])
        assert self._num_batches is not None
        return self._num_batches

    def upload(self, batches: Sequence[int] | None = None) -> Sequence[SmashedData]:
        """Ask for the smashed data of some batches, or of the whole round (None)."""
        asked = None if batches is None else list(batches)
        ahead, self._ahead = self._ahead, None
        sent = ahead if ahead is not None and asked == [0] else self._fetch(asked)
        self._positions |= {b: sent.kept(i) for i, b in enumerate(asked if asked is not None else range(len(sent)))}
        self.meter.transfers += 1
        self.meter.count(self.meter.up, sent)
        return sent

    def _fetch(self, asked: list[int] | None) -> Exchange[SmashedData]:
        with self.turn.given_up(self.context.client):
            path = self._step([{"do": "upload", "batches": asked}])
            if path is None:
                raise TransferError("smashed data was asked for, none came")
            sent: Exchange[SmashedData] = read_exchange(
                path,
                SmashedData,
                self.context.store,
                lambda _, message: kept_positions(self.check.sound(message), self.check.loss_spec),
                self.context.device,
                most=self.num_samples,
            )
            path.unlink()  # an open file stays
            assert self._num_batches is not None  # a step tells it
            self.check.exchange(sent, self._num_batches if asked is None else len(asked))
        return sent

    def stage(self, messages: Iterable[Message]) -> Sequence[Message]:
        """Pack messages for the whole round, one for each batch."""
        return self._pack(messages, None)

    def _pack(self, messages: Iterable[Message], batches: Sequence[int] | None) -> Exchange[Message]:
        places = range(self.num_batches) if batches is None else batches
        packed: Exchange[Message] = Exchange(self.context.store, lasting=batches is None)
        return packed.extend(messages, (self._positions.get(batch) for batch in places))

    def update(self, messages: Sequence[Message] | None = None, batches: Sequence[int] | None = None) -> None:
        """Have the client do its local updates with what is sent down, if anything."""
        if messages is not None:
            packed = messages if isinstance(messages, Exchange) else self._pack(messages, batches)
            self.meter.transfers += 1
            self.meter.count(self.meter.down, packed)
            if self._payload is not None:
                raise RuntimeError("A round script sent two updates without an upload between them.")
            self._payload = self.channel.file("to")
            write_exchange(packed, self._payload)
        self._waiting.append({"do": "update", "batches": None if batches is None else list(batches)})
        if batches is None:
            self._finishing = _started(self._finish)

    def finish(self) -> None:
        """Wait for the trained weights of the client, which `trained` then holds."""
        with self.turn.given_up(self.context.client):
            if self._finishing is None:
                self._finish()
            else:
                self._finishing.result()

    def _finish(self) -> None:
        own = sum(t.numel() * t.element_size() for t in (self.weights.adapters | self.weights.auxiliary).values())
        path = self._step([{"do": "finish"}], limit=2 * own + _REPORT)
        if path is None:
            raise TransferError("trained weights were asked for, none came")
        found: dict[str, dict[str, Tensor]] = {"adapters": {}, "kept": {}, "observed": {}}
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise TransferError(f"the trained weights are no safetensors file: {error}") from error
        path.unlink()
        for name, t in tensors.items():
            kind, _, rest = name.partition(".")
            if kind not in found:
                raise TransferError(f"the trained weights hold {name!r}")
            found[kind][rest] = t
        check_tensors(self.weights.adapters, found["adapters"])
        check_tensors(self.weights.auxiliary, found["kept"])
        most = 8 * (self.local_epochs + 1) * (self._num_batches or 0) + len(self.weights.adapters)
        check_observed(found["observed"], most)
        self.trained, self.kept = found["adapters"], found["kept"]
        self.observed.values = {name: list(t.unbind()) for name, t in found["observed"].items()}
        self.meter.federate(self.weights.adapters, self.weights.auxiliary)

    def _step(self, calls: list[dict[str, Any]], limit: int | None = None) -> Path | None:
        payload, self._payload = self._payload, None
        calls, self._waiting = [*self._waiting, *calls], []
        if self.channel.sequence == 0:
            payload = self.channel.file("weights")
            payload.write_bytes(self.weights.to_bytes())
        answer, received = self.channel.step(calls, payload, limit)
        count, samples = whole(answer, "num_batches"), whole(answer, "num_samples")
        if samples != self.num_samples:
            raise TransferError(f"the client has {samples} samples now, it had {self.num_samples}")
        if not 1 <= count <= samples or self._num_batches not in (None, count):
            raise TransferError(f"the client has {count} batches of {samples} samples, it had {self._num_batches}")
        self._num_batches = count
        seconds = answer.get("seconds")
        if not isinstance(seconds, float) or not 0 <= seconds < float("inf"):
            raise TransferError(f"the client worked for {seconds!r} seconds")
        self.client_seconds += seconds
        return received


def _started(function: Any) -> Future[None]:
    """Run a function in a thread of its own."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return result
