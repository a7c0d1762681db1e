"""The halves compute what the model computes: outputs, gradients, random numbers, for every cut."""

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
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from hf_coefsfl.split import SplitModel, find_blocks, split_model
from tests.support.models import BLOCKS, MODELS, PAD, VOCAB, TinyModel

torch.set_num_threads(1)

VARIANTS = [(name, attention) for name, entry in MODELS.items() for attention in entry.attention]
Result = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def with_lora(entry: TinyModel, **options: Any) -> Any:
    """A tiny model under LoRA whose adapters are not zero."""
    config = LoraConfig(r=2, target_modules=list(entry.lora), lora_dropout=0.1, init_lora_weights=False)
    return get_peft_model(entry.make(**options), config)


def outcome(model: nn.Module, run: Callable[[], Any]) -> Result:
    """Outputs and gradients of one seeded forward and backward pass."""
    torch.manual_seed(7)
    np.random.seed(7)
    output = run()
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {key: value.detach() for key, value in output.items() if isinstance(value, torch.Tensor)}, gradients


def assert_equal(got: Result, expected: Result) -> None:
    """Outputs to the last bit; gradients up to the order in which two paths are added."""
    assert "loss" in expected[0] and len(expected[0]) > 1
    assert got[0].keys() == expected[0].keys()
    for key, value in expected[0].items():
        assert torch.equal(got[0][key], value), f"{key} differs by {(got[0][key] - value).abs().max():.1e}"
    assert got[1].keys() == expected[1].keys()
    assert got[1]
    for name, value in expected[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("name", "attention"), VARIANTS)
def test_full_finetuning_with_dropout(name: str, attention: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make(attention).train(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    for cut in entry.cuts:
        split = split_model(model, cut)
        assert_equal(outcome(model, lambda s=split: s.server(s.client(**batch))), expected)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make(entry.attention[0]).eval(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    assert len({float(t.sum()) for t in expected[1].values()}) > 10, "gradients are too alike to show mistakes"
    for cut in entry.cuts:
        split = split_model(model, cut)
        assert_equal(outcome(model, lambda s=split: s.server(s.client(**batch))), expected)


def test_dropout_is_active() -> None:
    """What the tests in training mode rest on: without the same random numbers they would fail."""
    for name in ("bert", "llama", "vit", "swin", "wav2vec2", "timm-vit", "beit", "opt"):
        model, batch = MODELS[name].make().train(), MODELS[name].batch()
        assert not torch.equal(model(**batch).loss, model(**batch).loss), name


def over_the_cut(split: SplitModel, batch: dict[str, torch.Tensor], send_back: bool = True) -> Any:
    """Run client and server with separate graphs; the gradient at the smashed data goes back."""
    smashed = split.client(**batch)
    received = smashed.detach()
    received.activations.requires_grad_()
    output = split.server(received)
    output.loss.backward()
    if send_back:
        smashed.activations.backward(received.activations.grad)
    return _Done(output)


class _Done(dict):
    """An output whose backward pass has been done."""

    def __init__(self, output: Any) -> None:
        super().__init__(output)
        self.loss = torch.zeros((), requires_grad=True)


@pytest.mark.parametrize("name", MODELS)
def test_lora_connected_and_detached(name: str) -> None:
    entry = MODELS[name]
    model, batch = with_lora(entry).train(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    for cut in entry.cuts:
        split = split_model(model, cut)
        assert split.shared_trainable() == []
        assert_equal(outcome(model, lambda s=split: s.server(s.client(**batch))), expected)
        assert_equal(outcome(model, lambda s=split: over_the_cut(s, batch)), expected)


def test_nothing_reaches_the_client_unless_sent() -> None:
    """The detached run above is detached: without the gradient at the cut the client gets none."""
    model, batch = with_lora(MODELS["bert"]).train(), MODELS["bert"].batch()
    split = split_model(model, 2)
    gradients = outcome(model, lambda: over_the_cut(split, batch, send_back=False))[1]
    assert gradients and not any(".layer.0." in name or ".layer.1." in name for name in gradients)


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.checkpointing])
@pytest.mark.parametrize("lora", [True, False])
def test_gradient_checkpointing(name: str, lora: bool) -> None:
    entry = MODELS[name]
    model, batch = (with_lora(entry) if lora else entry.make()).train(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    other = entry.batch(seed=1)
    for cut in entry.cuts[1:] if lora else entry.cuts[:1]:
        split = split_model(model, cut)

        def run(s: SplitModel = split) -> Any:
            output = s.server(s.client(**batch))
            s.server(s.client(**other))  # a second pass before the backward: each keeps its own smashed data
            return output

        assert_equal(outcome(model, run), expected)


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "t5-tags"])
def test_reentrant_checkpointing(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make().train(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    split = split_model(model, 2)
    split.server.model.gradient_checkpointing_enable({"use_reentrant": True})
    assert_equal(outcome(model, lambda: split.server(split.client(**batch))), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "swin", "wav2vec2", "timm-vit"])
def test_bfloat16(name: str) -> None:
    entry = MODELS[name]
    model = entry.make().to(torch.bfloat16).train()
    batch = {key: t.to(torch.bfloat16) if t.is_floating_point() else t for key, t in entry.batch().items()}
    expected = outcome(model, lambda: model(**batch))
    split = split_model(model, 2)
    assert_equal(outcome(model, lambda: split.server(split.client(**batch))), expected)


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "swin", "wav2vec2", "whisper-encoder", "timm-vit"])
def test_autocast(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make().train(), entry.batch()
    split = split_model(model, 2)

    def autocast(run: Callable[[], Any]) -> Result:
        with torch.autocast("cpu", torch.bfloat16):
            return outcome(model, run)

    assert_equal(autocast(lambda: split.server(split.client(**batch))), autocast(lambda: model(**batch)))


# --- inputs --------------------------------------------------------------------------------------


def assert_exact(model: Any, split: SplitModel, batch: dict[str, Any]) -> None:
    """Equal in training mode, outputs and gradients."""
    split.train()
    expected = outcome(model, lambda: model(**batch))
    assert_equal(outcome(model, lambda: split.server(split.client(**batch))), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "roberta-qa", "falcon-alibi"])
def test_any_length_padding_side_and_positions(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make(), entry.batch()
    split = split_model(model, 2)
    flipped = batch | {key: batch[key].flip(1) for key in ("input_ids", "attention_mask")}
    assert_exact(model, split, flipped)
    assert_exact(model, split, {key: t for key, t in batch.items() if key != "attention_mask"})
    longer = batch | {key: torch.cat([batch[key]] * 3, 1) for key in ("input_ids", "attention_mask")}
    assert_exact(model, split, longer)
    if name in ("gpt2", "llama", "bert"):
        positions = torch.arange(9).flip(0).expand(3, 9)
        assert_exact(model, split, batch | {"position_ids": positions})
        with_default, with_reversed = split.client(**batch), split.client(**batch, position_ids=positions)
        assert not torch.equal(with_default.activations, with_reversed.activations)


def test_padding_id_inside_the_text() -> None:
    """GPT-2 pads with its end-of-text id; a classifier pools at the last other token."""
    entry = MODELS["gpt2"]
    model, batch = entry.make(eos_token_id=PAD), entry.batch()
    split = split_model(model, 2)
    assert "padding" not in split.client(**batch).context
    batch["input_ids"][0, -1] = PAD  # a token of the text, not padding
    smashed = split.client(**batch)
    assert smashed.context["padding"].dtype == torch.bool
    assert_exact(model, split, batch)
    split.eval()
    without = replace(smashed, context={"attention_mask": smashed.context["attention_mask"]})
    assert not torch.equal(split.server(smashed).logits, split.server(without).logits), "the pattern must matter"


def test_a_batch_of_one_without_a_padding_id() -> None:
    entry = MODELS["llama"]
    model, batch = entry.make(pad_token_id=None), {key: t[:1] for key, t in entry.batch().items()}
    assert_exact(model, split_model(model, 2), batch)


def test_token_types_stay_with_the_client() -> None:
    model, batch = MODELS["bert"].make(), MODELS["bert"].batch()
    batch["token_type_ids"] = (torch.arange(9) > 4).long().expand(3, 9)
    split = split_model(model, 2)
    assert_exact(model, split, batch)
    assert set(split.client(**batch).context) == {"attention_mask"}


@pytest.mark.parametrize("name", ["swin", "swinv2", "vit", "dinov2", "deit", "beit", "beit-shared"])
def test_other_image_sizes_than_calibrated(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make(), entry.batch()
    side = 2 * batch["pixel_values"].shape[-1]
    other = batch | {"pixel_values": torch.randn(3, 3, side, side + side // 2)}
    if name != "dinov2":
        other["interpolate_pos_encoding"] = True
    assert_exact(model, split_model(model, 2), other)


class ScalingEncoder(nn.Module):
    """A loop that changes the hidden state between its blocks."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.layer = encoder.layer

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        for layer in self.layer:
            hidden_states = layer(1.5 * hidden_states, attention_mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)


def test_what_happens_between_blocks_happens_once() -> None:
    """The smashed data is the input of the block at the cut, not the output of the one before."""
    model, batch = MODELS["bert"].make(), MODELS["bert"].batch()
    model.bert.encoder = ScalingEncoder(model.bert.encoder)
    assert_exact(model, split_model(model, 2), batch)


def test_no_labels_no_loss() -> None:
    entry = MODELS["bert"]
    model, batch = entry.make().eval(), entry.batch()
    labels = batch.pop("labels")
    split = split_model(model, 2)
    smashed = split.client(**batch)
    assert smashed.labels == {}
    assert split.server(smashed).loss is None
    assert torch.equal(split.server(smashed, labels=labels).loss, model(**batch, labels=labels).loss)


def test_later_labels_win() -> None:
    entry = MODELS["bert"]
    model, batch = entry.make().eval(), entry.batch()
    split = split_model(model, 2)
    other = (batch["labels"] + 1) % 3
    smashed = split.client(**batch)
    assert torch.equal(smashed.labels["labels"], batch["labels"])
    assert torch.equal(split.server(smashed, labels=other).loss, model(**(batch | {"labels": other})).loss)


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


@pytest.mark.parametrize("name", MODELS)
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


# --- refusals ------------------------------------------------------------------------------------


def tiny(head: str, **options: Any) -> Any:
    model_class = getattr(transformers, head)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**options))


@pytest.mark.parametrize(
    ("name", "head"), [("bart", "BartForSequenceClassification"), ("t5", "T5ForSequenceClassification")]
)
def test_classifiers_that_decode_raw_ids_are_refused(name: str, head: str) -> None:
    with pytest.raises(ValueError, match=f"{head} cannot be cut after block 2 of .*encoder-only"):
        split_model(tiny(head, **MODELS[name].options), 2)


def test_pooling_at_a_special_token_is_refused() -> None:
    """CLIP's text model looks for the end-of-text id: placeholders do not have it."""
    model = tiny("CLIPTextModelWithProjection", **MODELS["bert"].options)
    with pytest.raises(ValueError, match=r"outputs differ by .* of the largest"):
        split_model(model, 2)


@pytest.mark.parametrize(
    ("name", "field"), [("wav2vec2", "layerdrop"), ("opt", "layerdrop"), ("bart", "encoder_layerdrop")]
)
def test_layer_drop_is_refused(name: str, field: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.{field} is 0\.1.*{field}=0\.0"):
        split_model(MODELS[name].make(**{field: 0.1}), 2)


def test_layer_drop_of_the_decoder_is_the_servers_own() -> None:
    entry = MODELS["bart"]
    model = entry.make(decoder_layerdrop=0.5)
    assert_exact(model, split_model(model, 2), entry.batch())


def test_dropout_before_the_blocks_that_both_halves_need_is_reported() -> None:
    options = {"vocab_size": VOCAB, "d_model": 32, "n_layer": BLOCKS, "n_head": 4, "d_inner": 48, "pad_token_id": PAD}
    with pytest.warns(UserWarning, match="XLNetForSequenceClassification draws random numbers.*dropout 0"):
        split_model(tiny("XLNetForSequenceClassification", **options), 2)
    model = tiny("XLNetForSequenceClassification", **options, dropout=0.0, summary_last_dropout=0.0, num_labels=3)
    assert_exact(model, split_model(model, 2), MODELS["bert"].batch())


def test_models_whose_input_is_unknown_ask_for_an_example() -> None:
    model = MODELS["bert"].make()
    batch = {key: t for key, t in MODELS["bert"].batch().items() if key != "labels"}
    type(model).main_input_name, name = "mystery", type(model).main_input_name
    try:
        with pytest.raises(ValueError, match=r"'mystery' of BertForSequenceClassification.*example_inputs"):
            split_model(model, 2)
        assert_exact(model, split_model(model, 2, example_inputs=batch), MODELS["bert"].batch())
    finally:
        type(model).main_input_name = name


def test_an_example_that_does_not_run_is_reported() -> None:
    with pytest.raises(ValueError, match=r"could not run on an example with \['input_ids'\].*example_inputs"):
        split_model(MODELS["bert"].make(), 2, example_inputs={"input_ids": torch.full((1, 3), 10**6)})


def test_modules_without_a_config_are_refused() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(4)))
    with pytest.raises(ValueError, match="has no config: expected a transformers PreTrainedModel"):
        split_model(nn.Sequential(blocks), 2)


def test_blocks_that_run_more_than_once_are_refused() -> None:
    model = MODELS["bert"].make()
    layers = model.bert.encoder.layer
    original = layers[3].forward
    layers[3].forward = lambda hidden, *args, **kwargs: layers[2](original(hidden, *args, **kwargs), *args, **kwargs)
    with pytest.raises(ValueError, match=r"ran 2 times in one forward pass.*blocks="):
        split_model(model, 2)
