"""What a client tells the server when it fails: a code with a fixed text. The details stay in the client's log.

This module imports no PyTorch: a process that only passes on a chunk starts at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from flwr.app import Error
from flwr.common.constant import ErrorCode

from .wire import TransferError

_OF_FLOWER = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "the client's ClientApp cannot be loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "the client's ClientApp failed",
    ErrorCode.MESSAGE_UNAVAILABLE: "the message is gone: its time was over before the client took it",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "the answer is gone: its time was over",
    ErrorCode.NODE_UNAVAILABLE: "the client's node is gone",
    ErrorCode.INVALID_FAB: "the client does not take the app of this run",
    ErrorCode.CLIENT_APP_CRASHED: "the client's ClientApp ended without an answer",
}


class Code(Enum):
    """Why a client does not do what it was asked for."""

    DATA = 101, "E01: the client cannot use its data for this run"
    POLICY = 102, "E02: the client's policy refuses this run"
    PROTOCOL = 103, "E03: the client did not expect this message"
    SETUP = 104, "E04: the client's configuration, its half of the model and the options of the run do not fit"
    INTERNAL = 199, "E99: the client failed"

    def error(self) -> Error:
        """Return what is sent."""
        number, words = self.value
        return Error(number, words)


class ClientFailure(Exception):
    """A failure with a code; what it says is for the client's own log."""

    def __init__(self, code: Code, reason: str):
        super().__init__(reason)
        self.code = code


@contextmanager
def failing_as(code: Code) -> Iterator[None]:
    """Give a code to what is raised here, unless it has one."""
    try:
        yield
    except ClientFailure:
        raise
    except Exception as error:
        raise ClientFailure(code, f"{type(error).__name__}: {error}") from error


def code_of(error: BaseException) -> Code:
    """Return the code of whatever a client raised."""
    if isinstance(error, ClientFailure):
        return error.code
    return Code.PROTOCOL if isinstance(error, TransferError) else Code.INTERNAL


def told(error: Error) -> str:
    """Return what the server's log says of an error, of which only the code counts: the words are anyone's."""
    for code in Code:
        number, words = code.value
        if number == error.code:
            return f"{words} (its own log says why)"
    if error.code in _OF_FLOWER:
        return f"{_OF_FLOWER[error.code]} (error {error.code} of Flower)"
    return f"the client reports error {error.code}, which this version does not know"
