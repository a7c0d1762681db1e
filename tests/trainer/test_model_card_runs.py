"""The runs that a model card must cope with."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_coefsfl import METHODS, SplitFedTrainer
from hf_coefsfl.trainer.model_card import TEMPLATE, CardArguments, idea, public_name
from hf_coefsfl.trainer.results import final_results, main_metric
from tests.support.cards import card_of, header
from tests.support.federated import config, texts, tiny_bert, trainer
from tests.support.models import MODELS
from tests.support.paths import ROOT


def test_full_finetuning_without_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path / "full", full_finetuning=True, num_rounds=1, method="vanilla", eval_dataset=None)
    run.train()
    run.save_model()
    card, data = card_of(run), header(run)
    assert "All weights, fine-tuned, of a `ViTForImageClassification` in float32." in card
    assert "The model was not evaluated." in card and "| rounds          | 1 of 1  " in card
    assert data.library_name == "transformers" and data.eval_results is None and "lora" not in data.tags
    assert 'Set by `method="vanilla"`.' in card and not (tmp_path / "full" / "curves.png").exists()
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL):
        exec(block, scope)
    assert scope["client"].num_parameters() + scope["server"].num_parameters() == scope["model"].num_parameters()


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("bert", "text-classification"),
        ("roberta-qa", "question-answering"),
        ("gpt2-lm", "text-generation"),
        ("wav2vec2", "audio-classification"),
    ],
)
def test_other_tasks_before_any_round(tmp_path: Path, name: str, task: str) -> None:
    run = SplitFedTrainer(MODELS[name].make(), config(tmp_path))
    run.create_model_card()
    card, data = card_of(run), header(run)
    assert data.pipeline_tag == task and data.eval_results is None
    assert "No round has run yet." in card and "The model was not evaluated." in card
    assert ("num_labels=3" in card) is ("classification" in task)


def test_what_withstands_hostile_clients_is_named(tmp_path: Path) -> None:
    run = SplitFedTrainer(tiny_bert(), config(tmp_path, aggregation="krum", hostile_clients=2, client_bound=5.0))
    run.create_model_card()
    assert re.search(r"\| aggregation +\| krum, against 2 hostile clients a round +\|", card_of(run))
    assert re.search(r"\| largest update of a client +\| 5 times the median of the round +\|", card_of(run))


def test_text_with_clients_of_its_own_and_the_best_round(tmp_path: Path) -> None:
    """The kept model is that of the best round, which the results must be of, unless it is evaluated again."""

    class Worse(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "eval_f1" in logs:
                state.log_history[-1]["eval_f1"] = 1 / state.global_step  # the first round is the best

    data = {"Bern": texts(12), "Basel": texts(20, seed=2)}
    run = trainer(
        tmp_path, tiny_bert(), data, num_clients=None, num_rounds=3, method="gas", callbacks=[Worse()], save_steps=1,
        eval_dataset=texts(9, seed=1), compute_metrics=lambda p: {"f1": float("inf")}, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    run.train()
    run.state.best_global_step = 1
    run.save_model()
    assert final_results(run)["eval_f1"] == 1.0
    card = card_of(run)
    assert "| 2, with 12 to 20 samples each " in card and "| given: a dataset for each client " in card
    assert "![f1 over rounds and over MiB](curves.png)" in card and card.count("0.3333") == 1
    assert "| f1     | 1.0000 |" in card
    run.evaluate()
    assert final_results(run)["eval_f1"] == pytest.approx(1 / 3)


def test_infinite_metrics_stay_out_of_the_header(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_rounds=1, compute_metrics=lambda p: {"ratio": float("nan")})
    run.train()
    run.evaluate()
    run.create_model_card()
    assert [result.metric_type for result in header(run).eval_results] == ["loss"]
    assert "| ratio  | nan" in card_of(run) and header(run).metrics is None


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_has_an_idea(method: str) -> None:
    assert re.fullmatch(r"[A-Z][^\n]{30,}\.", idea(METHODS[method])) and "Section" not in idea(METHODS[method])


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("org/model", "org/model"),
        ("gpt2", "gpt2"),
        ("/home/me/models/vit", "vit"),
        ("C:\\models\\vit", "vit"),
        ("~/vit", "vit"),
        ("./vit", "vit"),
        ("a/b/vit", "vit"),
        ("A set, 2nd edition", "A set, 2nd edition"),
    ],
)
def test_public_names(name: str, public: str) -> None:
    assert public_name(name) == public


def test_the_metric_that_is_drawn() -> None:
    assert main_metric({1: {"eval_loss": 1.0, "eval_f1": 0.2, "eval_accuracy": 0.3}}) == "eval_accuracy"
    assert main_metric({1: {"eval_loss": 1.0, "eval_f1": 0.2, "eval_em": 0.3}}) == "eval_f1"
    assert main_metric({1: {"eval_loss": 1.0}}) == "eval_loss"


def test_what_is_given_later_counts() -> None:
    first = CardArguments(license="mit", dataset="a")
    assert first.updated(dataset="b", license=None) == CardArguments(license="mit", dataset="b")


def test_the_template_is_shown_in_model_cards() -> None:
    shown = ROOT / "model_cards" / "template.md"
    assert shown.is_symlink() and shown.resolve() == TEMPLATE.resolve()
