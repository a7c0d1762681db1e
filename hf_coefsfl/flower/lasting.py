"""What a client keeps across rounds, runs and restarts: the secret of its noise, and how often it has sent its data."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from filelock import FileLock

from .._io import write_atomically
from .errors import ClientFailure, Code

# Unless the client says otherwise: rounds in all, and how often the data of one round may be sent.
MOST_ROUNDS, MOST_UPLOADS = 10_000, 100
_SECRET_BYTES = 32
_REMEMBERED = 64  # rounds whose uploads are counted; one that was forgotten counts as a new round


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


def lasting_folder(client: int | None) -> Path:
    """Return the folder of a client's lasting files: below HF_COEFSFL_WORK, or else the user's folder for state.

    A client without a number has one, too: it may still send that it failed.
    """
    work = os.environ.get("HF_COEFSFL_WORK")
    parent = Path(work or os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    common = private_folder(parent / f"hf_coefsfl-{os.getuid()}-lasting")
    return private_folder(common / f"client-{'unknown' if client is None else client}")


class LastingState:
    """The lasting files of one client.

    Args:
        client: its number.
        most_rounds: of all runs together, after which the client refuses.
        most_uploads: of each batch of one round, after which the client refuses.
    """

    def __init__(self, client: int, most_rounds: int = MOST_ROUNDS, most_uploads: int = MOST_UPLOADS):
        self.folder = lasting_folder(client)
        self.most_rounds, self.most_uploads = most_rounds, most_uploads

    @property
    def secret(self) -> bytes:
        """The secret of the client's noise, drawn when it is first asked for."""
        path = self.folder / "secret"
        with self._locked():
            if not path.exists():
                write_atomically(path, secrets.token_bytes(_SECRET_BYTES))  # in a folder that only its user may read
                path.chmod(0o600)
            found = path.read_bytes()
        if len(found) != _SECRET_BYTES:
            raise ValueError(f"{path} is damaged. Delete it for a new secret: noise is drawn anew then.")
        return found

    def count(self, run: str, round_index: int, batches: int, of: int) -> None:
        """Count an upload of so many of the round's batches before it is made; refuse what is too much."""
        path, key = self.folder / "counts.json", f"{run}.{round_index}"
        with self._locked():
            counts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rounds": 0, "sent": {}}
            sent: dict[str, int] = counts["sent"]
            rounds, total = counts["rounds"] + (key not in sent), sent.pop(key, 0) + batches
            if rounds > self.most_rounds:
                raise _refusal(f"it has trained in {self.most_rounds} rounds, the most that it may")
            if total > self.most_uploads * of:
                raise _refusal(f"it has sent the data of this round {self.most_uploads} times, the most that it may")
            last = dict([*sent.items(), (key, total)][-_REMEMBERED:])
            write_atomically(path, json.dumps({"rounds": rounds, "sent": last}))

    def _locked(self) -> FileLock:
        """Keep other processes of the same client out."""
        return FileLock(self.folder / "lock")


def _refusal(reason: str) -> ClientFailure:
    return ClientFailure(Code.POLICY, f"This client refuses to go on: {reason}.")
