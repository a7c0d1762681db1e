"""What a client keeps across rounds, runs and restarts: the secret of its noise, and how often it has sent its data."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from .._io import write_atomically
from .errors import ClientFailure, Code

# Unless the client says otherwise: rounds in all, and how often the data of one round may be sent.
MOST_ROUNDS, MOST_UPLOADS = 10_000, 100
_SECRET_BYTES = 32
_REMEMBERED = 16  # rounds whose uploads are counted; one that was forgotten counts as a new round


def private_folder(folder: Path) -> Path:
    """Return a folder that only its user may read, made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise PermissionError(f"{error}. Set HF_COEFSFL_WORK to a folder of your own.") from error
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} is not this user's folder. Set HF_COEFSFL_WORK to a folder of your own.")
    folder.chmod(0o700)
    return folder


def lasting_folder(node_config: Mapping[str, Any]) -> Path:
    """Return the folder of a client's lasting files: below HF_COEFSFL_WORK, or else the user's folder for state.

    Each client number has one for each dataset. A client without a number has one, too: it may still send that it
    failed.
    """
    work = os.environ.get("HF_COEFSFL_WORK") or os.environ.get("XDG_STATE_HOME")
    try:
        parent = Path(work) if work else Path.home() / ".local" / "state"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise PermissionError(f"{error} Set HF_COEFSFL_WORK to a folder that lasts.") from error
    client, data = node_config.get("partition-id"), str(node_config.get("dataset") or "")
    name = f"client-{client if type(client) is int else 'unknown'}"
    if data:
        path = Path(data)
        name += "-" + hashlib.sha256(str(path.resolve() if path.exists() else data).encode()).hexdigest()[:12]
    return private_folder(private_folder(parent / f"hf_coefsfl-{os.getuid()}-lasting") / name)


class LastingState:
    """The lasting files of one client.

    Args:
        node_config: its number and its dataset.
        most_rounds: of all runs together, after which the client refuses.
        most_uploads: of each batch of one round, after which the client refuses.
    """

    def __init__(
        self, node_config: Mapping[str, Any], most_rounds: int = MOST_ROUNDS, most_uploads: int = MOST_UPLOADS
    ):
        self.node_config, self.most_rounds, self.most_uploads = node_config, most_rounds, most_uploads

    @property
    def folder(self) -> Path:
        """Where they are."""
        return lasting_folder(self.node_config)

    @property
    def secret(self) -> bytes:
        """The secret of the client's noise, drawn when it is first asked for."""
        path = self.folder / "secret"
        with self.locked():
            if not path.exists():
                write_atomically(path, secrets.token_bytes(_SECRET_BYTES))  # in a folder that only its user may read
                path.chmod(0o600)
            found = path.read_bytes()
        if len(found) != _SECRET_BYTES:
            raise ValueError(f"{path} is damaged. Delete it for a new secret: noise is drawn anew then.")
        return found

    def keep(self, settings: Mapping[str, Any]) -> None:
        """Keep what noise is drawn with for good: two sizes of it cancel, and other inputs have another draw."""
        path = self.folder / "noise.json"
        with self.locked():
            kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
            for name, value in settings.items():
                if kept.setdefault(name, value) != value:
                    raise _refusal(
                        f"the run has {name}={value}, it has sent data with {kept[name]} before, and noise that is "
                        f"sent in two ways can be removed. Delete {path} to allow another value"
                    )
            write_atomically(path, json.dumps(kept))

    def count(self, run: str, round_index: int, batches: Sequence[int]) -> None:
        """Count an upload of some of the round's batches before it is made; refuse what is too much."""
        path, key = self.folder / "counts.json", f"{run}.{round_index}"
        with self.locked():
            counts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rounds": 0, "sent": {}}
            sent: dict[str, list[int]] = counts["sent"]
            rounds, times = counts["rounds"] + (key not in sent), sent.pop(key, [])
            if rounds > self.most_rounds:
                raise _refusal(f"it has trained in {self.most_rounds} rounds, the most that it may. {path} counts them")
            times += [0] * (max(batches, default=-1) + 1 - len(times))
            for batch in batches:
                times[batch] += 1
            if max(times, default=0) > self.most_uploads:
                raise _refusal(f"it has sent data of this round {self.most_uploads} times, the most that it may")
            last = dict([*sent.items(), (key, times)][-_REMEMBERED:])
            write_atomically(path, json.dumps({"rounds": rounds, "sent": last}))

    def locked(self) -> FileLock:
        """Keep other processes of the same client out."""
        return FileLock(self.folder / "lock")


def _refusal(reason: str) -> ClientFailure:
    return ClientFailure(Code.POLICY, f"This client refuses to go on: {reason}.")
