"""Data and a small model for a first look without a network: scikit-learn's digits, and a ViT pretrained on a part.

They are used under the names `digits` (a dataset) and `digits-vit` (a model). The 1,797 images of 8 x 8 pixels are
split once and for all. The model is pretrained on public images of the digits 0 to 4. Clients hold private images of
all ten digits, and other images test.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image
from huggingface_hub.constants import HF_HOME
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from ..protocol.seeds import preserved_random_state, set_random_state

DATASET, MODEL = "digits", "digits-vit"
_PUBLIC, _TEST = 500, 400
_PRETRAINING_STEPS = 200


def load_digits() -> Mapping[str, Dataset]:
    """Return the splits "public", "train" and "test" with the columns image and label."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ValueError(
            "The digits come with scikit-learn, which is not installed: pip install 'hf_coefsfl[quickstart]'."
        ) from error
    images, labels = datasets.load_digits(return_X_y=True)
    pixels = np.clip(images.reshape(-1, 8, 8) * 16, 0, 255).astype(np.uint8)  # 0..16 to 0..255
    order = np.random.default_rng(0).permutation(len(pixels))
    features = Features({"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])})

    def rows(chosen: np.ndarray) -> Dataset:
        table = {"image": list(pixels[chosen]), "label": labels[chosen].tolist()}
        return Dataset.from_dict(table, features=features)

    public = order[:_PUBLIC]
    return {
        "public": rows(public[labels[public] < 5]),
        "train": rows(order[_PUBLIC:-_TEST]),
        "test": rows(order[-_TEST:]),
    }


def digits_model() -> str:
    """Return the folder of the pretrained model, which is made when it is first asked for (a few seconds)."""
    folder = Path(HF_HOME, "hf_coefsfl", MODEL)
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _pretrain(making)
            making.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return str(folder)


def _pretrain(folder: Path) -> None:
    public = load_digits()["public"]
    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    images = processor(images=[image.convert("RGB") for image in public["image"]], return_tensors="pt")["pixel_values"]
    labels = torch.tensor(public["label"])
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=8, patch_size=2,
        id2label={digit: str(digit) for digit in range(5)},
    )  # fmt: skip
    with preserved_random_state():
        set_random_state(0)
        model = ViTForImageClassification(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(_PRETRAINING_STEPS):
            batch = torch.randint(len(images), (64,))
            loss = model(images[batch], labels=labels[batch]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
