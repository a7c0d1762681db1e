"""A spec of a comparison, its cells, and the summary of a finished run."""

from collections.abc import Sequence
from typing import Any

from hf_coefsfl.compare import Cell, expand, parse_spec


def content(**changes: Any) -> dict[str, Any]:
    task = {"task": "cifar100", "model": "ViT", "model_name_or_path": "somewhere/vit", "cut": 2}
    lists = {"methods": ["reuse", "coef_d"], "learning_rates": [0.1, 0.2], "seeds": [0, 1, 2]}
    return {"settings": {"num_rounds": 4, "warmup_rounds": 1}, "tasks": [task], **lists} | changes


def cells_of(**changes: Any) -> list[Cell]:
    return expand(parse_spec(content(**changes), "test"))


def summary(*scores: float, names: Sequence[str] = ("accuracy",)) -> dict[str, Any]:
    curve = [{"round": 2, "mib": 3.0, "scores": dict(zip(names, scores, strict=True))}]
    return {"scores": dict(zip(names, scores, strict=True)), "curve": curve, "mib": 3.0, "transfers": 4, "seconds": 2.0}
