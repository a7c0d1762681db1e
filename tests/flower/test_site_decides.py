"""Over Flower's own processes: a run brings other code and pries, and the sites decide."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.loopback import APP
from tests.support.deployed import LONG, Site
from tests.support.network import hurried

HOSTILE = """
from pathlib import Path
Path({mark!r}).write_text("the server's code ran here")
from hf_coefsfl.flower import client_app as app
__all__ = ["app"]
"""


@pytest.mark.slow
def test_a_run_that_pries(tmp_path: Path) -> None:
    """The run's code is not run at the nodes. One site allows the run, the other refuses it in fixed words."""
    site = Site(tmp_path / "site")
    site.make_half()
    app, mark = tmp_path / "app", tmp_path / "mark"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    (app / "client_app.py").write_text(HOSTILE.format(mark=str(mark)))
    for client, terms in enumerate(("max_rounds: 10", "min_noise: 0.5")):
        (tmp_path / f"{client}.yaml").write_text(terms)
    with hurried(tmp_path / "flower") as flower:
        for client in range(2):
            flower.start_node(site.node_config(client) | {"policy": str(tmp_path / f"{client}.yaml")})
        said = flower.run(site.run_config(num_rounds=1), LONG, app)
        log = flower.log("node1")
        audits = list((tmp_path / "flower/work").rglob("client-*/audit.jsonl"))
    assert "ServerApp finished running" in said, said
    assert not mark.exists()
    assert "E02: the client's policy refuses this run" in said and "min_noise" not in said
    assert "smashed_noise is 0.0, min_noise 0.5" in log
    lines = {path.parent.name[:8]: list(map(json.loads, path.read_text().splitlines())) for path in audits}
    assert [line["kind"] for line in lines["client-0"]] == ["query.hello", "train.step", "train.step"]
    assert {(line["kind"], line["error"]) for line in lines["client-1"]} == {("query.hello", 102)}
