"""Trained weights are float32, whatever the model is: in bfloat16 many of them would never move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from hf_coefsfl.split import load_server
from hf_coefsfl.split.precision import train_in_float32
from tests.support.federated import images, texts, tiny_bert, tiny_vit, trainer, weights

ONE_ROUND: dict[str, Any] = {"num_rounds": 1, "warmup_rounds": 0, "learning_rate": 5e-5, "eval_dataset": None}


def trained(tmp_path: Path, **options: Any) -> tuple[Any, dict[str, float]]:
    """Return the trainer of a bfloat16 model after a round, and the share of each trained weight that has moved."""
    run = trainer(tmp_path, tiny_bert().bfloat16(), texts(), **ONE_ROUND, **options)
    before = weights(run)
    assert {t.dtype for t in before.values()} == {torch.float32}
    run.train()
    return run, {name: (t != before[name]).float().mean().item() for name, t in weights(run).items()}


def test_every_weight_of_the_head_moves(tmp_path: Path) -> None:
    run, moved = trained(tmp_path)
    head = {name: share for name, share in moved.items() if "classifier" in name}
    assert len(head) == 2 and min(head.values()) > 0.95
    frozen = {p.dtype for p in run.model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}


def test_full_finetuning_is_that_of_a_float32_model(tmp_path: Path) -> None:
    run, moved = trained(tmp_path / "bfloat16", full_finetuning=True)
    assert moved["bert.encoder.layer.0.output.dense.weight"] > 0.95 and moved["classifier.weight"] > 0.95
    twin = trainer(tmp_path / "twin", tiny_bert().bfloat16().float(), texts(), full_finetuning=True, **ONE_ROUND)
    twin.train()
    expected = weights(twin)
    assert all(torch.equal(t, expected[name]) for name, t in weights(run).items())


def test_modules_and_biases_inside_the_blocks(tmp_path: Path) -> None:
    """What comes after them is frozen and takes bfloat16."""
    config = LoraConfig(
        target_modules=["query", "value"], modules_to_save=["LayerNorm", "classifier"], bias="lora_only"
    )
    _, moved = trained(tmp_path, peft_config=config)
    chosen = {kind: [s for n, s in moved.items() if kind in n] for kind in ("LayerNorm", "value.base_layer.bias")}
    assert all(shares and min(shares) > 0.9 for shares in chosen.values())


def test_a_saved_half_computes_the_same(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run")
    split = run.split.eval()
    split.server.save_pretrained(tmp_path / "server")
    batch = {name: t[:3] for name, t in texts()[:3].items()}
    smashed = split.client(**batch)
    expected = split.server(smashed).logits
    assert torch.equal(load_server(tmp_path)(smashed).logits, expected)
    assert torch.equal(run.model(**batch).logits, expected)


@pytest.mark.parametrize("full", [False, True])
def test_a_float32_model_stays_as_it_is(tmp_path: Path, full: bool) -> None:
    run = trainer(tmp_path, tiny_vit(), images(), full_finetuning=full, **ONE_ROUND)
    before = weights(run)
    assert train_in_float32(run.model) == 0 and weights(run).keys() == before.keys()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.split.server.modules())
