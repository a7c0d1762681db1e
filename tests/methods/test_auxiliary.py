"""Auxiliary networks: heads and truncated servers, against plain torch code and the sizes of the papers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from hf_coefsfl.methods.parts.auxiliary import AuxiliaryHead, AuxiliaryNetwork, choose_pooling, pool, task_loss
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.split import split_model
from hf_coefsfl.split.lora import default_lora
from tests.support.federated import same, tiny_vit
from tests.support.models import MODELS
from tests.support.toy import CAUSAL, CLASSIFICATION, MULTI_LABEL, REGRESSION, SPANS, TOKENS, ToyServer, toy_batch


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# ---- Heads ----


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"kind": "fc"}, 19_300),
        ({"kind": "fc_lora", "rank": 2}, 684),
        ({"kind": "fc_lora", "rank": 4}, 1_268),
        ({"kind": "mlp", "hidden_layers": 1}, 28_228),
        ({"kind": "mlp", "hidden_layers": 4}, 56_164),
        ({"kind": "mlp", "hidden_layers": 8}, 93_412),
        ({"kind": "mlp", "hidden_layers": 12}, 130_660),
    ],
)
def test_head_sizes_are_the_papers(options: dict[str, Any], size: int) -> None:
    task = LossSpec("ForImageClassification", 100, ("labels",))
    head = AuxiliaryHead(width=192, outputs=100, loss_spec=task, pooling="first", **options)
    assert numel(head) == size
    head(SmashedData(torch.randn(2, 3, 192), labels={"labels": torch.tensor([1, 2])})).backward()
    assert all(p.grad is not None for p in head.parameters())


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION, MULTI_LABEL, TOKENS, CAUSAL, SPANS])
def test_head_loss_is_that_of_the_task(task: LossSpec) -> None:
    """The toy server computes each loss in plain torch."""
    torch.manual_seed(0)
    pooled = task.loss_type == "ForSequenceClassification"
    outputs = torch.randn(4, task.num_labels) if pooled else torch.randn(4, 3, task.num_labels)
    _, labels = task.separate(toy_batch(task))
    named = {"logits": outputs}
    if task is SPANS:
        named = {"start_logits": outputs[..., 0], "end_logits": outputs[..., 1]}
    torch.testing.assert_close(task_loss(task, outputs, labels), ToyServer(task).loss(named, labels))


def test_pooling_by_hand() -> None:
    s = torch.arange(12.0).view(2, 3, 2)
    padded = SmashedData(s, {"attention_mask": torch.tensor([[True, True, False], [False, True, True]])})
    assert pool(padded, "first").tolist() == [[0, 1], [6, 7]]
    assert pool(padded, "last").tolist() == [[2, 3], [10, 11]]
    assert pool(padded, "mean").tolist() == [[1, 2], [9, 10]]
    assert pool(padded, "tokens") is s
    assert pool(SmashedData(s), "last").tolist() == [[4, 5], [10, 11]]
    assert pool(SmashedData(s), "mean").tolist() == [[2, 3], [8, 9]]
    by_id = SmashedData(s, {"padding": torch.tensor([[False, False, True], [False, False, False]])})
    assert pool(by_id, "last").tolist() == [[2, 3], [10, 11]]
    longer = SmashedData(s, {"attention_mask": torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])})  # of a waveform
    assert pool(longer, "mean").tolist() == [[2, 3], [8, 9]]


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("bert", "first"),
        ("gpt2", "last"),
        ("llama", "last"),
        ("vit", "first"),
        ("clip-vision", "first"),
        ("timm-vit", "first"),
        ("swin", "mean"),
        ("wav2vec2", "mean"),
        ("roberta-qa", "tokens"),
        ("llama-lm", "tokens"),
        ("t5-tags", "tokens"),
    ],
)
def test_pooling_follows_the_model(name: str, pooling: str) -> None:
    model = MODELS[name].make()
    assert choose_pooling(split_model(model, 1), LossSpec.of(model, [])) == pooling


def test_timm_without_class_token_is_averaged() -> None:
    entry = MODELS["timm-vit"]
    arguments = entry.options["model_args"] | {"class_token": False, "global_pool": "avg"}
    model = dataclasses.replace(entry, options=entry.options | {"model_args": arguments}).make()
    assert choose_pooling(split_model(model, 1), LossSpec.of(model, [])) == "mean"


# ---- The truncated network ----


@pytest.mark.parametrize("head", ["frozen", "full"])
def test_the_network_on_vit_tiny_has_the_papers_size(head: str) -> None:
    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    model: Any = ViTForImageClassification(ViTConfig(**sizes, num_labels=100))
    split = split_model(get_peft_model(model, default_lora(model, head=head)), 4)
    network = AuxiliaryNetwork(split, 3)
    assert network.num_parameters() == 1_395_748
    assert sum(t.numel() * t.element_size() for t in network.weights().values()) / 2**20 == pytest.approx(5.324, 1e-4)
    owned = {p.data_ptr() for p in network.half.parameters()}
    assert not owned & {p.data_ptr() for p in split.model.parameters()}
    fewer = AuxiliaryNetwork(split, 1).num_parameters()
    assert 1_395_748 - fewer == 2 * 458_688


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "timm-vit", "swin", "t5-tags"])
def test_a_network_of_all_blocks_is_the_server(name: str) -> None:
    split = split_model(MODELS[name].make(), 1).eval()
    smashed = split.client(**MODELS[name].batch()).detach()
    network = AuxiliaryNetwork(split, 100)
    s = smashed.activations.requires_grad_()
    loss = split.server(smashed).loss
    torch.testing.assert_close(network.gradient(smashed), (loss.detach(), torch.autograd.grad(loss, s)[0]))


def test_truncation_removes_the_blocks_after() -> None:
    """As a model that has just these blocks: its config says so and the weights are the same."""
    whole = MODELS["bert"].make()
    short = MODELS["bert"].make(num_hidden_layers=3)
    short.load_state_dict(whole.state_dict(), strict=False)
    whole, small = split_model(whole, 1).eval(), split_model(short, 1).eval()
    smashed = whole.client(**MODELS["bert"].batch()).detach()
    loss, _ = AuxiliaryNetwork(whole, 2).gradient(smashed)
    torch.testing.assert_close(loss, small.server(smashed).loss.detach())


def test_a_random_network_is_seeded_and_shares_nothing() -> None:
    model: Any = tiny_vit()
    split = split_model(get_peft_model(model, default_lora(model)), 1)
    before = {name: t.clone() for name, t in split.model.state_dict().items()}
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(drawn))
        state = torch.get_rng_state()
        network = AuxiliaryNetwork(split, 2)
        network.draw(split.model, seed)
        drawn.append(network.weights())
        assert torch.equal(state, torch.get_rng_state())
    assert same(drawn[0], drawn[1]) and not same(drawn[0], drawn[2])
    assert same(before, split.model.state_dict())
    copied = AuxiliaryNetwork(split, 2).weights()
    matrices = [name for name, t in copied.items() if t.dim() > 1 and "lora_B" not in name]
    assert matrices and all(not torch.equal(copied[name], drawn[0][name]) for name in matrices)
    assert all((t == 0).all() for name, t in drawn[0].items() if "lora_B" in name)


def test_a_model_that_cannot_lose_blocks_is_refused() -> None:
    four = {"depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "image_size": 64}
    split = split_model(MODELS["swin"].make(**four), 1)  # its head fits the width of the last stage
    with pytest.raises(ValueError, match=r"does not run without its blocks after number 2.*Set num_blocks to 3"):
        AuxiliaryNetwork(split, 1)
