"""A spec of a comparison, its cells, and what finished runs leave."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
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


def journal(folder: Path) -> Counter[str]:
    path = folder / "journal"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def probe_point(round: int = 2) -> dict[str, Any]:
    """An entry of staleness.json."""
    point = {"round": round, "update": 1, "displacement": 1.0, "best_lambda": None, "helped_share": None}
    point |= {"surrogate_above": True, "norm": 2.0, "used_cosine": 0.6, "used_error": 0.4, "activation_error": 0.3}
    point |= {"server_cosine": 0.9, "server_error": 0.2, "stale_cosine": 0.5, "stale_error": 0.5}
    return point | {"compensated_cosine": 0.75, "compensated_error": 0.25}
