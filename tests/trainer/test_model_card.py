"""The whole text of a model card, its header and its code."""

import re
from pathlib import Path

import pytest

from hf_coefsfl import SplitFedTrainer, __version__
from tests.support.cards import card_of, header
from tests.support.federated import trainer

# A run of 6 clients with 12 samples each, 3 a round, 2 rounds, the first of them the warm-up. A round's activations are
# 3 clients x 12 samples x (1 + 4) tokens x 16 floats = 11,520 bytes. Up: these and int64 labels; down: as many
# gradients, and after the warm-up twice as much curvature and a float a sample; both ways: 1,792 floats a client.
# By rounds: up 33,312 and 33,312 bytes, down 33,024 and 56,208.
NUMBER = r"\d+\.\d{4}"
PATTERN = r"""---
base_model: laboratory/tiny-vit
datasets:
- laboratory/stripes
language: en
library_name: peft
license: mit
metrics:
- accuracy
pipeline_tag: image-classification
tags:
- split-federated-learning
- coef-sfl
- lora
- stripes
model-index:
- name: out
  results:
  - task:
      type: image-classification
    dataset:
      name: Stripes
      type: laboratory/stripes
      config: small
    metrics:
    - type: loss
      value: \d\.\d+
      name: Loss
    - type: accuracy
      value: 0\.\d+
      name: Accuracy
---

# out

A LoRA adapter of rank 4 and alpha 8 for `laboratory/tiny-vit` \(`ViT\w+`\) in float32, trained on Stripes\.
Weights: round 2 of 2\.

It was trained by split federated learning: each client kept its data and ran the first 2 of the 4 blocks,
and a server ran the others\.

## What was trained where

\| side   \| blocks                        \| parameters \| trained \|
\| ------ \| ----------------------------- \| ---------: \| ------: \|
\| client \| 1 to 2, and what comes before \|      6,608 \|   1,792 \|
\| server \| 3 to 4, and what comes after  \|      6,374 \|   1,843 \|

## Method: CoeF-J

CoeF-J: the Jacobian-based Hessian of an upper bound on the loss\. In short: g̃ = g₀ \+ M P̂ δ with [^\n]+\.

Here s is the smashed data \(the activations at the cut\), [^#]+ δ = s − s₀\.

Set by `method="coef_j"` with `feedback_at='initial'`, `server_passes=1`, `num_projections=2`, [^\n]+\.

## Federation

\| setting         \| value                                               \|
\| --------------- \| --------------------------------------------------- \|
\| clients         \| 6, with 12 samples each                             \|
\| clients a round \| 3 \(participation 0\.5\)                               \|
\| partition       \| iid                                                 \|
\| rounds          \| 2 of 2, the first 1 of them Vanilla SFL \(warm-up\)   \|
\| weights         \| round 2 of 2; 0\.149 MiB had crossed the cut by then \|
\| local epochs    \| 1                                                   \|
\| batch size      \| 4                                                   \|
\| learning rate   \| 0\.005, constant, by adamw_torch\w*\s+\|
\| dropout         \| synced                                              \|
\| exchange        \| float32                                             \|
\| seed            \| 42                                                  \|

## Results

\| metric   \| value  \|
\| -------- \| ------ \|
\| loss     \| NUMBER \|
\| accuracy \| NUMBER \|

Measured with the unsplit model on the evaluation data\.

!\[accuracy over rounds and over MiB\]\(curves\.png\)

<details>
<summary>Each evaluated round</summary>

\| round \|   MiB \|   loss \| accuracy \|
\| ----: \| ----: \| -----: \| -------: \|
\|     1 \| 0\.063 \| NUMBER \|   NUMBER \|
\|     2 \| 0\.149 \| NUMBER \|   NUMBER \|

</details>

## Communication

0\.064 MiB went up and 0\.085 MiB down, over all clients and rounds, in 24 transfers across the cut:

\| what          \|    up \|  down \|
\| ------------- \| ----: \| ----: \|
\| smashed data  \| 0\.022 \| 0\.000 \|
\| extras        \| 0\.001 \| 0\.000 \|
\| adapters      \| 0\.041 \| 0\.041 \|
\| gradients     \| 0\.000 \| 0\.022 \|
\| curvature     \| 0\.000 \| 0\.022 \|
\| total, in MiB \| 0\.064 \| 0\.085 \|

`communication\.json` lists them by client and round\.

## How to load it

The whole adapter, with PEFT:

```python
from peft import PeftModel
from transformers import ViTForImageClassification

base = ViTForImageClassification\.from_pretrained\(
    "laboratory/tiny-vit",
    dtype="float32",
    num_labels=3,
    ignore_mismatched_sizes=True,
\)
model = PeftModel\.from_pretrained\(base, "out"\)
```

Each half, with `hf_coefsfl`:

```python
from hf_coefsfl import load_adapter, split_model
from transformers import ViTForImageClassification

base = ViTForImageClassification\.from_pretrained\(
    "laboratory/tiny-vit",
    dtype="float32",
    num_labels=3,
    ignore_mismatched_sizes=True,
\)
split = split_model\(base, cut=2\)
load_adapter\(split\.client, "out"\)
load_adapter\(split\.server, "out"\)
```

## Limits and privacy

- The server saw the smashed data, the labels and the padding pattern [^#]+\(2 of 4 here\)\.
- [^#]+ neither secure aggregation nor differential privacy\.
[^#]+
## Framework versions

- hf_coefsfl VERSION
- transformers \d[\w.+]*
- peft \d[\w.+]*
- torch \d[\w.+]*
- datasets \d[\w.+]*
- accelerate \d[\w.+]*
- huggingface_hub \d[\w.+]*

## Citation

[^#`]+
```bibtex
@misc\{coefsfl,
  title  = \{\{CoeF-SFL\}: Preserving Collaborative Server-Client Learning with Enhanced Communication Efficiency\},
  author = \{Bae, Junwoo and Ahn, Jin-Hyun\}
\}
```
?""".replace("NUMBER", NUMBER).replace("VERSION", re.escape(__version__))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SplitFedTrainer:
    folder = tmp_path_factory.mktemp("card") / "out"
    run = trainer(
        folder,
        num_rounds=2,
        eval_strategy="steps",
        eval_steps=1,
        method_kwargs={"num_projections": 2},
        hub_token="hf_x",
    )
    run.train()
    run.create_model_card(
        language="en", license="mit", tags="stripes", finetuned_from="laboratory/tiny-vit", dataset="Stripes",
        dataset_tags="laboratory/stripes", dataset_args="small",
    )  # fmt: skip
    return run


def test_the_whole_card(run: SplitFedTrainer) -> None:
    assert re.fullmatch(PATTERN, card_of(run)), card_of(run)
    assert (Path(run.args.output_dir or "") / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_its_numbers_are_those_of_the_run(run: SplitFedTrainer) -> None:
    last = [entry for entry in run.state.log_history if "eval_loss" in entry][-1]
    data = header(run)
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert found == {"loss": last["eval_loss"], "accuracy": last["eval_accuracy"]}
    assert all(type(value) is float for value in found.values())
    assert f"| accuracy | {last['eval_accuracy']:.4f} |" in card_of(run)
    assert f"{run.ledger.mib:.3f}" == "0.149"
    assert data.base_model == "laboratory/tiny-vit" and data.library_name == "peft" and data.license == "mit"


def test_saving_keeps_the_card_and_what_was_said(run: SplitFedTrainer, tmp_path: Path) -> None:
    """PEFT writes one of its own when it saves; and a card needs no second telling."""
    before = card_of(run)
    run.save_model()
    assert card_of(run) == before
    run.save_model(str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "README.md").read_text().replace("copy", "out") == before
    assert not list((tmp_path / "copy").glob("*/README.md"))


def test_no_secret_and_no_path_of_this_machine(run: SplitFedTrainer) -> None:
    card = card_of(run)
    assert "hf_x" not in card and str(Path(run.args.output_dir or "").parent) not in card
    assert not re.search(r"(?<![\w:/])/(home|tmp|root|usr|work)\b", card)
