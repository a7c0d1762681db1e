"""A tiny federation for the tests of the trainer: small models, learnable synthetic data, a few clients."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Array3D, Dataset, Features, Value
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from hf_coefsfl import SplitFedConfig, SplitFedTrainer

CLASSES = 3
D = 5 * 16  # values of one sample's smashed data in tiny_vit: 4 patches and the class token, 16 features
# Options that make the expensive methods quick; what they compute is tested elsewhere.
FEWER_PASSES: dict[str, dict[str, Any]] = {"hutchinson": {"num_probes": 2}, "ggn": {"rank": 2, "num_iterations": 3}}
QUICK = FEWER_PASSES | {"fsl_sage": {"align_epochs": 2, "align_every": 2}}


def tiny_vit(dropout: float = 0.1, seed: int = 0, **kwargs: Any) -> ViTForImageClassification:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    image = {"image_size": 8, "patch_size": 4, "num_channels": 1}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return ViTForImageClassification(ViTConfig(**sizes, **image, **drop, num_labels=CLASSES, **kwargs))


def tiny_bert(dropout: float = 0.1, seed: int = 0) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(vocab_size=40, **sizes, **drop, num_labels=CLASSES))


def images(size: int = 72, seed: int = 0) -> Dataset:
    """8x8 images whose bright rows tell the class."""
    return _images(size, seed).with_format("torch")


@cache
def _images(size: int, seed: int) -> Dataset:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, size)
    pixels = rng.normal(size=(size, 1, 8, 8)).astype("float32")
    for image, label in zip(pixels, labels, strict=True):
        image[0, 2 * label : 2 * label + 2] += 2.0
    owner = [f"site {i % 4}" for i in range(size)]
    data = {"pixel_values": pixels, "labels": labels, "owner": owner}
    features = {"pixel_values": Array3D((1, 8, 8), "float32"), "labels": Value("int64"), "owner": Value("string")}
    return Dataset.from_dict(data, features=Features(features))


def texts(size: int = 72, seed: int = 0) -> Dataset:
    """Token sequences of several lengths, padded; the first token tells the class."""
    return _texts(size, seed).with_format("torch")


@cache
def _texts(size: int, seed: int) -> Dataset:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(size):
        label, length = int(rng.integers(CLASSES)), int(rng.integers(3, 9))
        ids = [label + 1, *rng.integers(5, 40, length - 1).tolist()]
        rows.append({"input_ids": ids + [0] * (8 - length), "attention_mask": [1] * length + [0] * (8 - length)})
        rows[-1]["labels"] = label
    return Dataset.from_list(rows)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def config(folder: Path | str, **changes: Any) -> SplitFedConfig:
    settings: dict[str, Any] = {
        "method": "coef_j",
        "cut": 2,
        "num_clients": 6,
        "participation": 0.5,
        "num_rounds": 4,
        "warmup_rounds": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    settings |= changes
    settings.setdefault("method_kwargs", FEWER_PASSES.get(settings["method"]))
    return SplitFedConfig(output_dir=str(folder), **settings)


def trainer(folder: Path | str, model: Any = None, data: Any = None, **changes: Any) -> SplitFedTrainer:
    names = ("callbacks", "peft_config", "eval_dataset", "compute_metrics", "data_collator")
    parts = {name: changes.pop(name) for name in names if name in changes}
    parts.setdefault("eval_dataset", images(24, seed=1))
    parts.setdefault("compute_metrics", accuracy)
    return SplitFedTrainer(
        model=tiny_vit() if model is None else model,
        args=config(folder, **changes),
        train_dataset=images() if data is None else data,
        **parts,
    )


def weights(run: SplitFedTrainer) -> dict[str, torch.Tensor]:
    both = {**run.client_parameters, **run.server_parameters}
    return {name: p.detach().clone() for name, p in both.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rounds(run: SplitFedTrainer) -> list[dict[str, float]]:
    """The logged rounds without what depends on the clock."""
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    return [{k: v for k, v in entry.items() if not k.endswith("seconds")} for entry in logs]
