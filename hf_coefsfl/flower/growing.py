"""A payload of which the server reads the beginning while the rest is on its way."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from .wire import Manifest, TransferError

_LOOK = 0.5  # seconds between two looks at the deadline


class Growing:
    """A payload that is being received into a file, by one thread for others.

    The file has its whole size from the beginning, so that it can be read as what it will be. It takes no room where
    nothing has come yet.

    Args:
        path: of the file. It may be deleted as soon as its readers have opened it.
        manifest: what was announced.
        left: raises if nobody waits for the payload any longer.
    """

    def __init__(self, path: Path, manifest: Manifest, left: Callable[[], float]):
        self.path, self.size = path, manifest.size
        self._sha256, self._left = manifest.sha256, left
        self._checksum = hashlib.sha256()
        self._changed = threading.Condition()
        self._there = 0  # bytes
        self._whole, self._error = False, None  # type: bool, BaseException | None
        self._file = path.open("wb", buffering=0)
        self._file.truncate(self.size)

    # ---- Its sender's side ----

    def append(self, chunk: bytes) -> int:
        """Write the next chunk; return how many bytes there are now."""
        there = self._there + len(chunk)
        if there > self.size:
            raise TransferError(f"more than the announced {self.size} bytes came")
        if not chunk and there < self.size:
            raise TransferError(f"nothing came for byte {there} of {self.size}")
        data = memoryview(chunk)
        while data:
            data = data[self._file.write(data) :]
        self._checksum.update(chunk)
        with self._changed:
            self._there = there
            self._changed.notify_all()
        return there

    def end(self, error: BaseException | None = None) -> None:
        """Have all who wait go on: nothing comes any more, because all is there or for this reason."""
        self._file.close()
        if error is None and self._checksum.hexdigest() != self._sha256:
            error = TransferError("the checksum of a payload is wrong")
        with self._changed:
            self._whole, self._error = error is None, error
            self._changed.notify_all()

    # ---- Its readers' side ----

    @property
    def is_whole(self) -> bool:
        """Whether all has come, and is what was announced."""
        return self._whole

    def has(self, end: int) -> bool:
        """Whether so many bytes are there, or all if there are fewer, and nothing went wrong."""
        return self._error is None and self._there >= min(end, self.size)

    def wait(self, end: int) -> None:
        """Return when so many bytes are there, which nobody has compared with the checksum; raise what went wrong."""
        self._until(lambda: self.has(end))

    def whole(self) -> Path:
        """Return the file when all of it is there and is what was announced; raise what went wrong."""
        self._until(lambda: self._whole)
        return self.path

    def _until(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            while self._error is None and not reached():
                self._changed.wait(min(self._left(), _LOOK))
        if self._error is not None:
            raise self._error
