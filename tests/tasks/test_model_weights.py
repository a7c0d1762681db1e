"""`--dtype`, `--load_in_8bit` and `--load_in_4bit` of a task."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_coefsfl.cli import main
from hf_coefsfl.split import load_client
from hf_coefsfl.split.quantized import quantised_layers
from hf_coefsfl.tasks import TASKS
from hf_coefsfl.tasks.model_weights import quantisation_config
from hf_coefsfl.tasks.options import parse_options
from hf_coefsfl.tasks.run import make_trainer, run
from tests.support.models import MODELS
from tests.support.posts import make_posts, small
from tests.support.quantised import need_bitsandbytes

NEWSGROUPS = TASKS["newsgroups"]


@pytest.fixture
def posts(tmp_path: Path) -> dict[str, str]:
    return make_posts(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    with pytest.raises(SystemExit) as left:
        run("newsgroups", argv=argv)
    assert left.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def built(posts: dict[str, str], *options: str) -> Any:
    _, arguments, config = parse_options(NEWSGROUPS, argv=[*small(posts), *options])
    return make_trainer(NEWSGROUPS(arguments), config)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "float16"], "dtype='float16' is not allowed. Choose one of: float32, bfloat16."),
        (["--load_in_8bit", "--load_in_4bit"], "load_in_8bit and load_in_4bit do not go together."),
        (["--dtype", "bfloat16", "--full_finetuning"], "--dtype bfloat16 and --full_finetuning do not go together"),
        (["--load_in_4bit", "--full_finetuning"], "--load_in_4bit and --full_finetuning do not go together"),
    ],
)
def test_what_does_not_go_together(
    options: list[str],
    message: str,
    posts: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    assert message in refused(capsys, [*small(posts), *options])


@pytest.mark.parametrize("option", ["load_in_8bit", "load_in_4bit"])
def test_a_missing_library_is_one_sentence(
    option: str, posts: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    said = refused(capsys, [*small(posts), f"--{option}"])
    assert f"error: --{option} needs bitsandbytes: pip install 'hf_coefsfl[quantized]'." in said


def test_bfloat16(posts: dict[str, str]) -> None:
    model = built(posts, "--dtype", "bfloat16").model
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in built(posts).model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "name", ["bert", "distilbert-tags", "electra-qa", "gpt2-lm", "llama", "modernbert-tags", "vit"]
)
def test_only_blocks_are_quantised(name: str) -> None:
    """Heads, poolers and projections of embeddings are left out."""
    arguments = NEWSGROUPS.arguments_class(load_in_4bit=True, dtype="bfloat16")
    model = MODELS[name].make()
    config = quantisation_config(model, arguments)
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4" and not config.load_in_8bit
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    kept = set(config.llm_int8_skip_modules)
    linear = {path for path, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    assert kept and kept == {path for path in linear if not any(part.isdigit() for part in path.split("."))}


@pytest.mark.parametrize("option", ["load_in_8bit", "load_in_4bit"])
def test_a_run_of_a_recipe_and_the_half_of_its_clients(option: str, posts: dict[str, str], tmp_path: Path) -> None:
    need_bitsandbytes()
    run("newsgroups", argv=[*small(posts), f"--{option}", "--num_rounds", "2"])
    summary = json.loads((Path(posts["output_dir"]) / "summary.json").read_text())
    kind = {"load_in_8bit": "int8", "load_in_4bit": "nf4"}[option]
    assert summary["base"]["quantised"] == kind
    adapter = load_file(Path(posts["output_dir"]) / "adapter_model.safetensors")
    assert {t.dtype for t in adapter.values()} == {torch.float32} and any("classifier" in name for name in adapter)
    posts["output_dir"] = str(tmp_path / "halves")
    assert main(["split", "newsgroups", *small(posts), f"--{option}"]) == 0
    half, trainer = load_client(tmp_path / "halves"), built(posts, f"--{option}")
    layers = dict(quantised_layers(half.model))
    assert len(layers) == 6 and layers.keys() == dict(quantised_layers(trainer.split.client.model)).keys()
    inputs = {"input_ids": torch.tensor([[6, 7, 8]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    expected = trainer.split.eval().client(**inputs)
    assert torch.equal(half.eval()(**inputs).activations, expected.activations)
    whole = {name for name, _ in quantised_layers(trainer.model)}
    assert len(whole) == 18 and not [name for name in whole if "pooler" in name or "classifier" in name]


def test_a_language_model_keeps_its_output_embedding(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=15, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16
    )
    found = quantisation_config(LlamaForCausalLM(config), NEWSGROUPS.arguments_class(load_in_8bit=True))
    assert found.load_in_8bit and found.llm_int8_skip_modules == ["lm_head"]
