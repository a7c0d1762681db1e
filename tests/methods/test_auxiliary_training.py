"""AccSFL and FSL-SAGE through the trainer."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from hf_coefsfl.methods import FSLSAGE, make_method
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.split import split_model
from tests.support.auxiliary import QUICK
from tests.support.federated import images, rounds, same, texts, tiny_bert, tiny_vit, trainer, weights
from tests.support.models import BATCH, MODELS
from tests.support.selection import slow_except

TASKS = ["bert", "gpt2", "swin", "roberta-qa", "distilbert-tags", "llama-lm", "bert-mlm"]
AUXILIARY = ["acc_sfl", "fsl_sage"]


@pytest.mark.parametrize(
    ("method", "options"),
    slow_except(
        ("fsl_sage", QUICK),
        of=[
            ("acc_sfl", {}),
            ("acc_sfl", {"head": "fc_lora"}),
            ("fsl_sage", QUICK),
            ("fsl_sage", QUICK | {"init": "copy_server"}),
        ],
    ),
)
def test_resume_is_bit_identical_across_an_alignment(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"method": method, "method_kwargs": options, "num_rounds": 4, "save_strategy": "steps"}
    changes |= {"save_steps": 1, "data": images(36)}
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    for reached in (1, 2):  # before any alignment and between two of them (in rounds 2 and 4)
        resumed = trainer(tmp_path / f"resumed{reached}", model=tiny_vit(seed=7), **changes)
        resumed.model.load_state_dict(
            {k: v for k, v in whole.model.state_dict().items() if "lora" not in k and "modules_to_save" not in k},
            strict=False,
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{reached}"))
        assert same(weights(whole), weights(resumed))
        assert same(whole.rounds.method.state_dict(), resumed.rounds.method.state_dict())
        assert rounds(whole) == rounds(resumed)


@pytest.mark.parametrize("method", ["acc_sfl", "fsl_sage"])
def test_setup_leaves_the_random_state_alone(method: str) -> None:
    split = split_model(tiny_vit(), 2)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    states = []
    for seed in (1, 1, 2):
        rule = make_method(method)
        rule.setup(split, LossSpec.of(split.model, ["labels"]), seed)
        states.append({name: t.clone() for name, t in rule.state_dict().items()})
    assert torch.equal(state, torch.get_rng_state())
    assert same(states[0], states[1]) and not same(states[0], states[2])


def rows(name: str, seeds: int = 6) -> list[dict[str, Any]]:
    """The samples of several batches of a tiny model."""
    batches = [MODELS[name].batch(seed) for seed in range(seeds)]
    return [{key: t[i].tolist() for key, t in batch.items()} for batch in batches for i in range(BATCH)]


@pytest.mark.parametrize(
    ("name", "method"),
    slow_except(
        ("roberta-qa", "acc_sfl"), ("bert", "fsl_sage"), ("distilbert-tags", "fsl_sage"), of=product(TASKS, AUXILIARY)
    ),
)
def test_tasks_train(tmp_path: Path, method: str, name: str) -> None:
    data = Dataset.from_list(rows(name)).with_format("torch")
    options = {k: v for k, v in QUICK.items() if k != "num_blocks"} if method == "fsl_sage" else {}
    run = trainer(
        tmp_path,
        MODELS[name].make(),
        data,
        method=method,
        method_kwargs=options,
        cut=1,
        eval_dataset=None,
        compute_metrics=None,
        warmup_rounds=0,
        num_rounds=3,
        num_clients=2,
        participation=1.0,
    )
    before = weights(run)
    run.train()
    after = weights(run)
    assert all(torch.isfinite(torch.tensor(e["client_loss"])) and e["client_loss"] > 0 for e in rounds(run))
    moved = [n for n in run.client_parameters if not torch.equal(before[n], after[n])]
    assert len(moved) > len(run.client_parameters) / 2


@pytest.mark.parametrize("method", AUXILIARY)
def test_samples_of_several_lengths_train(tmp_path: Path, method: str) -> None:
    """Batches padded to their own longest sample, as data collators do."""
    data = texts().with_format(None)

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        columns = {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}
        longest = int(columns["attention_mask"].sum(1).max())
        return {name: t[:, :longest] if t.dim() > 1 else t for name, t in columns.items()}

    options = QUICK | {"buffer_every": 1} if method == "fsl_sage" else {}
    run = trainer(
        tmp_path, tiny_bert(), data, method=method, method_kwargs=options, eval_dataset=None, data_collator=collate
    )
    run.train()
    if isinstance(run.rounds.method, FSLSAGE):
        lengths = {p.activations.shape[1] for s in run.rounds.method.clients.values() for p in s.buffer}
        assert len(lengths) > 1


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("acc_sfl", {"head": "big"}, r"head='big' is not an auxiliary head. Choose one of: fc, fc_lora, mlp"),
        ("acc_sfl", {"rank": 0}, r"rank=0 must be a whole number of at least 1"),
        ("acc_sfl", {"hidden_layers": 0}, r"hidden_layers=0 must be"),
        ("acc_sfl", {"rank": 1.5}, r"must be int, got 1.5"),
        ("fsl_sage", {"align_every": 0}, r"align_every=0 must be a whole number of at least 1"),
        ("fsl_sage", {"align_epochs": 0}, r"align_epochs=0"),
        ("fsl_sage", {"buffer_size": 0}, r"buffer_size=0"),
        ("fsl_sage", {"num_blocks": 0}, r"num_blocks=0"),
        ("fsl_sage", {"align_warmup_steps": -1}, r"align_warmup_steps=-1 must be .* at least 0"),
        ("fsl_sage", {"align_learning_rate": float("nan")}, r"align_learning_rate=nan must be a finite number above 0"),
        ("fsl_sage", {"init": "zeros"}, r"init='zeros' .* Choose one of: random, copy_server"),
    ],
)
def test_bad_options_are_refused(method: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make_method(method, options)


def test_tasks_without_a_head_are_refused() -> None:
    with pytest.raises(ValueError, match="encoder-decoder"):
        make_method("acc_sfl").check_loss(LossSpec.of(MODELS["bart"].make(), []))
    with pytest.raises(ValueError, match="does not know a ForObjectDetection loss"):
        make_method("acc_sfl").check_loss(LossSpec("ForObjectDetection", 3, ("labels",)))
    config = BertConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=30)
    make_method("acc_sfl").check_loss(LossSpec.of(BertForSequenceClassification(config), []))
