"""Measures how many tokens the server can read off smashed data, by an attacker who knows the client half.

python benchmarks/leakage.py

The attacker runs the client half, as it is when training starts, over texts of the same kind and notes the mean
activation of each token. For every private activation, the attacker guesses the token with the nearest mean (by
cosine). The attack is simple and a trained decoder would do better, so the shares are lower bounds of what leaks.
Tokens that the attacker has never seen count as wrong. Special tokens and padding do not count.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from torch.nn.functional import normalize
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from hf_coefsfl import split_model

SHARED = Path(__file__).resolve().parents[2] / "shared"


def smash(client, tokenizer, texts: list[str], noise: float, generator: torch.Generator):
    """Return the token ids and activations (n, d) of texts, without padding and special tokens."""
    ids, vectors = [], []
    for start in range(0, len(texts), 50):
        batch = tokenizer(texts[start : start + 50], padding=True, return_tensors="pt", return_special_tokens_mask=True)
        kept = ~batch.pop("special_tokens_mask").bool()
        s = client(**batch).activations
        s = s + noise * torch.randn(s.shape, generator=generator)
        ids.append(batch["input_ids"][kept])
        vectors.append(s[kept])
    return torch.cat(ids), torch.cat(vectors)


def recovered(known: tuple, private: tuple) -> float:
    """Return the share of private tokens that the attacker guesses right."""
    ids, vectors = known
    seen, places = ids.unique(return_inverse=True)
    means = torch.zeros(len(seen), vectors.shape[1]).index_add_(0, places, vectors)
    means = normalize(means / places.bincount()[:, None], dim=1)
    found = [seen[(normalize(part, dim=1) @ means.T).argmax(1)] for part in private[1].split(2000)]
    return (torch.cat(found) == private[0]).float().mean().item()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHARED / "models" / "granite-30m-roberta")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "sick_nli")
    parser.add_argument("--cuts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--noises", type=float, nargs="+", default=[0.0, 0.1, 0.3, 1.0])
    parser.add_argument("--texts", type=int, default=1000, help="number of texts of the attacker, and of private ones")
    arguments = parser.parse_args()
    for path in (arguments.model, arguments.data):
        if not path.exists():
            parser.error(f"{path} is not there: name a model with --model and a dataset with --data")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = load_dataset(str(arguments.data), split="train")
    column = next(name for name in rows.column_names if isinstance(rows[0][name], str))
    texts = list(dict.fromkeys(rows[column]))[: 2 * arguments.texts]
    half = len(texts) // 2
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model, dtype=torch.float32).eval()
    print(f"share of the tokens of {half} texts that {half} other texts of {arguments.data.name} give away\n")
    print("cut | scale of s | " + " | ".join(f"noise {noise:g}" for noise in arguments.noises))
    for cut in arguments.cuts:
        client = split_model(model, cut).client.eval()
        generator = torch.Generator().manual_seed(0)
        shares = []
        for noise in arguments.noises:  # the attacker knows its strength and learns from equally noisy activations
            known = smash(client, tokenizer, texts[:half], noise, generator)
            shares.append(recovered(known, smash(client, tokenizer, texts[half:], noise, generator)))
        scale = smash(client, tokenizer, texts[:50], 0.0, generator)[1].square().mean().sqrt().item()
        print(f"{cut:3} | {scale:10.2f} | " + " | ".join(f"{share:{6 + len(f'{n:g}')}.1%}" for n, share in zip(
            arguments.noises, shares, strict=True)))  # fmt: skip


if __name__ == "__main__":
    main()
