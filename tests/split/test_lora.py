"""Where LoRA sits, who owns it, and what save_model leaves."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
    RobertaForQuestionAnswering,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTForImageClassification,
)

from hf_coefsfl import load_client, load_server, split_model
from hf_coefsfl.analysis.backbones import build_model
from hf_coefsfl.split.lora import default_lora, find_head, load_adapter, trainable_sides
from tests.support.federated import same, tiny_bert, tiny_vit, trainer, weights


def count(parameters: dict[str, torch.nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters.values())


@pytest.mark.parametrize(
    ("name", "cut", "per_block", "client"),
    [("vit-tiny", 4, 13_824, 55_296), ("distilroberta", 2, 55_296, 110_592)],
)
def test_counts_of_the_paper(name: str, cut: int, per_block: int, client: int) -> None:
    base = build_model(name, num_labels=3)
    model = get_peft_model(base, default_lora(base, head="frozen"))
    split = split_model(model, cut)
    ours, theirs = trainable_sides(split)
    assert count(ours) == cut * per_block == client
    assert count(theirs) == (split.num_blocks - cut) * per_block
    assert split.client.num_parameters(only_trainable=True) == client


def test_heads_of_vit_tiny() -> None:
    sizes = {}
    for head in ("full", "lora", "frozen"):
        base = build_model("vit-tiny", num_labels=100)
        _, server = trainable_sides(split_model(get_peft_model(base, default_lora(base, head=head)), 4))
        sizes[head] = count(server) - 8 * 13_824
    assert sizes == {"full": 192 * 100 + 100, "lora": 4 * (192 + 100), "frozen": 0}


@pytest.mark.parametrize(
    ("model", "heads", "default"),
    [
        (lambda: tiny_bert(), ["classifier"], "full"),
        (lambda: tiny_vit(), ["classifier"], "full"),
        (lambda: RobertaForQuestionAnswering(RobertaConfig(**SMALL)), ["qa_outputs"], "full"),
        (lambda: AutoModelForTokenClassification.from_config(RobertaConfig(**SMALL)), ["classifier"], "full"),
        (lambda: AutoModelForSequenceClassification.from_config(LlamaConfig(**LLAMA)), ["score"], "full"),
        (lambda: AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)), ["lm_head"], "frozen"),
        (lambda: AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=3, n_head=2)), ["lm_head"], "frozen"),
        (lambda: timm_vit(), ["timm_model.head"], "full"),
    ],
    ids=["bert", "vit", "qa", "tokens", "llama", "llama-lm", "gpt2-lm", "timm"],
)
def test_head_is_found(model: Any, heads: list[str], default: str) -> None:
    from hf_coefsfl.split import find_blocks

    base = model()
    path, _ = find_blocks(base)
    assert find_head(base, path) == heads
    lora = default_lora(base)
    assert (lora.modules_to_save == heads) is (default == "full")
    if default == "frozen":
        assert lora.modules_to_save is None
    tuned = get_peft_model(base, lora)
    names = [name for name, p in tuned.named_parameters() if p.requires_grad]
    assert all(path in name or any(f".{head}." in name for head in heads) for name in names)
    assert any(path in name for name in names)


SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
LLAMA = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}


def timm_vit() -> TimmWrapperForImageClassification:
    config = TimmWrapperConfig(
        architecture="vit_tiny_patch16_224", num_labels=10, model_args={"img_size": 32, "depth": 3, "embed_dim": 48}
    )
    return TimmWrapperForImageClassification(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, torch.Tensor]:
    folder = tmp_path_factory.mktemp("saved")
    run = trainer(folder, num_rounds=2)
    run.train()
    run.save_model()
    run.model.eval()
    pixels = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        return folder, pixels, run.model(pixel_values=pixels).logits


def test_plain_peft_loads_what_save_model_left(saved: Any) -> None:
    folder, pixels, logits = saved
    model = PeftModel.from_pretrained(tiny_vit(), folder).eval()
    with torch.no_grad():
        assert torch.equal(model(pixel_values=pixels).logits, logits)
        assert not torch.equal(tiny_vit().eval()(pixel_values=pixels).logits, logits)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_each_part_loads_on_its_half(saved: Any, with_adapter: bool) -> None:
    """On halves of a base model, and on halves that have an adapter already."""
    folder, pixels, logits = saved
    base = tiny_vit()
    split = split_model(get_peft_model(base, default_lora(base)) if with_adapter else base, 2).eval()
    load_adapter(split.client, folder / "client")
    load_adapter(split.server, folder / "server")
    with torch.no_grad():
        assert torch.equal(split.server(split.client(pixel_values=pixels).detach()).logits, logits)


def test_parts_together_are_the_adapter(saved: Any) -> None:
    """Plain PEFT, both parts on one base model."""
    folder, pixels, logits = saved
    model = PeftModel.from_pretrained(tiny_vit(), folder / "client", adapter_name="client")
    model.load_adapter(folder / "server", adapter_name="server")
    model.base_model.set_adapter(["client", "server"])
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(pixel_values=pixels).logits, logits, atol=1e-6, rtol=0)


def test_parts_hold_their_own_blocks_only(saved: Any) -> None:
    from safetensors.torch import load_file

    folder, _, _ = saved
    parts = {side: load_file(folder / side / "adapter_model.safetensors") for side in ("client", "server")}
    whole = load_file(folder / "adapter_model.safetensors")
    assert not parts["client"].keys() & parts["server"].keys()
    assert parts["client"].keys() | parts["server"].keys() == whole.keys()
    assert all(".layers.0." in name or ".layers.1." in name for name in parts["client"])
    assert all(".layers.2." in name or ".layers.3." in name or "classifier" in name for name in parts["server"])


def test_wrong_folder_is_refused(saved: Any, tmp_path: Path) -> None:
    split = split_model(tiny_vit(), 2)
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors"):
        load_adapter(split.client, tmp_path)


def test_full_finetuning_trains_saves_and_loads(tmp_path: Path) -> None:
    start = tiny_vit()
    run = trainer(
        tmp_path, copy.deepcopy(start), full_finetuning=True, num_rounds=3, save_strategy="steps", save_steps=2
    )
    assert not isinstance(run.model, PeftModel)
    assert count(run.client_parameters) + count(run.server_parameters) == start.num_parameters()
    assert any("patch_embeddings" in name for name in run.client_parameters)
    assert any("classifier" in name for name in run.server_parameters)
    run.train()
    run.save_model()
    resumed = trainer(tmp_path / "again", tiny_vit(seed=5), full_finetuning=True, num_rounds=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(weights(run), weights(resumed))
    pixels = torch.randn(5, 1, 8, 8)
    whole = ViTForImageClassification.from_pretrained(tmp_path).eval()
    client, server = load_client(tmp_path / "client").eval(), load_server(tmp_path / "server").eval()
    with torch.no_grad():
        logits = whole(pixel_values=pixels).logits
        assert torch.equal(server(client(pixel_values=pixels).detach()).logits, logits)
        assert not torch.equal(start.eval()(pixel_values=pixels).logits, logits)


def test_a_peft_model_and_a_config_of_ones_own_are_taken(tmp_path: Path) -> None:
    own = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    given = trainer(tmp_path / "a", peft_config=own, num_rounds=2)
    wrapped = trainer(tmp_path / "b", get_peft_model(tiny_vit(), own), num_rounds=2)
    assert all(
        "q_proj" in n or "v_proj" in n or "classifier" in n
        for n in {**given.client_parameters, **given.server_parameters}
    )
    for run in (given, wrapped):
        run.train()
        run.save_model()
    split = split_model(tiny_vit(), 2)
    load_adapter(split.client, tmp_path / "a" / "client")
    assert split.client.num_parameters(only_trainable=False) > 0
