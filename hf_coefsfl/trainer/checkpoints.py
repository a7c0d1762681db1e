"""Checkpoints with a seal: a file, written last, that lists every other file with its size and checksum."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .._io import to_json, write_atomically

logger = logging.getLogger(__name__)
SEAL_NAME = "sealed.json"


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has the name of a checkpoint."""
    return re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name) is not None


def clear(folder: Path) -> None:
    """Remove what an interrupted save left in the folder of a checkpoint."""
    if folder.exists():
        shutil.rmtree(folder)


def seal(folder: Path) -> None:
    """Mark a checkpoint as complete. Its files reach the disk before the seal does."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != SEAL_NAME:
            name = path.relative_to(folder).as_posix()
            files[name] = {"bytes": path.stat().st_size, "sha256": _checksum(path)}
    write_atomically(folder / SEAL_NAME, to_json(files), sync=True)


def fault(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if it is complete."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        sealed = json.loads((folder / SEAL_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {SEAL_NAME}: its writing was interrupted"
    except ValueError:
        return f"its {SEAL_NAME} cannot be read"
    for name, expected in sealed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        if _checksum(path) != expected["sha256"]:
            return f"the content of {name} has changed"
    return None


def last_complete(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a run, or None; incomplete ones are reported and skipped."""
    folder = Path(output_dir)
    checkpoints = [path for path in folder.iterdir() if is_checkpoint(path)] if folder.is_dir() else []
    for path in sorted(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        wrong = fault(path)
        if wrong is None:
            return str(path)
        logger.warning("The checkpoint %s is skipped: %s.", path, wrong)
    return None


def _checksum(path: Path) -> str:
    """Return the SHA-256 of a file, after it has reached the disk."""
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while part := file.read(1 << 20):
            checksum.update(part)
    return checksum.hexdigest()
