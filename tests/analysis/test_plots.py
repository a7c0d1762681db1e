import struct
import sys

import pytest

from hf_coefsfl.analysis.plots import accuracy_curve, plot_partition, plot_runs
from hf_coefsfl.federation.partition import dirichlet, iid
from tests.support.partitions import LABELS

# What a run of four rounds logs: its traffic after each round, an evaluation every second round.
HISTORY = [
    {"step": 0, "eval_accuracy": 0.1},
    {"step": 1, "loss": 2.0, "bytes_up": 2**20, "bytes_down": 2**19},
    {"step": 2, "loss": 1.5, "bytes_up": 2**20, "bytes_down": 2**19},
    {"step": 2, "eval_accuracy": 0.4, "eval_loss": 1.0},
    {"step": 3, "loss": 1.2, "bytes_up": 2**20, "bytes_down": 0},
    {"step": 4, "loss": 1.1, "bytes_up": 0, "bytes_down": 2**20},
    {"step": 4, "eval_accuracy": 0.6, "eval_loss": 0.8},
    {"step": 4, "train_runtime": 3.0},
]


def test_curve_adds_up_the_traffic_of_all_rounds_before_an_evaluation():
    assert accuracy_curve(HISTORY) == [(0, 0.0, 0.1), (2, 3.0, 0.4), (4, 5.0, 0.6)]
    assert accuracy_curve(HISTORY, "eval_loss") == [(2, 3.0, 1.0), (4, 5.0, 0.8)]


def test_curve_takes_the_last_of_two_evaluations_of_a_round():
    assert accuracy_curve([*HISTORY, {"step": 4, "eval_accuracy": 0.7}])[-1] == (4, 5.0, 0.7)


def test_curve_names_the_metrics_there_are():
    with pytest.raises(ValueError, match=r"no 'eval_f1'.*eval_accuracy, eval_loss"):
        accuracy_curve(HISTORY, "eval_f1")
    with pytest.raises(ValueError, match="no evaluation at all"):
        accuracy_curve([{"step": 1, "loss": 1.0}])


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is drawn, to look at what is on it."""
    from matplotlib import figure

    drawn = []

    class ClientState(figure.Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            drawn.append(self)

    monkeypatch.setattr(figure, "Figure", ClientState)
    return drawn


def test_plot_shows_each_run_in_both_panels(tmp_path, figures):
    cheap = [(0, 0.0, 0.1), (2, 2.0, 0.5), (4, 4.0, 0.8)]
    dear = [(0, 0.0, 0.1), (2, 3.0, 0.6), (4, 6.0, 0.9)]
    path = tmp_path / "runs.png"
    plot_runs({"reuse": cheap, "vanilla": dear}, path, metric="test accuracy")
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])  # of the PNG header
    assert data.startswith(b"\x89PNG") and width > 1000 and height > 400 and len(data) > 20_000
    over_rounds, over_mib = figures[0].axes
    assert [list(line.get_xdata()) for line in over_rounds.lines] == [[0, 2, 4], [0, 2, 4]]
    assert [list(line.get_xdata()) for line in over_mib.lines] == [[0, 2, 4], [0, 3, 6]]
    assert [list(line.get_ydata()) for line in over_mib.lines] == [[0.1, 0.5, 0.8], [0.1, 0.6, 0.9]]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["reuse", "vanilla"]
    assert over_rounds.get_ylabel() == "test accuracy"
    assert over_mib.get_xscale() == "linear"
    assert len({line.get_color() for line in over_rounds.lines}) == 2


def test_plot_uses_a_logarithmic_axis_where_totals_lie_far_apart(tmp_path, figures):
    plot_runs({"a": [(0, 0.0, 1.5), (1, 1.0, 2.0)], "b": [(0, 0.0, 1.5), (1, 40.0, 3.0)]}, tmp_path / "runs.png")
    over_rounds, over_mib = figures[0].axes
    assert over_mib.get_xscale() == "log"
    assert [list(line.get_xdata()) for line in over_mib.lines] == [[1.0], [40.0]]  # 0 MiB has no place there
    assert [list(line.get_xdata()) for line in over_rounds.lines] == [[0, 1], [0, 1]]


def test_plot_shows_the_servers_work_where_it_is_known(tmp_path, figures):
    curve = [(0, 0.0, 0.1), (2, 2.0, 0.5)]
    work = {"vanilla": [0.0, 70.0], "reuse": [0.0, 9.0]}
    plot_runs({"reuse": curve, "old": curve, "vanilla": curve}, tmp_path / "runs.png", server_gflops=work)
    over_rounds, over_mib, over_work = figures[0].axes
    assert [list(line.get_xdata()) for line in over_work.lines] == [[9.0], [70.0]] and len(over_mib.lines) == 3
    assert [line.get_color() for line in over_work.lines] == [over_rounds.lines[i].get_color() for i in (0, 2)]
    assert [axes.get_xscale() for axes in figures[0].axes] == ["linear", "linear", "log"]
    assert over_work.get_xlabel() == "GFLOPs of the server"


def test_plot_refuses_a_run_without_points(tmp_path):
    with pytest.raises(ValueError, match="coef_d"):
        plot_runs({"vanilla": [(1, 1.0, 0.5)], "coef_d": []}, tmp_path / "runs.png")
    with pytest.raises(ValueError, match="no runs"):
        plot_runs({}, tmp_path / "runs.png")


@pytest.mark.parametrize("num_clients", [1, 5, 200])
def test_plot_of_a_partition_is_saved(tmp_path, num_clients):
    path = tmp_path / "partition.png"
    names = [f"class {c}" for c in range(9)]  # one class is left without a name
    plot_partition(dirichlet(LABELS, num_clients, 0.5, 0), LABELS, path, names)
    from PIL import Image

    with Image.open(path) as image:
        assert image.width >= 900
        assert len(image.convert("RGB").getcolors(maxcolors=10**6)) > 10


def test_plot_of_a_partition_leaves_pyplot_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now raises
    plot_partition(iid(4, 2, 0), [0, 1, 0, 1], tmp_path / "partition.png")
