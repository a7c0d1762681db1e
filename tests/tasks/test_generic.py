"""Generic tasks and presets: titles, metrics by name, and labels of words."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from datasets import Sequence as Listed
from transformers import BertConfig, BertForTokenClassification

from hf_coefsfl.tasks import TASKS
from hf_coefsfl.tasks.options import parse_options
from hf_coefsfl.tasks.presets import GENERIC, PRESETS
from hf_coefsfl.tasks.run import run
from hf_coefsfl.tasks.token_classification import align
from tests.support.task_arguments import arguments
from tests.support.words import WORDS, words_tokenizer

TAGS = ["O", "B-ANIMAL", "B-PLACE"]
SENTENCES = [["the", "cat", "sat", "on", "a", "mat"], ["the", "dog", "ran", "far"], ["a", "cat", "ran"]]
OF_SENTENCES = [[0, 1, 0, 0, 0, 2], [0, 1, 0, 0], [0, 1, 0]]


@pytest.fixture
def tagger(tmp_path: Path) -> str:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)
    BertForTokenClassification(config).save_pretrained(tmp_path / "tagger")
    words_tokenizer().save_pretrained(tmp_path / "tagger")
    return str(tmp_path / "tagger")


def rows(tags: list[list[Any]] = OF_SENTENCES, kind: Any = None, sentences: list[list[str]] = SENTENCES) -> Dataset:
    features = Features({"tokens": Listed(Value("string")), "tags": Listed(kind or ClassLabel(names=TAGS))})
    return Dataset.from_dict({"tokens": sentences, "tags": tags}, features=features)


def tagged(tagger: str, data: Dataset, **options: Any) -> Any:
    given = arguments("token_classification", dataset_name="own", model_name_or_path=tagger, max_length=8, **options)
    task = TASKS["token_classification"](given)
    return task.build(data, {"dev": data}, task.load_processor())


def test_presets_are_data_over_five_tasks() -> None:
    kinds = ("text_classification", "token_classification", "image_classification", "question_answering", "causal_lm")
    assert tuple(GENERIC) == kinds
    assert {task.name for task in PRESETS} == TASKS.keys() - {*kinds, "digits"}
    assert {task.implementation for task in PRESETS} <= {task.implementation for task in GENERIC.values()}
    assert arguments("mnli").max_length == 128 and arguments("text_classification").max_length == 256
    mine = dataclasses.replace(TASKS["text_classification"], name="mine", dataset_name="me/posts")
    assert mine(mine.arguments_class()).title == "posts"


def test_titles_are_of_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "tickets.csv").write_text("text,label\n")
    for task in ("newsgroups", "text_classification"):
        assert TASKS[task](arguments(task, dataset_name=str(tmp_path / "tickets.csv"))).title == "tickets"
    assert TASKS["newsgroups"](arguments("newsgroups")).title == "20 Newsgroups"
    assert TASKS["squad_v2"].title_of("copies/squad_v2") == "SQuAD v2.0"  # a local copy
    assert TASKS["mnli"].title_of("nyu-mll/glue", "qnli") == "glue (qnli)"
    assert TASKS["causal_lm"](arguments("causal_lm")).title == "tldr"


def test_the_output_folder_is_called_by_the_dataset() -> None:
    def folder(task: str, *argv: str) -> str:
        return str(parse_options(TASKS[task], argv=argv)[2].output_dir)

    assert folder("text_classification", "--dataset_name", "nyu-mll/glue", "--dataset_config_name", "sst2") == (
        "outputs/glue-sst2-coef_w"
    )
    assert folder("newsgroups", "--dataset_name", "my posts") == "outputs/my-posts-coef_w"
    assert folder("newsgroups", "--dataset_name", "copies/20_newsgroups") == "outputs/newsgroups-coef_w"
    assert folder("causal_lm") == "outputs/causal_lm-coef_w"


def test_a_generic_task_needs_a_dataset() -> None:
    with pytest.raises(ValueError, match=r"image_classification has no dataset of its own\. Give --dataset_name"):
        TASKS["image_classification"](arguments("image_classification"))


# ---- Words ----


def test_labels_of_words_stand_on_their_first_tokens() -> None:
    assert align([None, 0, 0, 1, 2, 2, None], [5, 6, 7]) == [-100, 5, -100, 6, 7, -100, -100]
    assert align([0, 1], [4, -100]) == [4, -100]


@pytest.mark.parametrize("kind", ["names", "strings", "numbers"])
def test_tags_of_all_kinds(tagger: str, kind: str) -> None:
    tags: list[list[Any]] = OF_SENTENCES
    feature: Any = None
    if kind == "strings":
        tags, feature = [[TAGS[tag] for tag in row] for row in tags], Value("string")
    elif kind == "numbers":
        feature = Value("int64")
    prepared = tagged(tagger, rows(tags, feature))
    assert prepared.model.config.id2label == dict(enumerate(["0", "1", "2"] if kind == "numbers" else sorted(TAGS)
                                                            if kind == "strings" else TAGS))  # fmt: skip
    number = {name: i for i, name in prepared.model.config.id2label.items()}
    expected = [TAGS[tag] for tag in OF_SENTENCES[1]] if kind != "numbers" else [str(tag) for tag in OF_SENTENCES[1]]
    labels = prepared.train_dataset[1]["labels"]
    assert [label for label in labels if label != -100] == [number[name] for name in expected]
    batch = prepared.data_collator([prepared.train_dataset[i] for i in range(2)])
    assert batch["labels"].shape == batch["input_ids"].shape and batch["labels"][1, -1] == -100  # padding
    assert prepared.model(**batch).loss.isfinite()


def test_bad_tags_name_the_row(tagger: str) -> None:
    with pytest.raises(ValueError, match=r"Row 1 of the training set has 4 words and 3 tags"):
        tagged(tagger, rows([OF_SENTENCES[0], [0, 1, 0], OF_SENTENCES[2]]))
    with pytest.raises(ValueError, match=r"No word has a tag"):
        tagged(tagger, rows([[-1] * len(words) for words in SENTENCES], Value("int64")))
    prepared = tagged(tagger, rows([OF_SENTENCES[0], [-1] * 4, OF_SENTENCES[2]], Value("int64")))
    assert len(prepared.train_dataset) == 2  # a row without a tag has nothing to learn


def test_from_a_dataset_to_named_scores(tagger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "animals"
    rows(OF_SENTENCES * 8, sentences=SENTENCES * 8).to_parquet(str(data / "train.parquet"))
    rows().to_parquet(str(data / "test.parquet"))
    out = tmp_path / "out"
    options = {
        "dataset_name": data, "model_name_or_path": tagger, "output_dir": out, "num_clients": 2, "participation": 1,
        "num_rounds": 3, "warmup_rounds": 1, "max_length": 8, "per_device_train_batch_size": 4, "eval_steps": 1,
        "save_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "load_best_model_at_end": True,
        "metric_for_best_model": "recall",
    }  # fmt: skip
    argv = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    argv += ["--columns", "tags=tags", "--metrics", "accuracy", "recall"]
    run("token_classification", argv=argv)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["task"], summary["title"], summary["dataset"]) == ("token_classification", "animals", "animals")
    assert list(summary["scores"]) == ["accuracy", "recall"] and summary["scores"]["accuracy"] > 30
    assert "\nanimals, coef_w, " in capsys.readouterr().out
    best = json.loads((out / "trainer_state.json").read_text())["best_metric"]
    assert best * 100 == summary["scores"]["recall"]
    for wrong, message in (
        (["--metric_for_best_model", "recal"], "metric_for_best_model='recal' is not measured. Did you mean recall?"),
        (["--metrics", "squad_v2"], "The metric 'squad_v2' cannot score predicted classes"),
    ):
        with pytest.raises(SystemExit) as left:
            run("token_classification", argv=[*argv, "--output_dir", str(tmp_path / "none"), *wrong])
        assert left.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_language_model_has_its_own_metrics(decoder: str) -> None:
    task = TASKS["causal_lm"](arguments("causal_lm", model_name_or_path=decoder, metrics=["token_acuracy"]))
    with pytest.raises(ValueError, match=r"'token_acuracy' does not score next tokens\. Did you mean token_accuracy\?"):
        task.prepare(seed=0)
    task = TASKS["causal_lm"](arguments("causal_lm", metrics=["perplexity", "token_accuracy"]))
    scored = task.scores({"eval_perplexity": 7.0, "eval_token_accuracy": 0.25}, ["validation"])
    assert scored == {"perplexity": 7.0, "token accuracy": 25.0}
