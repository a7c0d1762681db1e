"""The halves on their own: sizes, saving and loading, adapters put on a half."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from hf_coefsfl.split import Half, SplitModel, load_client, load_server, split_model
from tests.support.models import MODELS
from tests.support.selection import slow_except

FEW = [
    ("bert", True),
    ("gpt2-lm", False),
    ("llama", True),
    ("t5", True),
    ("vit", False),
    ("swin", True),
    ("wav2vec2", False),
]

torch.set_num_threads(1)


def logits(output: Any) -> torch.Tensor:
    return output["logits"] if "logits" in output else output["start_logits"]


def saved_and_loaded(split: SplitModel, folder: Path) -> tuple[Any, Any]:
    split.client.save_pretrained(folder / "client")
    split.server.save_pretrained(folder / "server")
    return load_client(folder / "client"), load_server(folder / "server")


def assert_same_half(loaded: Half, half: Half) -> None:
    assert not loaded.training
    expected, got = dict(half.model.named_parameters()), dict(loaded.model.named_parameters())
    assert got.keys() == expected.keys()
    assert all(torch.equal(p, expected[name]) and p is not expected[name] for name, p in got.items())
    assert {n for n, p in got.items() if p.requires_grad} == {n for n, p in expected.items() if p.requires_grad}
    assert loaded.nbytes() == half.nbytes()
    assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))


@pytest.mark.parametrize(("name", "lora"), slow_except(*FEW, of=product(MODELS, (False, True))))
def test_saved_halves_compute_the_same(name: str, lora: bool, tmp_path: Path) -> None:
    entry = MODELS[name]
    model, batch = entry.make(entry.attention[0]), entry.batch()
    if lora:
        config = LoraConfig(r=2, target_modules=list(entry.lora), init_lora_weights=False)
        model = get_peft_model(model, config)
    else:
        next(model.parameters()).requires_grad_(False)
    model.eval()
    split = split_model(model, 2)
    client, server = saved_and_loaded(split, tmp_path)
    with torch.no_grad():
        assert torch.equal(logits(server(client(**batch))), logits(model(**batch)))
    assert_same_half(client, split.client)
    assert_same_half(server, split.server)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    expected = {"config.json", "split.json", "model.safetensors", "README.md", "adapter_config.json"}
    assert {"config.json", "split.json", "model.safetensors"} <= names <= expected


def test_training_goes_on_after_loading(tmp_path: Path) -> None:
    entry = MODELS["deberta-v2"]
    model, batch = entry.make(), entry.batch()
    split = split_model(model, 2)
    client, server = saved_and_loaded(split, tmp_path)

    def gradients(client: Any, server: Any) -> dict[str, torch.Tensor]:
        client.train(), server.train()
        torch.manual_seed(0)
        server(client(**batch)).loss.backward()
        return {f"{h.side}.{n}": p.grad for h in (client, server) for n, p in h.model.named_parameters()}

    own = gradients(client, server)
    shared = set(split.shared_trainable())
    for name, gradient in gradients(split.client, split.server).items():
        if name.split(".", 1)[1] not in shared:  # loaded apart, each half has its own part of the gradient
            assert torch.equal(own[name], gradient), name


class _Allocations(TorchDispatchMode):
    """Counts the bytes of the results of every operation that is not on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta and not func.is_view:
            self.nbytes += out.numel() * out.element_size()
        return out


def test_loading_a_half_never_allocates_the_whole(tmp_path: Path) -> None:
    config = transformers.BertConfig(vocab_size=5000, hidden_size=64, num_hidden_layers=12, num_attention_heads=4)
    model = transformers.BertForSequenceClassification(config)
    split = split_model(model, 10)
    split.server.save_pretrained(tmp_path)
    total = sum(p.numel() * 4 for p in model.parameters())
    with _Allocations() as allocated:
        server = load_server(tmp_path)
    assert server.nbytes() < total / 4
    assert allocated.nbytes < total / 4
    with _Allocations() as allocated:
        transformers.BertForSequenceClassification(config)
    assert allocated.nbytes >= total, "the count sees a whole model"


def test_nbytes() -> None:
    model = MODELS["vit"].make()
    split = split_model(model, 2)
    whole = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    parts = split.client.nbytes() + split.server.nbytes()
    assert whole <= parts <= whole + 64, "what is hollow takes a number per tensor"
    assert split.client.nbytes() == 4 * split.client.num_parameters()
    assert split.server.num_parameters() == sum(p.numel() for p in model.vit.layers[2:].parameters()) + sum(
        p.numel() for m in (model.vit.layernorm, model.classifier) for p in m.parameters()
    )


@pytest.mark.parametrize("task", [None, "SEQ_CLS"])
def test_an_adapter_on_each_half(task: str | None, tmp_path: Path) -> None:
    """Adapters of the whole model can be put on the halves of a base model, each taking its own."""
    entry = MODELS["bert"]
    batch = entry.batch()
    config = LoraConfig(r=2, target_modules=["query", "dense"], init_lora_weights=False, task_type=task)
    whole = get_peft_model(entry.make(), config).eval()
    whole.save_pretrained(tmp_path / "adapter")
    split = split_model(entry.make().eval(), 2)
    for half in (split.client, split.server):
        half.model = PeftModel.from_pretrained(half.model, tmp_path / "adapter").eval()
    assert torch.equal(split.server(split.client(**batch)).logits, whole(**batch).logits)
    numbers = {n.split(".encoder.layer.")[1][0] for n, _ in split.client.named_parameters() if "lora_" in n}
    assert numbers == {"0", "1"}
    numbers = {n.split(".encoder.layer.")[1][0] for n, _ in split.server.named_parameters() if ".encoder.layer." in n}
    assert numbers == {"2", "3"}
    client, server = saved_and_loaded(split, tmp_path)
    assert torch.equal(server(client(**batch)).logits, whole(**batch).logits)


def test_two_adapters_with_names(tmp_path: Path) -> None:
    entry = MODELS["bert"]
    config = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    model = get_peft_model(entry.make(), config, adapter_name="first")
    model.add_adapter("second", config)
    model.set_adapter("second")
    split = split_model(model.eval(), 2)
    client, server = saved_and_loaded(split, tmp_path)
    expected = model(**entry.batch()).logits
    assert torch.equal(server(client(**entry.batch())).logits, expected)
    model.set_adapter("first")
    assert not torch.equal(model(**entry.batch()).logits, expected)


def test_attention_implementation_is_kept(tmp_path: Path) -> None:
    for attention in ("eager", "sdpa"):
        split = split_model(MODELS["bert"].make(attention), 2)
        client, _ = saved_and_loaded(split, tmp_path / attention)
        assert client.model.config._attn_implementation == attention


# --- refusals ------------------------------------------------------------------------------------


def test_the_wrong_side_or_folder(tmp_path: Path) -> None:
    split = split_model(MODELS["bert"].make(), 2)
    split.client.save_pretrained(tmp_path / "client")
    with pytest.raises(ValueError, match="holds a client half; read it with load_client"):
        load_server(tmp_path / "client")
    with pytest.raises(ValueError, match=r"holds no split\.json, neither itself nor in server/"):
        load_server(tmp_path)


def test_another_format(tmp_path: Path) -> None:
    split_model(MODELS["bert"].make(), 2).client.save_pretrained(tmp_path)
    description = json.loads((tmp_path / "split.json").read_text())
    (tmp_path / "split.json").write_text(json.dumps(description | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version reads 1"):
        load_client(tmp_path)


@pytest.mark.parametrize("name", ["os", "NoSuchModel", "AutoModel", "BertConfig", "PreTrainedModel.x"])
def test_only_models_of_transformers_are_built(name: str, tmp_path: Path) -> None:
    split_model(MODELS["bert"].make(), 2).client.save_pretrained(tmp_path)
    description = json.loads((tmp_path / "split.json").read_text())
    (tmp_path / "split.json").write_text(json.dumps(description | {"model_class": name}))
    with pytest.raises(ValueError, match=f"'{name}' is not a model class of transformers"):
        load_client(tmp_path)


def test_a_class_from_elsewhere_is_not_saved(tmp_path: Path) -> None:
    class Custom(transformers.BertForSequenceClassification):
        pass

    split = split_model(Custom(transformers.BertConfig(**MODELS["bert"].options)), 2)
    with pytest.raises(ValueError, match="'Custom' is not a model class of transformers"):
        split.client.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_missing_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    split_model(MODELS["bert"].make(), 2).client.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("bert.embeddings.word_embeddings.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 tensors of this half: bert\.embeddings\.word_embeddings\.weight"):
        load_client(tmp_path)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_a_decoder_without_its_input(name: str) -> None:
    entry = MODELS[name]
    split = split_model(entry.make().eval(), 2)
    batch = entry.batch()
    labels = batch.pop("labels")
    smashed = split.client(**batch)
    with pytest.raises(ValueError, match="needs `labels` or `decoder_input_ids`"):
        split.server(smashed)
    with torch.no_grad():
        got = split.server(split.client(**batch, decoder_input_ids=labels)).logits
        assert torch.equal(got, split.model(**batch, decoder_input_ids=labels).logits)


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions"])
def test_outputs_of_single_blocks_are_refused(flag: str) -> None:
    split = split_model(MODELS["bert"].make(), 2)
    batch = MODELS["bert"].batch()
    with pytest.raises(ValueError, match=f"{flag}=True is not supported"):
        split.client(**batch, **{flag: True})
    with pytest.raises(ValueError, match=f"{flag}=True is not supported"):
        split.server(split.client(**batch), **{flag: True})


def test_inputs_that_are_no_tensors() -> None:
    split = split_model(MODELS["bert"].make(), 2)
    with pytest.raises(ValueError, match="Input 'input_ids' is a list; tensors, numbers and flags"):
        split.client(input_ids=[[1, 2]])


def test_a_server_that_skips_the_cut() -> None:
    split = split_model(MODELS["llama"].make().eval(), 2)
    smashed = split.client(**MODELS["llama"].batch())
    split.server.model.model.layers = split.server.model.model.layers[:2]
    with pytest.raises(RuntimeError, match=r"never reached block 2 of 'model\.layers'"):
        split.server(smashed)


def test_a_client_that_skips_the_cut() -> None:
    split = split_model(MODELS["llama"].make().eval(), 2)
    split.client.model.model.layers = split.client.model.model.layers[:2]
    with pytest.raises(RuntimeError, match=r"never reached the cut but .*LlamaRMSNorm"):
        split.client(**MODELS["llama"].batch())


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["query"], modules_to_save=["classifier"], init_lora_weights=False),
        LoraConfig(target_modules=["query", "word_embeddings"], init_lora_weights=False),
        LoraConfig(target_modules=["query"], bias="all", use_dora=True),
        IA3Config(target_modules=["query", "output.dense"], feedforward_modules=["output.dense"]),
        VeraConfig(target_modules=["query"]),
    ],
    ids=["modules_to_save", "embeddings", "dora", "ia3", "vera"],
)
def test_other_adapters(config: Any, tmp_path: Path) -> None:
    """Adapters on the embeddings, whole modules, and VeRA, whose blocks share tensors."""
    entry = MODELS["bert"]
    model, batch = get_peft_model(entry.make(), config).train(), entry.batch()
    split = split_model(model, 2)

    def gradients(run: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        run().loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return found

    got, expected = gradients(lambda: split.server(split.client(**batch))), gradients(lambda: model(**batch))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    split.eval()
    client, server = saved_and_loaded(split, tmp_path)
    assert torch.equal(server(client(**batch)).logits, model(**batch).logits)


def test_prompts_are_not_saved(tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    model, batch = get_peft_model(MODELS["bert"].make(), config).eval(), MODELS["bert"].batch()
    split = split_model(model, 2)
    assert torch.equal(split.server(split.client(**batch)).logits, model(**batch).logits)
    with pytest.raises(ValueError, match=r"Adapter 'default' .*PROMPT_TUNING.*such as LoRA"):
        split.server.save_pretrained(tmp_path)


def test_no_cache_is_made_of_placeholders() -> None:
    entry = MODELS["llama-lm"]
    split = split_model(entry.make().eval(), 2)
    assert split.model(**entry.batch(), use_cache=True).past_key_values is not None
    assert split.server(split.client(**entry.batch(), use_cache=True)).past_key_values is None


@pytest.mark.parametrize("mode", [True, False])
def test_halves_start_in_the_mode_of_the_model(mode: bool) -> None:
    split = split_model(MODELS["bert"].make().train(mode), 2)
    assert {m.training for half in (split.client, split.server) for m in half.modules()} == {mode}
    split.train(not mode)
    assert {m.training for part in (split.model, split.client, split.server) for m in part.modules()} == {not mode}
