"""The metrics: worked out by hand, against brute force, on real questions, and loaded without a network."""

import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import EvalPrediction

from hf_coefsfl.tasks.metrics import METRICS, classification_metrics, load_metric
from hf_coefsfl.tasks.metrics.squad_v2.squad_v2 import best_threshold, exact_match, normalize_answer, token_f1
from tests.support.paths import LIGHT, ROOT
from tests.support.real import real

# Several processes load all metrics at the same moment into an empty cache; whoever asks for the network is caught,
# even where the error is swallowed.
LOADED_AT_ONCE = """
import multiprocessing, socket, sys
from hf_coefsfl.tasks.metrics import METRICS, load_metric

asked = []
def refuse(*args, **kwargs):
    asked.append(args)
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refuse

def load_all(barrier):
    barrier.wait(30)
    names = [load_metric(name).name for name in METRICS]
    accuracy = load_metric("accuracy").compute(predictions=[0, 1], references=[0, 0])
    sys.exit(asked != [] or len(names) < 6 or names != list(METRICS) or accuracy != {"accuracy": 0.5})

fork = multiprocessing.get_context("fork")
barrier = fork.Barrier(3)
workers = [fork.Process(target=load_all, args=(barrier,)) for _ in range(3)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join(60)
print([worker.exitcode for worker in workers])
"""


def predicted(name, text, probability=0.0):
    return {"id": name, "prediction_text": text, "no_answer_probability": probability}


def asked(name, *answers):
    return {"id": name, "answers": {"text": list(answers), "answer_start": [0] * len(answers)}}


def squad(predictions, references, **kwargs):
    return load_metric("squad_v2").compute(predictions=predictions, references=references, **kwargs)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_metrics_load_at_once_and_without_network(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": LIGHT, "HF_HUB_OFFLINE": "0"}
    for name in ("HF_MODULES_CACHE", "HF_EVALUATE_CACHE", "HF_METRICS_CACHE"):
        environment.pop(name, None)
    run = subprocess.run([sys.executable, "-c", LOADED_AT_ONCE], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "[0, 0, 0]", run.stderr
    assert list(tmp_path.rglob("squad_v2.py"))  # the cache was this one, and it was empty


def test_unknown_metric_names_the_known(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"no metric 'acuracy' here, .*Did you mean accuracy\? Use one of accuracy"):
        load_metric("acuracy")


def test_a_folder_is_a_metric(tmp_path):
    script = (ROOT / "hf_coefsfl/tasks/metrics/accuracy/accuracy.py").read_text()
    (tmp_path / "hits").mkdir()
    (tmp_path / "hits" / "hits.py").write_text(script.replace('"accuracy"', '"hits"'))
    metric = classification_metrics(["accuracy", str(tmp_path / "hits")])
    assert metric(EvalPrediction(np.array([1, 0]), np.array([1, 1]))) == {"accuracy": 0.5, "hits": 0.5}


def test_accuracy():
    metric = load_metric("accuracy")
    assert metric.compute(predictions=[2, 0, 1, 1], references=[2, 1, 1, 0]) == {"accuracy": 0.5}
    # nothing is ignored: a label of -1 or -100 is a wrong answer
    assert metric.compute(predictions=np.array([0, 1, 2, 0]), references=np.array([-1, 1, -100, 2])) == {
        "accuracy": 0.25
    }
    metric.add_batch(predictions=[1, 1], references=[1, 0])
    metric.add_batch(predictions=[2], references=[2])
    assert metric.compute() == {"accuracy": pytest.approx(2 / 3)}
    with pytest.raises(ValueError, match="Mismatch in the number"):
        load_metric("accuracy").compute(predictions=[1], references=[1, 0])
    with pytest.raises(ValueError, match="Got no predictions"):
        load_metric("accuracy").compute(predictions=[], references=[])


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat,\tsat!", "cat sat"),
        ("An apple a day", "apple day"),
        ("theory of a-n", "theory of"),  # punctuation goes first: "a-n" is the article "an" then
        ("U.S.A.", "usa"),
        ("the, a. An?", ""),
        ("Éire’s", "éire’s"),  # only ASCII punctuation goes
    ],
)
def test_normalisation(text, normal):
    assert normalize_answer(text) == normal


def test_scores_of_two_texts():
    assert exact_match("The Normans", "normans.") == 1
    assert exact_match("Normans", "Norman") == 0
    # {red, red, cat} and {red, cat, sat}: two in common, precision 2/3 and recall 2/3
    assert token_f1("red red cat", "the red cat sat") == pytest.approx(2 / 3)
    assert token_f1("in the year 1066", "1066") == pytest.approx(2 * 1 * (1 / 3) / (1 + 1 / 3))
    assert token_f1("cat", "dog") == 0
    assert [token_f1("", ""), token_f1("", "cat"), token_f1("cat", ""), token_f1("", "the")] == [1, 0, 0, 1]


def test_several_answers_and_none():
    found = squad(
        [
            predicted("one", "big red dog"),
            predicted("two", "Paris"),
            predicted("three", ""),
            predicted("four", "a guess"),
        ],
        # "the" says nothing and is left out, or answering "" would be right
        [asked("one", "dog", "red dog", "the"), asked("two", "London", "paris!"), asked("three"), asked("four")],
    )
    best_f1 = 2 * 1 * (2 / 3) / (1 + 2 / 3)  # of "one", with "red dog"
    assert found == {
        "exact": 50.0,
        "f1": pytest.approx(100 * (best_f1 + 1 + 1 + 0) / 4),
        "total": 4,
        "HasAns_exact": 50.0,
        "HasAns_f1": pytest.approx(100 * (best_f1 + 1) / 2),
        "HasAns_total": 2,
        "NoAns_exact": 50.0,
        "NoAns_f1": 50.0,
        "NoAns_total": 2,
        # from 2 right with nothing answered: "one" adds 0 or 0.8, "two" 1, "three" 0, and "four" costs 1
        "best_exact": 75.0,
        "best_exact_thresh": 0.0,
        "best_f1": pytest.approx(100 * (2 + best_f1 + 1) / 4),
        "best_f1_thresh": 0.0,
    }


def test_keys_of_questions_that_are_not_there():
    only_answerable = squad([predicted("one", "x")], [asked("one", "x")])
    assert not any(name.startswith("NoAns") for name in only_answerable) and only_answerable["HasAns_total"] == 1
    unanswerable = squad([predicted("one", "x")], [asked("one")])
    assert not any(name.startswith("HasAns") for name in unanswerable) and unanswerable["NoAns_exact"] == 0


def test_an_answer_that_says_nothing_counts_as_answerable():
    # As in the authors' script: it has an answer, yet only "" matches it.
    found = squad([predicted("one", "")], [asked("one", "the")])
    assert (found["HasAns_exact"], found["HasAns_total"]) == (100.0, 1)
    assert squad([predicted("one", "", 0.9)], [asked("one", "the")], no_answer_threshold=0.5)["exact"] == 0


def test_threshold():
    predictions = [predicted("one", "cat", 0.2), predicted("two", "dog", 0.6), predicted("three", "cow", 0.7)]
    references = [asked("one", "cat"), asked("two", "dog"), asked("three")]
    exact = {t: squad(predictions, references, no_answer_threshold=t)["exact"] for t in (1.0, 0.7, 0.65, 0.6, 0.5, 0.1)}
    # above the threshold a question is left unanswered; at it, it is not
    assert exact == pytest.approx({1.0: 200 / 3, 0.7: 200 / 3, 0.65: 100, 0.6: 100, 0.5: 200 / 3, 0.1: 100 / 3})
    found = squad(predictions, references)
    assert (found["best_exact"], found["best_exact_thresh"]) == (100, 0.6)
    # the order of the questions does not matter where their probabilities differ
    assert squad(predictions[::-1], references[1:] + references[:1]) == found


def test_best_threshold_when_nothing_should_be_answered():
    found = squad([predicted("one", "cat", 0.3), predicted("two", "dog", 0.1)], [asked("one", "cow"), asked("two")])
    assert (found["best_exact"], found["best_exact_thresh"]) == (50, 0.0)


def test_questions_of_equal_probability_are_taken_in_order():
    score, has, gave = np.array([1.0, 0.0]), np.array([True, False]), np.array([True, True])
    tied = np.array([0.4, 0.4])
    assert best_threshold(score, tied, has, gave) == (100, 0.4)  # after the first: 1 + 1
    assert best_threshold(score[::-1], tied, has[::-1], gave) == (50, 0.0)  # 1, then 0, then 1 again


@given(
    st.lists(
        st.tuples(st.floats(0.001, 1), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans(), st.booleans()),
        min_size=1,
        max_size=12,
        unique_by=lambda question: question[0],
    )
)
def test_best_threshold_against_every_threshold(questions):
    def total(threshold):
        right = 0.0
        for probability, score, answerable, answered in questions:
            if probability > threshold:
                right += not answerable
            else:
                right += score if answerable else not answered
        return right

    columns = [np.array(column) for column in zip(*questions, strict=True)]
    probability, score, answerable, answered = columns
    best, threshold = best_threshold(score, probability, answerable, answered)
    assert best == pytest.approx(100 * max(total(t) for t in [0.0, *probability]) / len(questions))
    assert best == pytest.approx(100 * total(threshold) / len(questions))


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ([predicted("x", "")], [asked("y")], "1 of 1 references have no prediction, for instance 'y'"),
        ([predicted("x", "")] * 2, [asked("x"), asked("y")], "predictions have 1 ids more than once, for instance 'x'"),
        (
            [predicted("x", ""), predicted("y", "")],
            [asked("y")] * 2,
            "references have 1 ids more than once, for instance 'y'",
        ),
        ([], [], "Got no questions"),
    ],
)
def test_questions_that_do_not_match_are_refused(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        squad(predictions, references)


@pytest.mark.slow
def test_real_questions():
    rows = parquet.read_table(real("data/squad_v2_half_dev") + "/validation.parquet").to_pylist()
    references = [{"id": row["id"], "answers": row["answers"]} for row in rows]
    texts = {row["id"]: row["answers"]["text"] for row in rows}
    bare = sum(not answers for answers in texts.values())
    assert 0 < bare < len(rows) and len(rows) > 1000
    right = squad([predicted(name, (answers or [""])[0]) for name, answers in texts.items()], references)
    assert {right[name] for name in ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1")} == {100.0}
    assert (right["total"], right["NoAns_total"]) == (len(rows), bare)
    # One annotator's answer is a full stop, which says nothing and so is no gold answer.
    mute = sum(bool(answers) and not normalize_answer(answers[-1]) for answers in texts.values())
    last = squad([predicted(name, (answers or [""])[-1]) for name, answers in texts.items()], references)
    assert mute == 1 and last["exact"] == pytest.approx(100 * (len(rows) - mute) / len(rows))
    silent = squad([predicted(name, "", 1.0) for name in texts], references)
    assert silent["exact"] == silent["f1"] == silent["best_exact"] == pytest.approx(100 * bare / len(rows))
    assert (silent["HasAns_exact"], silent["NoAns_exact"]) == (0.0, 100.0)


def test_every_metric_has_the_name_of_its_folder():
    assert METRICS == ("accuracy", "f1", "matthews_correlation", "precision", "recall", "rouge", "squad_v2")
    assert [load_metric(name).name for name in METRICS] == list(METRICS)
