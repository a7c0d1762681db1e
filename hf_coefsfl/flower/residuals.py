"""What encoding has taken from a client's updates (`adapter_codec`): it stays with the client, for its next update.

The client does not know which of its updates were averaged, or whether the server has gone back to a checkpoint. So
it keeps the residuals of three rounds: its last one, the last that counted, and the last that counted when the server
wrote its last checkpoint. The server names the second and the third.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .._io import write_atomically
from .lasting import LastingState, private_folder
from .wire import integer, text

logger = logging.getLogger(__name__)
NONE = -1  # no round of the client has counted
_MOST_RUNS = 4  # of which residuals are kept, whatever a server says


class Residuals:
    """The residuals of one client in one run.

    Args:
        lasting: the client's lasting files, among which residuals lie.
        header: of a message: the run (`residuals`), which has the same name after a restart of the server; the
            client's last round that counted (`residual_round`), and the same as the server's last checkpoint has it
            (`residual_saved`).
    """

    def __init__(self, lasting: LastingState, header: Mapping[str, Any]):
        name = hashlib.sha256(text(header, "residuals").encode()).hexdigest()[:32]
        self.lasting, self.parent = lasting, private_folder(lasting.folder / "residuals")
        self.folder = self.parent / name
        self.last, self.saved = integer(header, "residual_round"), integer(header, "residual_saved")

    def load(self, sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """Return the residuals of the client's last round that counted, by name; nothing if they are lost."""
        path = self.folder / str(self.last)
        if self.last == NONE:
            return {}
        try:
            found = load(path.read_bytes())
            for name, t in found.items():
                if (t.dtype, tuple(t.shape)) != (torch.float32, (sizes.get(name),)) or not bool(t.isfinite().all()):
                    raise ValueError(f"{path} is damaged")
        except (OSError, SafetensorError, ValueError) as error:
            logger.warning("The residual of round %d is lost, it begins at 0: %s", self.last + 1, error)
            return {}
        return {name: t.to(device) for name, t in found.items()}

    def keep(self, round_index: int, residuals: Mapping[str, Tensor]) -> None:
        """Keep what a round leaves, and what the server may still ask for if it goes back to its last checkpoint."""
        tensors = {name: t.detach().cpu().contiguous() for name, t in residuals.items()}
        with self.lasting.locked():
            private_folder(self.folder)
            for path in list(self.folder.iterdir()):
                if path.name not in (str(self.last), str(self.saved)):
                    path.unlink()
            write_atomically(self.folder / str(round_index), save(tensors))
            runs = sorted(self.parent.iterdir(), key=lambda path: path.stat().st_mtime)
            for run in runs[:-_MOST_RUNS]:
                shutil.rmtree(run)
