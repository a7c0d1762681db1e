"""The card of a run."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from hf_coefsfl import SplitFedTrainer


def card_of(run: SplitFedTrainer) -> str:
    return (Path(run.args.output_dir or "") / "README.md").read_text()


def header(run: SplitFedTrainer) -> Any:
    return ModelCard.load(Path(run.args.output_dir or "") / "README.md").data
