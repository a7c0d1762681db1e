"""The code of every kind of card runs on a folder that was moved; class names and the round of the weights travel."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import ClassLabel
from PIL import Image as Pictures
from transformers import ViTImageProcessor

from hf_coefsfl import SplitFedTrainer, load_adapter, split_model
from hf_coefsfl.trainer.weights import Weights
from tests.support.cards import card_of, header
from tests.support.federated import config, images, tiny_vit, trainer
from tests.support.models import MODELS
from tests.support.words import words_tokenizer

FEW, MANY = ["ham", 'a "quoted" name', "spam"], [f"kind {i}" for i in range(30)]


def fine_tuned(folder: Path, name: str, classes: list[str] | None, **changes: Any) -> SplitFedTrainer:
    """Return a trainer on a base model of another number of classes, with an adapter that changes its outputs."""
    (folder / "elsewhere").mkdir()
    base, entry = folder / "library" / "base", MODELS[name]
    entry.make(**({"num_labels": 5} if classes else {})).save_pretrained(base)
    options: dict[str, Any] = {"dtype": torch.float32}
    if classes:
        options |= {"id2label": dict(enumerate(classes)), "ignore_mismatched_sizes": True}
        options |= {"num_labels": len(classes), "label2id": {kind: i for i, kind in enumerate(classes)}}
    # Relative to another folder than the one in which the code of the card is run.
    model = getattr(transformers, entry.head).from_pretrained(os.path.relpath(base), **options)
    run = SplitFedTrainer(model, config(folder / "here" / "out", **changes))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in (*run.client_parameters.values(), *run.server_parameters.values()):
            p.add_(0.1 * torch.randn_like(p))
    return run


def moved(run: SplitFedTrainer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Save the run, move its folder away, run the code of the card beside it and return what that defines."""
    run.save_model()
    code = re.findall(r"```python\n(.*?)```", card_of(run), flags=re.DOTALL)
    shutil.move(str(run.args.output_dir), folder / "elsewhere")
    monkeypatch.chdir(folder / "elsewhere")
    scope: dict[str, Any] = {}
    assert len(code) == 2
    for block in code:
        exec(block, scope)
    return scope


def outputs(result: Any) -> torch.Tensor:
    return result.start_logits if "start_logits" in result else result.logits


CASES = {
    "text": ("bert", FEW),
    "tokens": ("distilbert-tags", FEW),
    "image, many classes": ("vit", MANY),
    "sound": ("wav2vec2", FEW),
    "questions": ("roberta-qa", None),
    "language": ("gpt2-lm", None),
}


@pytest.mark.parametrize("case", [*CASES, "text, base of the Hub"])
def test_adapters(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, classes = CASES[case.partition(", base")[0]]
    run = fine_tuned(tmp_path, name, classes)
    if case not in CASES:  # an id that is also a path, but only from where the code is run
        run.create_model_card(finetuned_from="laboratory/base")
        shutil.move(tmp_path / "library", tmp_path / "elsewhere" / "laboratory")
    scope = moved(run, tmp_path, monkeypatch)
    batch = {key: t for key, t in MODELS[name].batch().items() if key != "labels" and not key.endswith("positions")}
    run.model.eval()
    with torch.no_grad():
        expected = outputs(run.model(**batch))
        assert torch.equal(outputs(scope["model"].eval()(**batch)), expected)
        smashed = scope["split"].client.eval()(**batch)
        assert torch.equal(outputs(scope["split"].server.eval()(smashed)), expected)
    if classes:
        assert list(scope["model"].config.id2label.values()) == classes


def test_full_finetuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fine_tuned(tmp_path, "bert", FEW, full_finetuning=True)
    scope = moved(run, tmp_path, monkeypatch)
    batch = {key: t for key, t in MODELS["bert"].batch().items() if key != "labels"}
    with torch.no_grad():
        assert torch.equal(scope["model"](**batch).logits, run.model.eval()(**batch).logits)
    for part in (scope["model"], scope["client"].model, scope["server"].model):
        assert list(part.config.id2label.values()) == FEW


def test_halves_of_an_adapter_bring_the_names(tmp_path: Path) -> None:
    run = trainer(tmp_path, named(tiny_vit()))
    run.save_model()
    split = split_model(tiny_vit(), 2)
    for half in (split.client, split.server):
        load_adapter(half, tmp_path)
        assert list(half.model.config.id2label.values()) == FEW


def named(model: Any) -> Any:
    model.config.id2label = dict(enumerate(FEW))
    model.config.label2id = {name: i for i, name in enumerate(FEW)}
    return model


@pytest.mark.parametrize(
    ("name", "full"), [("bert", False), ("distilbert-tags", False), ("vit", False), ("bert", True)]
)
def test_pipelines_give_names(name: str, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fine_tuned(tmp_path, name, FEW, full_finetuning=full)
    run.processing_class = words_tokenizer()
    if name == "vit":
        run.processing_class = ViTImageProcessor(size={"height": 16, "width": 16})
    scope = moved(run, tmp_path, monkeypatch)
    found = scope["pipe"](Pictures.new("RGB", (16, 16)) if name == "vit" else "the cat")
    assert found and {entry.get("label", entry.get("entity")) for entry in found} <= set(FEW)


def test_names_of_a_dataset_become_the_models(tmp_path: Path) -> None:
    data = images().cast_column("labels", ClassLabel(names=FEW))
    run = trainer(tmp_path, data=data)
    assert list(run.model.config.id2label.values()) == FEW and run.model.config.label2id["spam"] == 2
    own = trainer(tmp_path, tiny_vit(id2label={0: "a", 1: "b", 2: "c"}), data=data)  # a model's own names stay
    assert list(own.model.config.id2label.values()) == ["a", "b", "c"]


@pytest.mark.parametrize("best", [True, False])
def test_the_round_of_the_weights(tmp_path: Path, best: bool) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "num_rounds": 3}
    if best:
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    metric = iter((0.1, 0.9, 0.2, 0.9))
    run = trainer(tmp_path, compute_metrics=lambda _: {"accuracy": next(metric)}, **options)
    run.train()
    run.save_model()
    weights, entries = Weights.of(run), run.ledger.entries
    assert (weights.round, weights.best, weights.num_rounds) == ((2, True, 3) if best else (3, False, 3))
    held = [entry for entry in entries if entry["round"] <= weights.round]
    assert weights.mib == pytest.approx(sum(sum(e[way].values()) for e in held for way in ("up", "down")) / 2**20)
    text = "best, round 2 of 3" if best else "round 3 of 3"
    assert f"Weights: {text}." in card_of(run) and f"| {text}; {weights.mib:.3f} MiB had crossed" in card_of(run)


def test_a_card_tells_no_path_but_where_it_is(tmp_path: Path) -> None:
    run = fine_tuned(tmp_path, "bert", FEW)
    run.create_model_card(dataset=str(tmp_path / "secret" / "stripes"))
    run.save_model()
    card = card_of(run)
    assert "for `base` (`BertForSequenceClassification`, from a folder that `adapter_config.json` names)" in card
    assert "trained on stripes." in card and str(tmp_path) not in card
    assert header(run).base_model is None and header(run).datasets is None
    adapter = json.loads((tmp_path / "here" / "out" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "library" / "base")
