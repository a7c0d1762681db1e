"""Checkpoints with a seal: a file, written last, that lists every other file with its size and checksum."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .._io import sync, to_json, write_atomically
from .identity import IDENTITY_NAME

logger = logging.getLogger(__name__)
SEAL_NAME = "sealed.json"
LEDGER_NAME = "communication.json"
PROBE_NAME = "staleness.json"
STATE_NAME = "method_state.safetensors"  # what a method keeps beside the model
# What a seal must name: these, one of the weights, and every file there that a resume would read. Adapters that are
# not called "default" have folders of their own.
_NEEDED = (TRAINER_STATE_NAME, LEDGER_NAME)
_WEIGHTS = (SAFETENSORS_WEIGHTS_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
_READ = (
    *_WEIGHTS, "model-*-of-*.safetensors", "config.json", "adapter_config.json", f"*/{SAFETENSORS_WEIGHTS_NAME}",
    "*/adapter_config.json", "rng_state*.pth", "optimizer.pt", "scheduler.pt", "scaler.pt", STATE_NAME, PROBE_NAME,
    IDENTITY_NAME,
)  # fmt: skip


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has the name of a checkpoint."""
    return re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name) is not None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of an output folder, the newest last. A copy under another name is not one."""
    found = [path for path in folder.iterdir() if is_checkpoint(path)] if folder.is_dir() else []
    return sorted(found, key=rounds_of)


def rounds_of(checkpoint: Path) -> int:
    """Return the number in the name of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def clear(folder: Path) -> None:
    """Remove what an interrupted save left in the folder of a checkpoint."""
    if folder.exists():
        shutil.rmtree(folder)


def seal(folder: Path) -> None:
    """Mark a checkpoint as complete. Its files reach the disk before the seal does, and the folder with them."""
    files = {}
    for path in sorted(folder.rglob("*")):
        sync(path)
        if path.is_file() and path.name != SEAL_NAME:
            name = path.relative_to(folder).as_posix()
            files[name] = {"bytes": path.stat().st_size, "sha256": _checksum(path)}
    write_atomically(folder / SEAL_NAME, to_json(files))
    sync(folder.parent)


def fault(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if it is complete."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        sealed = json.loads((folder / SEAL_NAME).read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except FileNotFoundError:
        return f"it has no {SEAL_NAME}: its writing was interrupted"
    except (OSError, ValueError, RecursionError):
        return f"its {SEAL_NAME} cannot be read"
    if not isinstance(sealed, dict) or not all(map(_is_entry, sealed.values())):
        return f"its {SEAL_NAME} is damaged"
    written = {path.relative_to(folder).as_posix() for kind in _READ for path in folder.glob(kind)}
    unnamed = sorted({*_NEEDED, *written} - {*sealed, SEAL_NAME})
    if unnamed:
        return f"its {SEAL_NAME} does not name {unnamed[0]}"
    if not any(PurePosixPath(name).name in _WEIGHTS for name in sealed):
        return f"its {SEAL_NAME} names no weights"
    for name, expected in sealed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _checksum(path) != expected["sha256"]:
                return f"the content of {name} has changed"
        except OSError:
            return f"{name} cannot be read"
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; a name that stands there twice has taken another's place."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}


def last_complete(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a run, or None; incomplete ones are reported and skipped."""
    for path in reversed(checkpoints_in(Path(output_dir))):
        wrong = fault(path)
        if wrong is None:
            return str(path)
        logger.warning("The checkpoint %s is skipped: %s.", path, wrong)
    return None


def rotate(output_dir: str | os.PathLike[str], limit: int | None, needed: Iterable[str | None]) -> None:
    """Delete the oldest checkpoints until `limit` are left. The newest and those that are needed stay in any case.

    As in `Trainer`, None and numbers below 1 are no limit.
    """
    checkpoints = checkpoints_in(Path(output_dir))
    surplus = len(checkpoints) - limit if limit and limit > 0 else 0
    kept = {*checkpoints[-1:], *(Path(path) for path in needed if path)}
    for path in [path for path in checkpoints if path not in kept][: max(surplus, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _checksum(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            checksum.update(part)
    return checksum.hexdigest()
