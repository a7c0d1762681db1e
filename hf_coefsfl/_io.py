"""Files that are complete or absent."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes, sync: bool = False) -> None:
    """Write a file so that a reader, or a kill, never finds half of it; `sync` waits until it is on the disk."""
    data = content.encode() if isinstance(content, str) else content
    name = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # less the user's umask
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


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
