"""A TCP proxy that counts what passes through it, by request, and can be slow. It needs no rights of an administrator.

proxy = Proxy(target_port)  # clients connect to proxy.port
proxy.limit(rate=10e6 / 8, delay=0.05)

A direction lets `rate` bytes a second through, with a bucket of 32 KiB that may pass at once after a pause. Each byte
arrives `delay` seconds later, and opening a connection takes a round trip. What the proxy sees is what a network would
carry above TCP: HTTP headers count; the headers of TCP and IP, acknowledgements and TCP's slow start do not.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

CHUNK, BUCKET, IN_FLIGHT = 2**14, 2**15, 512  # bytes, bytes, chunks


@dataclass
class Connection:
    """A connection of HTTP/1.1, which has one request at a time."""

    request: str = "other"  # the last part of its path
    is_answered: bool = True


@dataclass(frozen=True)
class Seen:
    """A part of what came in one direction."""

    when: float
    size: int
    request: str
    begins: bool  # whether it is the beginning of a request


class Lane:
    """One direction of a link. Its connections share the rate, and every byte arrives later by the delay."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks  # whether requests come here, or answers
        self.rate, self.delay = math.inf, 0.0  # bytes per second, seconds
        self.seen: list[Seen] = []
        self._free = 0.0  # when all that came so far is through

    def carry(
        self, connection: Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> list[Coroutine[Any, Any, None]]:
        """Return what copies a connection in this direction, up to and with its end."""
        flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)
        return [self._take(connection, source, flying), self._give(flying, sink)]

    async def _take(
        self, connection: Connection, source: asyncio.StreamReader, flying: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        while True:
            data = await source.read(CHUNK)
            # A request begins with a read: it is sent when the answer to the last one has come.
            begins = self.asks and connection.is_answered and data.startswith(b"POST /")
            if begins:
                connection.request = data.split(b" ", 2)[1].rsplit(b"/", 1)[1].decode()
            connection.is_answered = not self.asks
            self.seen.append(Seen(time.time(), len(data), connection.request, begins))
            now = time.monotonic()
            # A bucket of tokens, told by the time at which it will be empty.
            self._free = through = max(self._free, now - BUCKET / self.rate) + len(data) / self.rate
            if through > now:
                await asyncio.sleep(through - now)
            await flying.put((max(through, now) + self.delay, data))
            if not data:
                return

    async def _give(self, flying: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        while True:
            due, data = await flying.get()
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            if not data:
                sink.write_eof()
                return
            sink.write(data)
            await sink.drain()

    def count(self, start: float, end: float) -> int:
        """Return the bytes that came in a time."""
        return sum(part.size for part in list(self.seen) if start <= part.when <= end)


class Proxy:
    """Passes the connections of one client on to a port of this machine, both directions as lanes, in a thread."""

    def __init__(self, target: int):
        self.target, self.up, self.down = target, Lane(asks=True), Lane(asks=False)
        self.loop, self._copies = asyncio.new_event_loop(), set[asyncio.Future[None]]()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self.loop
        ).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    def limit(self, rate: float = math.inf, delay: float = 0.0) -> None:
        """From here on, let so many bytes per second through in each direction, each later by the delay."""
        for lane in (self.up, self.down):
            lane.rate, lane.delay = rate, delay

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def requests(self, start: float, end: float) -> dict[str, list[int]]:
        """Return of each kind of request in a time: how many there were, and their bytes up and down."""
        counts: dict[str, list[int]] = {}
        for way, lane in enumerate((self.up, self.down)):
            for part in list(lane.seen):
                if start <= part.when <= end:
                    count = counts.setdefault(part.request, [0, 0, 0])
                    count[0] += part.begins
                    count[1 + way] += part.size
        return counts

    async def _end(self) -> None:
        self._server.close()
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.sleep(self.up.delay + self.down.delay)  # of a handshake
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        connection = Connection()
        copies = [
            *self.up.carry(connection, reader, their_writer),
            *self.down.carry(connection, their_reader, writer),
        ]
        tasks = {asyncio.ensure_future(copy) for copy in copies}
        self._copies |= tasks
        try:  # an end in one direction leaves the other open, a broken connection closes both
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._copies -= tasks
            writer.close()
            their_writer.close()
