"""Makes the files of the deployment example without a download: a model, the data of two sites, and test data.

    python recipes/flower/example.py

It writes to `example/`:

    site0, site1      the private images of two owners (scikit-learn's digits; mostly small digits, mostly large ones)
    test              the images on which the server evaluates
    all               both sites in one, for Flower's simulation engine
    model             a tiny vision transformer, pretrained for a few seconds on other images of the digits 0 to 4
    flwr/config.toml  tells Flower's commands where the SuperLink is
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, set_seed

PUBLIC, TEST = 500, 400  # images; the sites share the rest
FLOWER = """\
[superlink]
default = "local"

[superlink.local]
address = "127.0.0.1:8000"
insecure = true

[superlink.simulation]
address = "127.0.0.1:8001"
insecure = true
"""


def save(images: list[Image.Image], labels: list[int], path: Path) -> None:
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=[str(digit) for digit in range(10)])})
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict({"image": images, "label": labels}, features).to_parquet(str(path))


def pretrain(images: list[Image.Image], labels: list[int], folder: Path, steps: int = 300) -> None:
    """Write a small ViT trained on the public digits, with a new head, and its image processor."""
    set_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=8, patch_size=2,
        num_labels=10,
    )  # fmt: skip
    model, processor = ViTForImageClassification(config), ViTImageProcessor(size={"height": 8, "width": 8})
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(len(pixels), (64,))
        loss = model(pixels[batch], labels=torch.tensor(labels)[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.classifier.reset_parameters()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("example"), help="default: %(default)s")
    folder = parser.parse_args().output_dir
    torch.set_num_threads(1)
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    images = [Image.fromarray((pixels[i].reshape(8, 8) * 15.9).astype("uint8")).convert("RGB") for i in order]
    digits = [int(labels[i]) for i in order]
    public = [i for i in range(PUBLIC) if digits[i] < 5]
    pretrain([images[i] for i in public], [digits[i] for i in public], folder / "model")
    private, test = range(PUBLIC, len(images) - TEST), range(len(images) - TEST, len(images))
    chance = np.random.default_rng(1).random(len(images))
    first = [i for i in private if chance[i] < (0.8 if digits[i] < 5 else 0.2)]
    parts = {"site0": first, "site1": [i for i in private if i not in set(first)], "all": list(private)}
    for name, rows in parts.items():
        save([images[i] for i in rows], [digits[i] for i in rows], folder / name / "train.parquet")
    for name in ("test", "all"):
        save([images[i] for i in test], [digits[i] for i in test], folder / name / "test.parquet")
    (folder / "flwr").mkdir(exist_ok=True)
    (folder / "flwr" / "config.toml").write_text(FLOWER)
    sizes = ", ".join(f"{name} {len(rows)}" for name, rows in (*parts.items(), ("test", test)))
    print(f"{folder}: images of {sizes}; a model in {folder / 'model'}")


if __name__ == "__main__":
    main()
