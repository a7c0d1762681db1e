"""Halves of models whose blocks bitsandbytes keeps in 8 or 4 bits."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_coefsfl.flower.client_node import fingerprint
from hf_coefsfl.split import load_client, load_server, split_model
from hf_coefsfl.split.lora import default_lora
from hf_coefsfl.split.quantized import beside_weights, quantised_layers, scales, states
from hf_coefsfl.trainer.fingerprints import of_weights
from tests.support.models import MODELS
from tests.support.quantised import KINDS, dequantised, need_bitsandbytes, quantised, wide_bert

need_bitsandbytes()
LAYER = "bert.encoder.layer.0.attention.self.query"


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (3, 7), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 2])}


def with_lora(model: Any) -> Any:
    torch.manual_seed(1)
    tuned = get_peft_model(model, default_lora(model))
    with torch.no_grad():  # B starts as zeros, which would hide it
        for name, p in tuned.named_parameters():
            if "lora_B" in name:
                p.copy_(0.02 * torch.randn_like(p))
    return tuned


def gradients(split: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the smashed data of a batch, the gradient there, and the gradients of the trained weights."""
    split.train()
    smashed = split.client(**batch())
    smashed.activations.retain_grad()
    split.server(smashed).loss.backward()
    trained = {name: p.grad.clone() for name, p in split.model.named_parameters() if p.grad is not None}
    return smashed.activations.detach(), smashed.activations.grad, trained


def close(a: Tensor, b: Tensor, share: float) -> bool:
    return bool((a - b).norm() <= share * b.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_they_compute_what_a_model_with_the_same_weights_as_floats_does(kind: str) -> None:
    model = wide_bert(dropout=0.0)
    split = split_model(with_lora(quantised(model, kind)), 2)
    twin = split_model(with_lora(dequantised(quantised(model, kind))), 2)
    smashed, gradient, trained = gradients(split)
    expected = gradients(twin)
    assert close(smashed, expected[0], 1e-5) and close(gradient, expected[1], 1e-4)
    assert trained.keys() == expected[2].keys() and len(trained) > 40
    assert all(close(g, expected[2][name], 1e-3) for name, g in trained.items())
    unquantised = split_model(with_lora(model), 2)
    assert not close(smashed, gradients(unquantised)[0], 1e-4)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["llama", "electra-qa", "gpt2"])  # electra: a projection before the blocks
def test_other_models(name: str, kind: str) -> None:
    """The halves are compared with the model, in outputs and gradients, by `split_model`."""
    model = quantised(MODELS[name].make(), kind)
    split = split_model(model, 2).eval()
    inputs = MODELS[name].batch()
    assert any(not path.startswith(split.blocks) for path, _ in quantised_layers(model)) is (name == "electra-qa")
    expected = model.eval()(**inputs)
    assert torch.equal(split.server(split.client(**inputs)).loss, expected.loss)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_and_a_half_holds_its_own_only(kind: str) -> None:
    model = quantised(wide_bert(), kind)
    model(**batch())  # 8-bit layers move their scales at the first pass
    split = split_model(model, 1)
    whole = dict(quantised_layers(model))
    for half in (split.client, split.server):
        own = dict(quantised_layers(half.model))
        assert own
        for path, layer in own.items():
            assert layer.weight is whole[path].weight
            assert states(layer).keys() == states(whole[path]).keys()
            assert all(state is states(whole[path])[name] for name, state in states(layer).items())
    assert not dict(quantised_layers(split.client.model)).keys() & dict(quantised_layers(split.server.model)).keys()
    theirs = [
        weakref.ref(state) for path, layer in quantised_layers(split.server.model) for state in states(layer).values()
    ]
    client = split.client
    del split, model, whole, half, own, layer
    gc.collect()
    assert theirs and not any(ref() for ref in theirs)
    assert client(**batch()).activations.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_half_alone_computes_and_trains_as_before(kind: str, tmp_path: Path) -> None:
    split = split_model(with_lora(quantised(wide_bert(dropout=0.0), kind)), 2)
    for half in (split.client, split.server):
        half.save_pretrained(tmp_path / half.side)
    client, server = load_client(tmp_path), load_server(tmp_path)
    assert client.nbytes() == split.client.nbytes() and client.num_parameters() == split.client.num_parameters()
    assert fingerprint(client) == fingerprint(split.client)
    _, gradient, trained = gradients(split)
    for mode in (True, False):
        split.train(mode), client.train(mode), server.train(mode)
        assert torch.equal(client(**batch()).activations, split.client(**batch()).activations)
        assert torch.equal(server(client(**batch())).logits, split.model(**batch()).logits)
    client.train()
    client(**batch()).activations.backward(gradient)
    found = {name: p.grad for name, p in client.model.named_parameters() if p.requires_grad}
    assert found and all(torch.equal(g, trained[name]) for name, g in found.items())


def test_the_sizes_are_those_of_the_numbers() -> None:
    """A byte holds two 4-bit weights; beside them lie a scale for each 64 and the 16 numbers they stand for."""
    sizes = {kind: split_model(quantised(wide_bert(), kind), 2) for kind in ("int8", "nf4")}
    plain = split_model(wide_bert(), 2)
    weights, rows, layers = 2 * (4 * 64 * 64 + 2 * 64 * 128), 2 * (4 * 64 + 128 + 64), 2 * 6
    saved = {kind: plain.client.nbytes() - split.client.nbytes() for kind, split in sizes.items()}
    assert saved["int8"] == 4 * weights - (weights + 4 * rows)
    assert saved["nf4"] == 4 * weights - (weights // 2 + 4 * weights // 64 + 64 * layers)
    assert {split.client.num_parameters() for split in sizes.values()} == {plain.client.num_parameters()}


# ---- Refusals ----


def test_other_quantisers_are_named() -> None:
    model = wide_bert()
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ValueError, match="quantised by gptq: whether its halves share"):
        split_model(model, 2)


def test_weights_that_were_packed_for_inference() -> None:
    model = quantised(wide_bert(), "nf4")
    layer = model.get_submodule(LAYER)
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=f"The weight of {LAYER} is packed for inference on this CPU"):
        split_model(model, 2)


def test_evaluating_does_not_pack_the_weights_that_the_halves_share() -> None:
    """On processors with AVX512-BF16 bitsandbytes would, and training would go on with other numbers."""
    model = quantised(wide_bert(dropout=0.0), "nf4")
    layer = model.get_submodule(LAYER)
    layer.support_avx512bf16_for_cpu = True
    before = {name: t.clone() for name, t in beside_weights(model)}
    split = split_model(model, 2).eval()
    with torch.no_grad():
        model(**batch()), split.client(**batch())
    assert all(torch.equal(t, before[name]) for name, t in beside_weights(model))


def test_other_storage_of_the_bits() -> None:
    model = quantised(wide_bert(), "nf4", bnb_4bit_quant_storage=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"is stored as torch.bfloat16 \(bnb_4bit_quant_storage\), which only FSDP needs"
    ):
        split_model(model, 2)


def test_layers_that_the_config_does_not_tell_of_are_not_saved(tmp_path: Path) -> None:
    model = quantised(wide_bert(), "nf4")
    split = split_model(model, 2)
    del split.client.model.config.quantization_config
    with pytest.raises(ValueError, match=f"{LAYER} is quantised, but the model's config has no quantization_config"):
        split.client.save_pretrained(tmp_path)


def spoil(folder: Path, name: str, edit: Callable[[Tensor], Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = edit(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "name", "edit"),
    [
        ("int8", "weight", lambda t: t[:-1]),
        ("int8", "weight", lambda t: t.float()),
        ("int8", "SCB", lambda t: t[:-1]),
        ("int8", "SCB", lambda t: t / 0),
        ("nf4", "weight", lambda t: t[:-1]),
        ("nf4", "weight.absmax", lambda t: t[:-1]),
        ("nf4", "weight.absmax", lambda t: t.double()),
        ("nf4", "weight.quant_map", lambda t: t[:-1]),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:-1]),
        ("nf4-double", "weight.absmax", lambda t: t[:-1]),
        ("nf4-double", "weight.nested_absmax", lambda t: t[:0]),
        ("nf4-double", "weight.nested_quant_map", lambda t: t[:-1]),
    ],
)
def test_damaged_halves(kind: str, name: str, edit: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """The kernels read as far as the sizes say, so these have to be right."""
    split_model(quantised(wide_bert(), kind), 2).client.save_pretrained(tmp_path)
    load_client(tmp_path)
    spoil(tmp_path, f"{LAYER}.{name}", edit)
    with pytest.raises(ValueError, match=f"{LAYER}.weight, which is quantised, cannot be read") as failed:
        load_client(tmp_path)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [64, 640]}, {"blocksize": 4}, {"blocksize": 0}, {"blocksize": "64"}, {"dtype": "int64"},
        {"dtype": "load"}, {"quant_type": "x"}, {"nested_offset": float("nan")}, {"nested_blocksize": 2**40},
        {"nested_dtype": "int8"}, {"more": 1},
    ],
)  # fmt: skip
def test_a_description_of_other_sizes(change: dict[str, Any], tmp_path: Path) -> None:
    split_model(quantised(wide_bert(), "nf4-double"), 2).client.save_pretrained(tmp_path)

    def edit(t: Tensor) -> Tensor:
        description = json.loads(bytes(t.tolist())) | change
        return torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)

    spoil(tmp_path, f"{LAYER}.weight.quant_state.bitsandbytes__nf4", edit)
    with pytest.raises(ValueError, match="which is quantised, cannot be read"):
        load_client(tmp_path)


def test_a_half_of_another_quantiser_is_not_read(tmp_path: Path) -> None:
    split_model(quantised(wide_bert(), "int8"), 2).client.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantised by gptq; only bitsandbytes can be read"):
        load_client(tmp_path)


def test_scales_are_part_of_the_checksums() -> None:
    split = split_model(quantised(wide_bert(), "int8"), 2)
    before = fingerprint(split.client), of_weights(split.model)
    scales(split.client.model.get_submodule(LAYER))["SCB"].mul_(1.5)
    assert not {*before} & {fingerprint(split.client), of_weights(split.model)}
