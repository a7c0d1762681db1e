"""Classification of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification

from .arguments import ImageArguments
from .base import FineTuningTask, Prepared, load_from_hub_or_folder
from .classification import predicted_class
from .loading import with_class_labels
from .metrics import class_scores

_SHIFT = 1 / 8  # of an image's width and height


class ImageClassification(FineTuningTask):
    """Classes of images, resized and normalised by the model's own image processor when a batch is made."""

    pipeline_tag = "image-classification"
    auto_model = AutoModelForImageClassification
    remove_unused_columns = False  # the model takes pixel_values, which the collator makes of the image
    arguments: ImageArguments

    def load_processor(self) -> Any:
        """Return the image processor."""
        return load_from_hub_or_folder(
            AutoImageProcessor, self.model_id, "image processor", revision=self.arguments.model_revision or "main"
        )

    def build(self, train: Dataset, evals: dict[str, Dataset], processor: Any) -> Prepared:
        """Leave the images as they are; the collator makes pixel values of them."""
        train, evals, names = with_class_labels(train, evals, self.known_classes())
        return Prepared(
            model=self.load_classifier(names),
            processing_class=processor,
            train_dataset=train.with_transform(augmentation()) if self.arguments.augment else train,
            eval_dataset=evals,
            data_collator=PixelCollator(processor),
            compute_metrics=class_scores(self.scoring),
            preprocess_logits_for_metrics=predicted_class,
            metric_names=tuple(self.scoring.scales),
        )


class PixelCollator:
    """Makes a batch of pixel values of rows with an image and a label."""

    def __init__(self, processor: Any):
        self.processor = processor

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return pixel_values and labels."""
        pixels = self.processor(images=[row["image"].convert("RGB") for row in rows], return_tensors="pt")
        labels = torch.tensor([row["labels"] for row in rows])
        return {"pixel_values": pixels["pixel_values"], "labels": labels}


def augmentation() -> Callable[[dict[str, list[Any]]], dict[str, list[Any]]]:
    """Return a transform that flips and shifts images at random.

    A round draws once for a sample: its round-initial exchange and its local updates see the same pixels.
    """
    from torchvision.transforms import v2

    flip_and_shift = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomAffine(degrees=0, translate=(_SHIFT, _SHIFT))])

    def transform(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if "image" not in rows:
            return rows
        return rows | {"image": [flip_and_shift(image.convert("RGB")) for image in rows["image"]]}

    return transform
