"""Evaluation by generating: greedy answers, their scores, and a merged model that answers the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_coefsfl.tasks import TASKS
from hf_coefsfl.tasks.generation import GeneratedAnswers, generate
from hf_coefsfl.tasks.run import run
from tests.support.pages import blocks
from tests.support.task_arguments import arguments
from tests.support.words import WORDS

PROMPTS = ["the cat", "the dog", "mat", "on a", "far"]
ANSWERS = ["sat on a mat", "ran far", "dog ran far", "mat dog ran far", ""]  # of `counter`, in four tokens


@pytest.fixture
def counter(decoder: str) -> str:
    """A model that says the next word of the list, and ends after the last: its blocks add nothing."""
    model = AutoModelForCausalLM.from_pretrained(decoder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(WORDS), model.config.hidden_size))
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))  # token i follows i - 1
        model.lm_head.weight[[0, 5]] = model.lm_head.weight[[5, 0]]  # and </s> the last
    model.save_pretrained(decoder)
    return decoder


def trained(folder: Path, model: str, **options: str) -> dict[str, Any]:
    """Run one small training, which changes next to nothing unless the options say so, and return its summary."""
    rows = Dataset.from_dict({"prompt": PROMPTS, "completion": ["sat on a mat"] * len(PROMPTS)})
    for split in ("train", "test", "validation"):
        rows.to_json(str(folder / "data" / f"{split}.jsonl"))
    fixed = {
        "dataset_name": str(folder / "data"), "model_name_or_path": model, "output_dir": str(folder / "out"),
        "num_clients": "2", "participation": "1.0", "num_rounds": "2", "warmup_rounds": "1", "max_length": "16",
        "per_device_train_batch_size": "2", "per_device_eval_batch_size": "2", "eval_steps": "1", "use_cpu": "true",
        "learning_rate": "1e-9", "max_new_tokens": "4", "save_strategy": "no", "eval_split": "test",
    }  # fmt: skip
    words = [part for name, value in (fixed | options).items() for part in (f"--{name}", *value.split(","))]
    run("causal_lm", argv=words)
    found: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return found


def answers_in(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_greedy_answers_equal_plain_argmax(decoder: str) -> None:
    """One prompt at a time, without padding and without a cache."""
    torch.manual_seed(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(decoder).eval(), AutoTokenizer.from_pretrained(decoder)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3  # the answers differ, and some end early
    model.generation_config.update(do_sample=True, temperature=5.0)  # as chat models have it
    prompts = [[4, 6, 7], [4], [4, 9, 10, 11, 12], [4, 8], [4, 13, 14]]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 6 and ids[-1] != tokenizer.eos_token_id:
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        expected.append(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True).strip())
    found = generate(model, tokenizer, prompts, max_new_tokens=6, batch_size=2, accelerator=Accelerator(cpu=True))
    assert found == expected and len(set(expected)) > 2


def test_scores_by_hand(decoder: str) -> None:
    answers = GeneratedAnswers(AutoTokenizer.from_pretrained(decoder), 4)
    found = answers._score(["The mat.", "a cat sat", "far", ""], ["mat", "cat", "dog", "cat"])
    assert found == pytest.approx({"exact": 25.0, "f1": (100 + 100 * 2 / 3) / 4})


def test_rouge_on_demand(decoder: str) -> None:
    answers = GeneratedAnswers(AutoTokenizer.from_pretrained(decoder), 4, rouge=True)
    found = answers._score(["a cat sat", "far"], ["the cat sat", "far"])
    assert {name: found[name] for name in ("rouge1", "rouge2", "rougeL")} == pytest.approx(
        {"rouge1": 100 * (2 / 3 + 1) / 2, "rouge2": 100 * (1 / 2 + 0) / 2, "rougeL": 100 * (2 / 3 + 1) / 2}
    )


def test_a_run_scores_rouge(tmp_path: Path, counter: str) -> None:
    summary = trained(tmp_path, counter, metrics="rouge", eval_steps="2")
    assert list(summary["scores"]) == ["perplexity", "EM", "F1", "ROUGE-1", "ROUGE-2", "ROUGE-L"]
    # All of "sat on a mat"; nothing of "ran far", "dog ran far" and ""; one of "mat dog ran far"'s four words.
    assert summary["scores"]["ROUGE-1"] == pytest.approx(100 * (1 + 2 / 8) / 5)


def test_a_run_scores_answers(tmp_path: Path, counter: str, capsys: pytest.CaptureFixture[str]) -> None:
    summary = trained(tmp_path, counter)
    assert list(summary["scores"]) == ["perplexity", "EM", "F1"]
    exact, f1 = 100 / 5, 100 * (1 + 2 / 7) / 5  # the fourth answer has one of three words, and three others
    assert (summary["scores"]["EM"], summary["scores"]["F1"]) == pytest.approx((exact, f1))
    assert summary["higher_is_better"] is False and summary["lower_is_better"] == ["perplexity"]
    assert [point["scores"]["EM"] for point in summary["curve"]] == [exact] * 2
    assert answers_in(tmp_path / "out" / "generations.jsonl") == [
        {"prompt": f"<s> {prompt}", "expected": "sat on a mat", "generated": answer}
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    assert re.search(r"\| exact +\| 20\.0000", card) and "type: exact" in card
    assert "EM 20.0, F1 25.7" in capsys.readouterr().out


def test_each_set_has_its_answers(tmp_path: Path, counter: str) -> None:
    summary = trained(
        tmp_path, counter, eval_split="test,validation", metric_for_best_model="test_exact", metrics="token_accuracy"
    )
    titles = [f"{name} ({split})" for split in ("test", "validation") for name in ("token accuracy", "EM", "F1")]
    assert list(summary["scores"]) == titles
    assert summary["higher_is_better"] is True and summary["lower_is_better"] == []
    assert {path.name for path in (tmp_path / "out").glob("*.jsonl")} == {
        "generations-test.jsonl", "generations-validation.jsonl",
    }  # fmt: skip


def test_nothing_is_generated_unasked(tmp_path: Path, decoder: str) -> None:
    summary = trained(tmp_path, decoder, max_new_tokens="0")
    assert list(summary["scores"]) == ["perplexity"] and not list((tmp_path / "out").glob("*.jsonl"))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ({"prompt": ["the cat"]}, {"max_new_tokens": -1}, "max_new_tokens=-1 must be at least 0"),
        ({"prompt": ["the cat"]}, {"metrics": ["rouge"]}, "'rouge' scores generated answers. .* --max_new_tokens"),
        ({}, {"max_new_tokens": 4}, "Row 0 of test has no prompt, so there is nothing to answer"),
        ({"prompt": ["the cat"]}, {"max_new_tokens": 2046}, "row 0, has 3 tokens. With .* model's 2048 positions"),
    ],
)
def test_what_cannot_be_answered(
    rows: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path, decoder: str
) -> None:
    for split in ("train", "test"):
        Dataset.from_dict(rows | {"completion": ["sat"]}).to_json(str(tmp_path / "data" / f"{split}.jsonl"))
    task = TASKS["causal_lm"](
        arguments(
            "causal_lm", model_name_or_path=decoder, dataset_name=str(tmp_path / "data"), max_length=16, **options
        )
    )
    with pytest.raises(ValueError, match=message):
        task.prepare(seed=0)


def test_a_merged_model_answers_the_same(tmp_path: Path, counter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/hub.md; the answers are those of the run's own evaluation."""
    trained(tmp_path, counter, learning_rate="0.03", num_rounds="4")
    monkeypatch.chdir(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(counter)
    names = {"model": PeftModel.from_pretrained(base, "out"), "tokenizer": AutoTokenizer.from_pretrained("out")}
    (code,) = [block for block in blocks("docs/hub.md", "python") if "merge_and_unload" in block]
    exec(code, names)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    lines = answers_in(tmp_path / "out" / "generations.jsonl")
    model, tokenizer = AutoModelForCausalLM.from_pretrained("merged"), AutoTokenizer.from_pretrained("merged")
    prompts = tokenizer([line["prompt"] for line in lines], add_special_tokens=False)["input_ids"]
    found = generate(model, tokenizer, prompts, max_new_tokens=4, batch_size=2, accelerator=Accelerator(cpu=True))
    assert found == [line["generated"] for line in lines] != ANSWERS and any(found)
