"""Where the files of one side are: a folder, or a repo of the Hub of which only that side is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import get_token, snapshot_download

_KINDS = {
    "adapter_model.safetensors": "an adapter: split the base model and use load_adapter",
    "split.json": "a half of the model: use load_{}",
}


def side_folder(
    source: str | Path, side: str, marker: str, *, revision: str | None = None, token: str | None = None
) -> Path:
    """Return the folder of one side's files; of a repo, only these are downloaded.

    Args:
        source: a folder with the side's files, a folder with `client/` and `server/` in it, or the id of such a repo.
        side: "client" or "server".
        marker: the file that must be there.
        revision: branch, tag or commit of the repo.
        token: for private repos; default: the one of `hf auth login` or HF_TOKEN.
    """
    folder = Path(source)
    if folder.is_dir():
        side_files = folder / side if (folder / side / marker).is_file() else folder
    elif isinstance(source, Path):
        raise ValueError(f"There is no folder {source}.")
    else:
        try:
            snapshot = snapshot_download(source, revision=revision, token=token, allow_patterns=f"{side}/*")
        except Exception as error:
            raise ValueError(
                f"{source!r} is not a folder here, and as a repo of the Hub it cannot be read: {describe(error, token)}"
            ) from error
        side_files = Path(snapshot) / side
    if not (side_files / marker).is_file():
        other = "".join(
            f" It holds {what.format(side)}." for name, what in _KINDS.items() if (side_files / name).is_file()
        )
        raise ValueError(
            f"{source} holds no {marker}, neither itself nor in {side}/.{other} Give what save_model or push_to_hub of "
            "a SplitFedTrainer left: its folder or repo, or the folder of one side."
        )
    return side_files


def describe(error: Exception, token: str | None = None) -> str:
    """Return an error as one line without secrets: no token, no signed address."""
    text = " ".join(re.sub(r"For more information check: \S+", "", str(error)).split())
    text = re.sub(r"\?[^\s'\"]+", "?...", text)
    for secret in (token, get_token()):
        text = text.replace(secret, "<TOKEN>") if secret else text
    return f"{type(error).__name__}: {text.rstrip('.')}."
