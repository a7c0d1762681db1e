"""What a site allows is decided at the site, before any data is read."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, RecordDict

from hf_coefsfl.flower import client_node
from hf_coefsfl.flower.client_round import ClientRound
from hf_coefsfl.flower.errors import ClientFailure, Code
from hf_coefsfl.flower.options import read_client_config
from hf_coefsfl.flower.policy import VARIABLE, Policy
from hf_coefsfl.flower.wire import PROTOCOL, content, header_of
from hf_coefsfl.tasks import TASKS
from tests.support.deployed import Site, ask
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_COEFSFL_WORK", str(tmp_path))


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if data is touched."""

    def touched(*_: Any) -> None:
        pytest.fail("data was read")

    monkeypatch.setattr(client_node.ClientNode, "_prepare_data", touched)


def written(tmp_path: Path, **terms: Any) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(terms))
    return str(path)


def hello(site: Site, run: dict[str, Any], **node: Any) -> Any:
    """Return what a client says of itself, or the code of its refusal."""
    site.make_half()
    context = Context(1, 1, site.node_config(0) | node, RecordDict(), site.run_config(**run))
    reply = ask("query.hello", content({"protocol": PROTOCOL}), context)
    return reply.error.code if reply.has_error() else header_of(reply.content)["num_samples"]


@pytest.mark.parametrize(
    ("terms", "run", "reason"),
    [
        ({"tasks": ["cifar100", "mnli"]}, {}, "the task is newsgroups. `tasks` allows cifar100, mnli"),
        ({}, {"task": "causal_lm"}, "the task is causal_lm. Its labels are the text itself"),
        ({"min_noise": 0.2}, {"smashed_noise": 0.1}, "smashed_noise is 0.1, min_noise 0.2"),
        ({"max_rounds": 5}, {"num_rounds": 6}, "the run has 6 rounds, max_rounds is 5"),
        ({"min_blocks": 2}, {}, "the client half has 1 blocks, min_blocks is 2"),
        ({}, {"train_split": "holdout"}, "train_split is 'holdout', the policy's 'train'"),
        ({}, {"columns": "label=patient"}, "the run takes the column 'patient' as 'label'"),
        ({}, {"columns": "text=patient"}, "the run takes the column 'patient' as 'text'"),
        (
            {"columns": {"text": "text", "label": "label"}},
            {"columns": "label=patient"},
            "the run takes the column 'patient' as 'label'",
        ),
        ({"columns": {"text": "text"}}, {}, "names no column for the role 'label'"),
        ({"columns": {"text": "text", "lable": "label"}}, {}, "the role 'lable'.*Did you mean label"),
    ],
)
def test_a_run_is_refused(
    site: Site,
    no_data: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    terms: dict[str, Any],
    run: dict[str, Any],
    reason: str,
) -> None:
    assert hello(site, run, policy=written(tmp_path, **terms)) == Code.POLICY.value[0]
    assert [r for r in caplog.records if r.exc_info] and re.search(reason, caplog.text)


def test_a_run_is_allowed(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's own columns are read, whether the run names them or none; the environment may name the file, too."""
    rows = [{"note": row["text"], "topic": row["label"], "text": "x", "label": 7} for row in (site.row(0, 0),)]
    site.save(rows, site.folder / "notes/train.parquet")
    terms = {"tasks": ["newsgroups"], "columns": {"text": "note", "label": "topic"}, "min_noise": 0.1, "max_rounds": 2}
    path, data = written(tmp_path, **terms), str(site.folder / "notes")
    assert hello(site, {"smashed_noise": 0.1}, policy=path, dataset=data) == 1
    monkeypatch.setenv(VARIABLE, path)
    assert hello(site, {"smashed_noise": 0.1, "columns": "text=note"}, dataset=data) == 1
    assert hello(site, {"smashed_noise": 0.0}, dataset=data) == Code.POLICY.value[0]


def test_a_column_that_no_role_was_given_is_not_read(site: Site, tmp_path: Path) -> None:
    """An optional role that the policy does not name stays out, though the data has its column."""
    rows = [site.row(0, i) | {"text_pair": "far far far"} for i in range(2)]
    site.save(rows, site.folder / "pairs/train.parquet")
    node = site.node_config(0) | {"dataset": str(site.folder / "pairs")}
    run = site.run_config(task="text_classification")
    site.make_half()
    lengths = []
    for terms in ({}, {"columns": {"text": "text", "label": "label"}}):
        made = client_node.ClientNode(run, node | {"policy": written(tmp_path, **terms)})
        lengths.append(len(made.data.federation.dataset(0)[0]["input_ids"]))
    assert lengths[1] < lengths[0]


def test_names_are_not_classes(site: Site, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Even a policy that names the wrong column sends no names: they must be classes of the model."""
    rows = [site.row(0, i) | {"patient": name} for i, name in enumerate(("Ada Example", "Bob Example"))]
    site.save(rows, site.folder / "named/train.parquet")
    path = written(tmp_path, columns={"text": "text", "label": "patient"})
    assert hello(site, {}, policy=path, dataset=str(site.folder / "named")) == Code.DATA.value[0]
    assert "'Ada Example'" in caplog.text  # in the log of the client


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("min_nose: 1", "has the term 'min_nose'. Did you mean min_noise"),
        ("tasks: mnli", "tasks='mnli' must be a list of tasks"),
        ("tasks: [mnly]", "tasks: 'mnly' is not known. Did you mean mnli"),
        ("columns: [text]", "must map roles to columns"),
        ("columns: {text: 1}", "must map roles to columns"),
        ("min_noise: .nan", "min_noise=nan must be a finite number"),
        ("max_rounds: 0", "max_rounds=0 must be a whole number of at least 1"),
        ("train_split: 3", "train_split=3 must be the name of a split"),
        ("- a", "must hold terms and their values, got list"),
        ("", "must hold terms and their values, got NoneType"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_policy_that_is_wrong_is_not_none(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        Policy.of({"policy": str(path)})


def test_a_policy_that_is_missing_is_not_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Policy.of({"policy": str(tmp_path / "policy.yaml")})


def test_what_a_client_takes_from_a_run(tmp_path: Path) -> None:
    """How it trains. No path, no code, no label, no upload; not even options that are wrong, which are the server's."""
    harmful = {
        "metrics": str(tmp_path), "label_names": "input_ids", "model_name_or_path": "/m", "dataset_name": "/d",
        "client_half": "/h", "accelerator_config": str(tmp_path / "x.json"), "output_dir": "/o", "push_to_hub": True,
        "deepspeed": "/x.json", "hub_token": "hf_x", "partition_column": "patient", "strange": 1, "eval_split": "-x",
        "model_revision": "other",
    }  # fmt: skip
    plain, given = {"task": "mnli", "num_rounds": 3}, read_client_config
    for own in (True, False):
        read, bare = given(plain | {k: v for k, v in harmful.items() if own}, own), given(plain, own)
        assert read.arguments == bare.arguments and read.client_half is None
        assert read.config.to_dict() == bare.config.to_dict()
    assert read.config.num_rounds == 3
    part = given(plain | {"dataset_name": "/d", "client_half": "/h"}, False)
    assert (part.arguments.dataset_name, part.client_half) == ("/d", "/h")


def test_only_language_modelling_sends_its_text() -> None:
    assert [name for name, task in TASKS.items() if task.labels_are_text] == ["causal_lm"]


def test_a_node_without_data(site: Site) -> None:
    """It does not take what the run names, unless it is a node of Flower's simulation engine."""
    everything = {"dataset_name": str(site.folder / "all"), "client_half": str(site.folder / "half/client")}
    assert hello(site, everything, dataset="") == Code.SETUP.value[0]
    site.make_half()
    assert hello(site, everything | {"seed": 1}, **{"dataset": "", "client-half": "", "num-partitions": 2}) == 6


def test_rounds_and_uploads_are_counted_against_the_policy(site: Site, tmp_path: Path) -> None:
    site.make_half()
    config = site.node_config(0) | {"policy": written(tmp_path, max_rounds=3, max_uploads=1)}
    header = {"client": 0, "round": 0, "sequence": 0, "token": "t", "learning_rate": 0.1, "memory_limit": 0}
    lasting = ClientRound(client_node.ClientNode(site.run_config(), config), tmp_path, header).node.lasting
    for index in range(3):
        lasting.count("run", index, [0, 1])
    for index, reason in ((2, "1 times, the most that it may"), (3, "in 3 rounds, the most that it may")):
        with pytest.raises(ClientFailure, match=reason) as refused:
            lasting.count("run", index, [0, 1])
        assert refused.value.code is Code.POLICY


def test_noise_goes_without_augmentation() -> None:
    """Each change of an image would have a draw of its own, which average out."""
    run = read_client_config({"task": "cifar100", "smashed_noise": 0.2, "augment": True}, True)
    Policy().check_run(run, True)
    with pytest.raises(ClientFailure, match="another draw of the noise"):
        Policy(min_noise=0.2).check_run(run, True)


def test_a_half_that_sends_inputs(site: Site, no_data: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The description of a half says which inputs cross as they are: it may not be the text."""
    site.make_half()
    shutil.copytree(site.folder / "half/client", tmp_path / "half")
    description = json.loads((tmp_path / "half/split.json").read_text())
    description["cut"]["crossing"] = ["input_ids"]
    (tmp_path / "half/split.json").write_text(json.dumps(description))
    assert hello(site, {}, **{"client-half": str(tmp_path / "half")}) == Code.POLICY.value[0]
    assert "the client half would send input_ids as they are" in caplog.text


def test_the_example_is_a_policy(site: Site) -> None:
    """It allows the example run; the page shows it, and every term."""
    path = ROOT / "recipes/flower/policy.yaml"
    policy = Policy.of({"policy": str(path)})
    with (ROOT / "recipes/flower/example.toml").open() as file:
        pairs = [line.split("#")[0].split(" = ", 1) for line in file if " = " in line]
    run = {name: value.strip().strip('"') for name, value in pairs}
    policy.check_run(read_client_config(run, True), True)
    page = (ROOT / "docs/deployment.md").read_text()
    assert path.read_text() in page
    assert all(f"| `{f.name}` |" in page for f in dataclasses.fields(Policy))
