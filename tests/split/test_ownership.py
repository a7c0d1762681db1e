"""What crosses the cut, and which half owns which tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_coefsfl.split import find_blocks, split_model
from tests.support.exactness import assert_equal, outcome
from tests.support.models import MODELS
from tests.support.selection import slow_except

# --- what crosses --------------------------------------------------------------------------------


def inputs_seen(model: nn.Module, run: Callable[[], Any]) -> list[torch.Tensor]:
    """Every tensor that any module of `model` is called with."""
    seen: list[torch.Tensor] = []

    def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.extend(t.detach().clone() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))

    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in model.modules()]
    run()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    "name", ["bert", "gpt2-lm", "llama", "deberta-v2", "t5-tags", "vit", "swin", "wav2vec2", "timm-vit"]
)
def test_the_server_sees_no_raw_inputs(name: str) -> None:
    entry = MODELS[name]
    model = entry.make().eval()
    raw_name = next(key for key in ("input_ids", "pixel_values", "input_values") if key in entry.data())
    first, second = entry.batch(0), entry.batch(1)
    targets = {key: first[key] for key in entry.targets()}
    first, second = ({k: v for k, v in b.items() if k not in targets} for b in (first, second))
    assert not torch.equal(first[raw_name], second[raw_name])
    split = split_model(model, 2)
    one, two = split.client(**first).detach(), split.client(**second).detach()
    assert not torch.equal(one.activations, two.activations)
    two = replace(two, activations=one.activations)
    seen_one = inputs_seen(split.server.model, lambda: split.server(one, **targets))
    seen_two = inputs_seen(split.server.model, lambda: split.server(two, **targets))
    assert len(seen_one) == len(seen_two) > 10
    assert all(torch.equal(a, b) for a, b in zip(seen_one, seen_two, strict=True))

    def raw_among(seen: list[torch.Tensor]) -> bool:
        return any(t.shape == first[raw_name].shape and torch.equal(t, first[raw_name]) for t in seen)

    assert not raw_among(seen_one)
    assert raw_among(inputs_seen(model, lambda: model(**first, **targets))), (
        "the search finds raw inputs if there are any"
    )


def test_a_mask_crosses_as_one_byte_per_token() -> None:
    split = split_model(MODELS["bert"].make(), 2)
    smashed = split.client(**MODELS["bert"].batch())
    assert smashed.nbytes() == {"smashed_data": 3 * 9 * 32 * 4, "extras": 3 * 9 + 3 * 8}
    assert smashed.shapes == {"input_ids": (3, 9), "attention_mask": (3, 9)}


def test_what_the_server_cannot_rebuild_is_shipped_on_the_clients_graph() -> None:
    entry = MODELS["t5-tags"]
    split = split_model(entry.make(), 2)
    smashed = split.client(**entry.batch())
    assert smashed.context["block.position_bias"].shape == (1, 4, 9, 9)
    assert smashed.context["block.position_bias"].requires_grad
    assert split_model(MODELS["bert"].make(), 2).client.cut.shipped == {}


# --- sharing and ownership -----------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_except("bert", "gpt2-lm", "t5", "swin", of=MODELS))
def test_tensors_are_shared_and_each_has_an_owner(name: str) -> None:
    model = MODELS[name].make()
    split = split_model(model, 2)
    own = {id(p) for p in model.parameters()}
    client, server = ({id(p) for p in half.parameters()} for half in (split.client, split.server))
    assert client | server == own
    assert client < own and server < own
    both = {id(p) for name, p in model.named_parameters() if name in split.owners.client & split.owners.server}
    assert client & server == both
    assert {id(p) for n, p in model.named_parameters() if n in split.shared_trainable()} >= both
    storage = {t.data_ptr() for t in model.buffers()}
    hollow = [t for t in split.server.buffers() if t.dim() and 0 in t.stride()]
    for buffer in (*split.client.buffers(), *(t for t in split.server.buffers() if all(t is not h for h in hollow))):
        assert buffer.data_ptr() in storage
    blocks = dict(model.named_modules())[split.blocks]
    for i, block in enumerate(blocks.children()):
        mine, other = (client, server) if i < 2 else (server, client)
        ids = {id(p) for p in block.parameters()}
        assert ids and ids <= mine and not (ids & other) - both


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("bert", []),
        ("vit", []),
        ("bert-mlm", ["bert.embeddings.word_embeddings.weight"]),
        ("gpt2-lm", ["transformer.wte.weight"]),
        (
            "deberta-v2",
            [f"deberta.encoder.{n}" for n in ("rel_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias")],
        ),
        ("t5-tags", ["transformer.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]),
    ],
)
def test_shared_trainable(name: str, shared: list[str]) -> None:
    model = MODELS[name].make()
    split = split_model(model, 2)
    assert split.shared_trainable() == shared
    model.requires_grad_(False)
    assert split.shared_trainable() == []


def test_vit_tiny_counts() -> None:
    """The paper's client: 4 blocks of ViT-Tiny with LoRA of rank 4 have 55,296 trainables, and no norm or head."""
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, num_labels=10
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
    model = get_peft_model(transformers.ViTForImageClassification(config), LoraConfig(r=4, target_modules=targets))
    split = split_model(model, 4)
    assert split.client.num_parameters(only_trainable=True) == 55_296
    assert split.server.num_parameters(only_trainable=True) == 2 * 55_296
    assert not any("layernorm" in n and ".layers." not in n for n, _ in split.client.named_parameters())
    assert not any("classifier" in n for n, _ in split.client.named_parameters())
    assert split.client.num_parameters() + split.server.num_parameters() == sum(p.numel() for p in model.parameters())


def test_unused_parameters_go_by_their_place() -> None:
    """A mask token before the blocks, an expert without tokens inside, a pooler after them."""
    vit = transformers.ViTModel(
        transformers.ViTConfig(**MODELS["vit"].options), add_pooling_layer=False, use_mask_token=True
    )
    split = split_model(vit, 2)
    assert "embeddings.mask_token" in split.owners.client - split.owners.server
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**MODELS["bert"].options))
    bert.unused = nn.Linear(2, 2)
    assert {"unused.weight", "unused.bias"} <= split_model(bert, 2).owners.server
    mixtral = split_model(MODELS["mixtral"].make(), 1)
    assert sum(p.numel() for p in mixtral.model.model.layers[0].parameters()) <= mixtral.client.num_parameters()


@pytest.mark.parametrize("name", ["bert", "vit", "opt", "wav2vec2", "t5", "swin", "timm-vit"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make().train(), entry.batch()
    next(model.parameters()).requires_grad_(False)
    list(model.modules())[-1].eval()
    find_blocks(model)[1][1].eval()
    tensors = {key: t.clone() for key, t in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    classes = [type(m) for m in model.modules()]
    expected = outcome(model, lambda: model(**batch))  # may install hooks of transformers' own
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    torch.manual_seed(3)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    split = split_model(model, 2)
    assert torch.equal(torch.get_rng_state(), before), "splitting draws no random numbers"
    assert np.array_equal(np.random.get_state()[1], before_numpy)
    assert flags == [p.requires_grad for p in model.parameters()]
    assert modes == [m.training for m in model.modules()]
    assert classes == [type(m) for m in model.modules()]
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert all(torch.equal(t, tensors[key]) for key, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert_equal(outcome(model, lambda: model(**batch)), expected)
    # The halves took over the modes, module by module.
    assert_equal(outcome(model, lambda: split.server(split.client(**batch))), expected)


def test_batch_norm_keeps_its_statistics() -> None:
    """Convolutional stems have running statistics, which calibration must not change."""
    config = transformers.TimmWrapperConfig(architecture="resnet18", num_labels=3)
    model = transformers.TimmWrapperForImageClassification(config).train()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    split = split_model(model, 1)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    x = torch.randn(2, 3, 64, 64)
    smashed = split.client(pixel_values=x)
    moved = {key for key, t in model.state_dict().items() if not torch.equal(t, before[key])}
    split.server(smashed, labels=torch.tensor([0, 1]))
    moved_after = {key for key, t in model.state_dict().items() if not torch.equal(t, before[key])} - moved
    assert any("layer1" in key for key in moved) and not any("layer4" in key for key in moved)
    assert any("layer4" in key for key in moved_after) and not any("layer1" in key for key in moved_after)


def test_random_numbers_after_the_server_are_those_after_the_model() -> None:
    """Also numpy's, from which SpecAugment of the audio models draws."""
    for name in ("bert", "wav2vec2"):
        model, batch = MODELS[name].make().train(), MODELS[name].batch()
        split = split_model(model, 2)

        def after(run: Callable[[], Any]) -> tuple[torch.Tensor, float]:
            torch.manual_seed(0)
            np.random.seed(0)
            run()
            return torch.get_rng_state(), np.random.rand()

        expected = after(lambda m=model, b=batch: m(**b))
        got = after(lambda s=split, b=batch: s.server(s.client(**b)))
        assert torch.equal(got[0], expected[0])
        assert got[1] == expected[1]


def test_training_a_half_trains_the_model() -> None:
    model, batch = MODELS["bert"].make().eval(), MODELS["bert"].batch()
    split = split_model(model, 2)
    optimizer = torch.optim.SGD([*split.client.parameters(), *split.server.parameters()], lr=0.5)
    before = model(**batch).loss
    split.server(split.client(**batch)).loss.backward()
    optimizer.step()
    after = model(**batch).loss
    assert after < before
    assert torch.equal(split.server(split.client(**batch)).loss, after)


def test_halves_can_be_copied() -> None:
    """A copy has tensors of its own and works on without the original."""
    model, batch = MODELS["bert"].make().eval(), MODELS["bert"].batch()
    split = split_model(model, 2)
    expected = model(**batch).logits
    client, server = copy.deepcopy(split.client), copy.deepcopy(split.server)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(server(client(**batch)).logits, expected)
