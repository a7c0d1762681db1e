"""A payload is read while it is received: those who wait hear when enough is there, and what goes wrong."""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_coefsfl.flower.growing import Growing
from hf_coefsfl.flower.transport import Cancelled, Deadline, Unanswered
from hf_coefsfl.flower.wire import Manifest, TransferError
from tests.support.deployed import LONG

DATA = bytes(range(100))


def growing(folder: Path, deadline: Deadline | None = None, data: bytes = DATA) -> Growing:
    manifest = Manifest(len(data), hashlib.sha256(data).hexdigest())
    return Growing(folder / "payload", manifest, (deadline or Deadline(LONG)).left)


def test_who_waits_goes_on_when_enough_is_there(tmp_path: Path) -> None:
    payload, pool = growing(tmp_path), ThreadPoolExecutor(3)
    first, second, all_of_it = pool.submit(payload.wait, 10), pool.submit(payload.wait, 11), pool.submit(payload.whole)
    assert payload.append(DATA[:10]) == 10
    first.result(LONG)
    assert payload.has(10) and not payload.has(11) and not second.done()
    assert payload.path.stat().st_size == len(DATA)  # as large as it will be, for who checks its form
    payload.append(DATA[10:])
    second.result(LONG)
    payload.wait(10**9)  # more than there will ever be: all of it
    assert not all_of_it.done() and not payload.is_whole  # nobody has compared it with its checksum
    payload.end()
    assert all_of_it.result(LONG).read_bytes() == DATA and payload.is_whole
    pool.shutdown()


def test_a_payload_that_is_not_there_takes_no_room(tmp_path: Path) -> None:
    payload = Growing(tmp_path / "payload", Manifest(2**28, "x"), Deadline(LONG).left)
    payload.append(DATA)
    assert payload.path.stat().st_size == 2**28
    assert payload.path.stat().st_blocks * 512 < 2**20


def test_what_goes_wrong_is_told_to_all_who_wait(tmp_path: Path) -> None:
    payload, pool = growing(tmp_path), ThreadPoolExecutor(2)
    waiting = [pool.submit(payload.wait, 50), pool.submit(payload.whole)]
    payload.append(DATA[:10])
    payload.end(Unanswered("gone"))
    for future in waiting:
        assert isinstance(future.exception(LONG), Unanswered)
    assert not payload.has(10)  # what is there is of no use now
    with pytest.raises(Unanswered, match="gone"):
        payload.wait(10)
    pool.shutdown()


@pytest.mark.parametrize("change", [lambda d: d[:-1] + b"x", lambda d: b"x" + d[1:]])
def test_the_whole_must_fit_its_checksum(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    payload = growing(tmp_path)
    payload.append(change(DATA))
    payload.wait(len(DATA))
    payload.end()
    with pytest.raises(TransferError, match="the checksum of a payload is wrong"):
        payload.whole()
    with pytest.raises(TransferError, match="the checksum of a payload is wrong"):
        payload.wait(1)
    assert not payload.is_whole


def test_no_more_and_no_less_than_was_announced(tmp_path: Path) -> None:
    payload = growing(tmp_path)
    payload.append(DATA[:60])
    with pytest.raises(TransferError, match="more than the announced 100 bytes came"):
        payload.append(DATA[:41])
    with pytest.raises(TransferError, match="nothing came for byte 60 of 100"):
        payload.append(b"")
    payload.end()
    with pytest.raises(TransferError, match="checksum"):
        payload.whole()
    nothing = growing(tmp_path, data=b"")
    nothing.append(b"")
    nothing.end()
    assert nothing.whole().read_bytes() == b""


def test_waiting_ends_with_the_deadline(tmp_path: Path) -> None:
    over, cancelled = Deadline(0.0), Deadline(LONG)
    with pytest.raises(Unanswered, match="no answer within"):
        growing(tmp_path, over).wait(1)
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()
        payload = growing(tmp_path, cancelled)
        waits = pool.submit(lambda: (begun.set(), payload.wait(1)))
        assert begun.wait(LONG)
        cancelled.cancelled.set()
        assert isinstance(waits.exception(LONG), Cancelled)
