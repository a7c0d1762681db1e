"""A client on another machine, as a round script sees it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

from torch import Tensor, nn

from ..federation.averaging import flatten, unflatten_
from ..federation.coded_weights import ADAPTERS, AUXILIARY, CodedWeights
from ..protocol.clock import synchronize
from ..protocol.context import RoundContext
from ..protocol.link import ClientLink
from ..protocol.messages import ClientResult, Message, Parameters, SmashedData
from ..protocol.packing import Exchange, Places
from ..protocol.padding import kept_positions
from ..protocol.wire import read_exchange, read_message, write_exchange, write_message
from .checks import OBSERVED, Declared, UploadCheck, check_observed, check_tensors
from .growing import Growing
from .transport import Channel, Deadline
from .wire import TransferError, integer

_SLICE = 1.0  # seconds for which a client may compute while others wait
_REPORT = 2**23  # bytes: room for the names of what comes with the trained weights


class Turn:
    """The server half computes for one client at a time, with that client's weights in it.

    A client's thread gives its turn up while it waits for the network, and after a while to those who wait for theirs.
    They come in the order in which they began to wait.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()  # clients that wait
        self._holder: int | None = None
        self._since = 0.0
        self.seconds: dict[int, float] = {}  # for which each client had its turn

    @contextmanager
    def taken(self, client: int, weights: Tensor, deadline: Deadline) -> Iterator[None]:
        """Compute for a client with these weights."""
        try:
            self._begin(client, weights, deadline)
            yield
        finally:
            if self._holder == client:  # else it failed while it had given its turn up
                self._end(client)

    @contextmanager
    def given_up(self, client: int, deadline: Deadline) -> Iterator[None]:
        """Let others compute; at the end this client's weights are back, unless it failed."""
        weights = flatten(self.parameters)
        self._end(client)
        yield
        self._begin(client, weights, deadline)

    def share(self, client: int, deadline: Deadline) -> None:
        """Between two batches of a client: let those who wait compute; raise if the client's time is up."""
        deadline.left()
        if self._queue and time.perf_counter() - self._since > _SLICE:
            with self.given_up(client, deadline):
                pass

    def _begin(self, client: int, weights: Tensor, deadline: Deadline) -> None:
        with self._changed:
            self._queue.append(client)
            try:
                while self._holder is not None or self._queue[0] != client:
                    self._changed.wait(min(deadline.left(), 0.5))
                self._holder = client
            finally:
                self._queue.remove(client)
                self._changed.notify_all()
        self._since = time.perf_counter()
        unflatten_(self.parameters, weights)

    def _end(self, client: int) -> None:
        try:
            synchronize(self.parameters[0].device)
            self.seconds[client] = self.seconds.get(client, 0.0) + time.perf_counter() - self._since
        finally:  # a broken accelerator raises, and others still wait
            with self._changed:
                self._holder = None
                self._changed.notify_all()


class _Upload(Exchange[SmashedData]):
    """An upload, of which later batches may still be on their way.

    Whoever reads the next batch of it shares the server half with others first, and does not hold it while the batch
    is not there. The values of a batch are checked when it is first read, unless all were checked before.
    """

    def __init__(self, sent: Exchange[SmashedData], link: FlowerLink, payload: Growing, is_checked: bool):
        super().__init__(sent.store, sent.batches)
        self.packed, self._link, self._payload = sent.packed, link, payload
        self._unchecked = set[int]() if is_checked else set(range(len(sent)))

    @overload
    def __getitem__(self, index: int) -> SmashedData: ...
    @overload
    def __getitem__(self, index: slice) -> Exchange[SmashedData]: ...
    def __getitem__(self, index: int | slice) -> SmashedData | Exchange[SmashedData]:
        """Unpack a message, or choose some of them without unpacking."""
        if isinstance(index, slice):
            return _Upload(super().__getitem__(index), self._link, self._payload, not self._unchecked)
        index = range(len(self))[index]
        packed = self.packed[index]
        self._link.let_others_compute(until=packed.end, of=self._payload)
        message = super().__getitem__(index)
        if index in self._unchecked:
            self._link.check.finite(index, ((name, getattr(message, name)) for name in packed.tensors))
            self._unchecked.remove(index)
        return message


class FlowerLink(ClientLink):
    """The client is on the other side of a channel.

    Updates of single batches wait for the next upload and go with it: one message each way for a batch. The update of
    the whole round starts at once, in the background.

    Args:
        channel: to the client.
        context: of the round.
        check: what an upload must be.
        turn: given up while waiting.
        weights: what the client begins with.
        num_samples: that the client has.
        upload_tensors: of the size of the activations, that a batch's upload has.
        coded: what `weights` are and what the client's weights come as, unless as they are.
    """

    def __init__(
        self,
        channel: Channel,
        context: RoundContext,
        check: UploadCheck,
        turn: Turn,
        weights: Parameters,
        num_samples: int,
        upload_tensors: int = 1,
        coded: CodedWeights | None = None,
    ):
        super().__init__(context)
        self.coded = coded
        self.channel, self.check, self.turn = channel, check, turn
        self.weights, self.num_samples, self.upload_tensors = weights, num_samples, upload_tensors
        self.most_batches = math.ceil(num_samples / check.batch_size)
        self.trained: dict[str, Tensor] = {}
        self._num_batches: int | None = None
        self._declared = Declared()
        self._sent_samples: dict[int, int] = {}  # in each batch
        self._ahead: Exchange[SmashedData] | None = None  # batch 0, if it was uploaded before it was asked for
        self._waiting: list[dict[str, Any]] = []
        self._payload: Path | None = None
        self._finishing: Future[None] | None = None

    @property
    def num_batches(self) -> int:
        """How many batches the client has. If no answer has said so yet, the first is uploaded ahead."""
        if self._num_batches is None:
            self._ahead = self._ask_for([0])
        assert self._num_batches is not None
        return self._num_batches

    def fetch(self, batches: Sequence[int] | None) -> Exchange[SmashedData]:
        """Have the client upload; batch 0 may be here already."""
        asked = None if batches is None else list(batches)
        ahead, self._ahead = self._ahead, None
        sent = ahead if ahead is not None and asked == [0] else self._ask_for(asked)
        count = self.num_batches  # a method may count the batches over all epochs
        numbers = range(count) if asked is None else [batch % count for batch in asked]
        self._declared.check(sent, numbers, self.channel.deadline.left)
        for batch, packed in zip(numbers, sent.packed, strict=True):
            self._sent_samples[batch] = packed.tensors["activations"].shape[0]
        return sent

    def _ask_for(self, asked: list[int] | None) -> Exchange[SmashedData]:
        batches = self.most_batches if asked is None else len(asked)
        samples = min(self.num_samples, batches * self.check.batch_size)
        with self.turn.given_up(self.context.client, self.channel.deadline):
            limit = self.check.largest_upload(samples, batches, self.upload_tensors)
            payload = self._step([{"do": "upload", "batches": asked}], limit)
            if payload is None:
                raise TransferError("smashed data was asked for, none came")

            def kept(_: int, message: SmashedData) -> Places | None:
                self.channel.deadline.left()
                return self.context.store.places(kept_positions(self.check.sound(message), self.check.loss_spec))

            store, device, most_beside = self.context.store, self.context.device, self.check.most_beside()
            try:
                sent: Exchange[SmashedData] = read_exchange(
                    payload.path, SmashedData, store, kept, device, batches, most_beside, asked, payload.wait
                )
            finally:
                payload.path.unlink(missing_ok=True)  # an open file stays
            assert self._num_batches is not None  # a step tells it
            count = self._num_batches if asked is None else len(asked)
            is_whole = payload.is_whole
            check = self.check.exchange if is_whole else self.check.form  # the values then as they come
            check(sent, count, samples, self.channel.deadline.left)
        return _Upload(sent, self, payload, is_whole)

    def let_others_compute(self, until: int, of: Growing) -> None:
        """Between two batches: share the server half with others, who have it until so many bytes are there."""
        client, deadline = self.context.client, self.channel.deadline
        if of.has(until):
            self.turn.share(client, deadline)
        else:
            with self.turn.given_up(client, deadline):
                of.wait(until)

    def deliver(self, messages: Exchange[Message] | None, batches: Sequence[int] | None) -> None:
        """Send down what there is, with the next message to the client; that of the whole round goes at once."""
        if messages is not None:
            if self._payload is not None:
                raise RuntimeError("A round script sent two updates without an upload between them.")
            self._payload = self.channel.file("to")
            write_exchange(messages, self._payload)
        self._waiting.append({"do": "update", "batches": None if batches is None else list(batches)})
        if batches is None:
            self._finishing = _started(self._finish)

    def finish(self) -> None:
        """Wait for the trained weights of the client, which `trained` then holds."""
        with self.turn.given_up(self.context.client, self.channel.deadline):
            if self._finishing is None:
                self._finish()
            else:
                self._finishing.result()
        self._check_claim()

    def _check_claim(self) -> None:
        """Refuse a client that has not sent the samples by which it is weighted; a partial batch may be left out."""
        sent = sum(self._sent_samples.values())
        if self.num_samples - sent >= self.check.batch_size:
            raise TransferError(f"the client says it has {self.num_samples} samples, and has sent {sent}")

    def _finish(self) -> None:
        sent = *self.weights.adapters.values(), *self.weights.auxiliary.values()  # encoded, both have the same names
        own = sum(t.numel() * t.element_size() for t in sent)
        payload = self._step([{"do": "finish"}], limit=2 * own + _REPORT + 4 * self._most_reports() * len(OBSERVED))
        if payload is None:
            raise TransferError("trained weights were asked for, none came")
        try:
            result = read_message(payload.whole(), ClientResult)
        finally:
            payload.path.unlink(missing_ok=True)
        check_tensors(self.weights.adapters, result.adapters)
        check_tensors(self.weights.auxiliary, result.kept)
        check_observed(result.observed, self._most_reports())
        self.trained, self.kept = result.adapters, result.kept
        if self.coded is not None:  # here, not on the device: it is busy with another client's turn
            self.trained = self.coded.received(ADAPTERS, result.adapters)
            self.kept = self.coded.received(AUXILIARY, result.kept)
        self.observed.values = {name: list(t.unbind()) for name, t in result.observed.items()}
        self.meter.federate(self.weights.adapters, self.weights.auxiliary)

    def _most_reports(self) -> int:
        """Return how many numbers of a kind a client may report of its round."""
        return 8 * (self.local_epochs + 1) * (self._num_batches or self.most_batches) + len(self.weights.adapters)

    def _step(self, calls: list[dict[str, Any]], limit: int | None = None) -> Growing | None:
        payload, self._payload = self._payload, None
        calls, self._waiting = [*self._waiting, *calls], []
        if self.channel.sequence == 0:
            payload = self.channel.file("weights")
            write_message(self.weights, payload)
        start = time.monotonic()
        answer, received = self.channel.step(calls, payload, limit)
        took = time.monotonic() - start
        count, samples = integer(answer, "num_batches"), integer(answer, "num_samples")
        if samples != self.num_samples:
            raise TransferError(f"the client has {samples} samples now, it had {self.num_samples}")
        if not 1 <= count <= self.most_batches or self._num_batches not in (None, count):
            raise TransferError(
                f"the client has {count} batches of {samples} samples, at most {self.most_batches} are possible"
                + (f", it had {self._num_batches}" if self._num_batches else "")
            )
        self._num_batches = count
        seconds = answer.get("seconds")
        # Clocks differ, but not by much.
        if not isinstance(seconds, float) or not 0 <= seconds <= 1.1 * took + 1:
            raise TransferError(f"the client worked for {seconds!r} seconds, the answer took {took:.1f}")
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
