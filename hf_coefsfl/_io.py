"""Files that are complete or absent, and disks that do not take them."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What a disk answers that takes no more; and what it also answers those who read.
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENAMETOOLONG)
_EITHER = (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # of file systems that cannot sync a folder
_WRITER = r"enforce fail at inline_container\.cc(?!.*Reader)|PytorchStreamWriter failed"  # of torch.save


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, a kill or a power cut never finds half of it; return when it is on the disk."""
    data = content.encode() if isinstance(content, str) else content
    name = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # less the user's umask
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or which files a folder holds, is on the disk, if the file system can tell."""
    if os.name == "nt":  # which does not sync what is open for reading, and does not open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC or not path.is_dir():
            raise
    finally:
        os.close(handle)


def is_disk_full(error: BaseException) -> bool:
    """Return whether the disk took no more, or a file grew larger than it may."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_fault(error: BaseException) -> str | None:
    """Return what the disk refused, and why ("a file cannot be written (...)"), or None for an error of another kind.

    Safetensors and PyTorch hide the number of the operating system in an error of their own.
    """
    number = error.errno if isinstance(error, OSError) else None
    place = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    found = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(error))
    if number is None and found is not None and type(error).__module__.startswith("safetensors"):
        number = int(found[1] or found[2])
    if number is None and isinstance(error, RuntimeError) and re.search(_WRITER, str(error)):
        return f"a file cannot be written ({str(error).partition('strerror: ')[2] or 'not in full'})"
    if number is None or number not in (*_WRITING, *_EITHER):
        return None
    return f"a file cannot be {'written' if number in _WRITING else 'read or written'} ({os.strerror(number)}{place})"


def to_json(content: Any) -> str:
    """Return content as JSON, with null for the numbers that JSON does not have."""
    return json.dumps(finite(content), indent=1) + "\n"


def finite(content: Any) -> Any:
    """Return JSON content with None for NaN and infinities."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, (list, tuple)) else content
