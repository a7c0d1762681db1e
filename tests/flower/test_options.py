"""Options of a deployment: what is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from hf_coefsfl.flower.options import read_run_config
from hf_coefsfl.flower.server import serve
from hf_coefsfl.flower.wire import header_of
from tests.support.deployed import LocalGrid, Site
from tests.support.federated import same, weights


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"task": "x"}, "task='x' is not known"),
        ({"min_clients": 0}, "min_clients=0 must be a whole number of at least 1"),
        ({"round_timeout": 0}, "round_timeout=0 must be a number of seconds above 0"),
        ({"over_sampling": -0.1}, "over_sampling=-0.1 must be a share of at least 0"),
        ({"chunk_size": "x"}, "chunk_size='x' is not a valid size"),
        ({"method": "fsl_sage"}, "method='fsl_sage' cannot be deployed"),
        ({"method_kwargs": "x"}, "method_kwargs='x' must be an object in JSON"),
        ({"method": "x"}, "Unknown method 'x'"),
        ({"staleness_probe": 1}, "staleness_probe=1 cannot be deployed: it needs both sides in one process"),
        ({"client_dropout_rate": 0.5}, "real clients drop out by themselves"),
        ({"stacked_clients": 2, "method": "coef_w"}, "each client trains on a machine of its own"),
        ({"hub_token": "hf_x"}, "would go to every client"),
        ({"strange": 1}, "there is no option 'strange'"),
        ({"num_round": 1}, "there is no option 'num_round'. Did you mean num_rounds"),
        ({"config": "file.yaml"}, "there is no option 'config'"),
        ({"num_rounds": "many"}, "--num_rounds: invalid int value: 'many'"),
        ({"report_to": "--push_to_hub"}, "report_to='--push_to_hub' has the value '--push_to_hub'"),
        ({"columns": "text=text --hub_token hf_x"}, "columns='.*' has the value '--hub_token'"),
        ({"columns": "text=text, --hub_token=hf_x"}, "columns='.*' has the value '--hub_token=hf_x'"),
        ({"metrics": "accuracy,,f1"}, "metrics='accuracy,,f1' has the value ''"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(site: Site, change: dict[str, Any], reason: str) -> None:
    config = site.run_config(**change)
    with pytest.raises(ValueError, match=reason):
        serve(LocalGrid(config, []), config)


@pytest.mark.parametrize("given", ["test -- {}", "test\n--config\n{}", "test --config={}"])
def test_a_value_names_no_file_of_options(tmp_path: Path, given: str) -> None:
    """It is refused without a look into the file."""
    file = tmp_path / "secrets.yaml"
    file.write_text("my_secret: hunter2")
    with pytest.raises(ValueError, match="each option stands by itself") as refused:
        read_run_config({"task": "newsgroups", "eval_split": given.format(file)})
    assert "my_secret" not in str(refused.value)


def test_values_of_a_run_config() -> None:
    """Each is what its option is, from any kind of TOML; lists are separated by spaces or by commas."""
    given = {"columns": "text=body label=topic", "eval-split": "test, my split", "metrics": "f1,", "use_cpu": "true"}
    read = read_run_config({"task": "newsgroups", "num_rounds": "3", "learning_rate": 1, "bf16": False} | given)
    arguments, config = read.arguments, read.config
    assert arguments.columns == ["text=body", "label=topic"]
    assert arguments.eval_split == ["test", "my split"] and arguments.metrics == ["f1"]
    assert (config.num_rounds, config.learning_rate, config.use_cpu, config.bf16) == (3, 1.0, True, False)
    assert read_run_config({"task": "mnli", "method_kwargs": '{"server_passes": 2}'}).config.method_kwargs == {
        "server_passes": 2
    }


def test_a_restart_with_other_settings_is_refused_before_clients_are_waited_for(site: Site) -> None:
    folder = site.new_folder("deployed")
    first, _ = site.deployed(num_rounds=1, output_dir=folder)
    files = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    for changes, reason in (
        ({"learning_rate": 0.5}, "checkpoint-1 is of a run with other settings.*\\n  learning_rate: 0.01, now 0.5"),
        ({"overwrite_output_dir": "true", "resume_from_checkpoint": "last"}, "overwrite_output_dir would delete"),
    ):
        config = site.run_config(num_rounds=1, output_dir=folder, **changes)
        with pytest.raises(ValueError, match=reason):
            serve(LocalGrid(config, []), config)
    assert files == {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    again, _ = site.deployed(num_rounds=1, output_dir=folder)
    assert again.already_finished and same(weights(first), weights(again))
    assert read_run_config(site.run_config(overwrite_output_dir=True)).config.resume_from_checkpoint is None


def test_a_round_that_could_change_nothing(site: Site) -> None:
    with pytest.raises(ValueError, match="A round would ask 1 of 2 clients"):
        site.deployed(participation=0.5, min_clients=2)


def test_a_learning_rate_that_warms_up(site: Site) -> None:
    """It is 0 in the first round."""
    options = {"lr_scheduler_type": "linear", "warmup_steps": 1}
    deployed, _ = site.deployed(**options)
    assert same(weights(deployed), weights(site.simulated(**options)))
    assert not [e for e in deployed.ledger.entries if "failure" in e]


def test_flower_itself_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client is blamed, nothing is averaged or saved, and the run can be started again."""
    pull, folder = LocalGrid.pull_messages, site.new_folder("deployed")

    def failing(self: LocalGrid, numbers: Any) -> Any:
        found = pull(self, numbers)
        if any(header_of(reply.content).get("round") == 1 for reply in found):
            raise ConnectionError("the SuperLink is gone")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LocalGrid, "pull_messages", failing)
        with pytest.raises(ConnectionError, match="the SuperLink is gone"):
            site.deployed(output_dir=folder)
    assert not (Path(folder) / "checkpoint-2").exists()
    trainer, _ = site.deployed(output_dir=folder)
    assert same(weights(trainer), weights(site.simulated()))


def test_nobody_comes(site: Site) -> None:
    config = site.run_config(start_timeout=1.0)
    with pytest.raises(ValueError, match="0 of at least 1 clients came within 1 s"):
        serve(LocalGrid(config, []), config)
