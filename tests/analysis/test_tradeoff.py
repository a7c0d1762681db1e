"""The Pareto front and its picture."""

from pathlib import Path

from hf_coefsfl.analysis.tradeoff import Point, pareto_front, plot_tradeoff

FLOAT32, INT4 = Point("float32", 100.0, 76.0, 1.0), Point("int4", 13.0, 75.0, 0.5)
INT3, INT2 = Point("int3", 10.0, 75.5), Point("int2", 7.0, 70.0)


def test_the_front_has_what_no_other_point_beats_with_as_few_bytes() -> None:
    assert pareto_front([FLOAT32, INT4, INT3, INT2]) == [INT2, INT3, FLOAT32]
    assert pareto_front([FLOAT32, INT4, INT3, INT2], higher=False) == [INT2]


def test_a_few_scalars_more_do_not_make_a_point_dearer() -> None:
    better = Point("int3", 10.05, 76.0)
    assert pareto_front([INT3, better]) == [better]
    assert pareto_front([INT3, better._replace(mib=10.2)]) == [INT3, better._replace(mib=10.2)]


def test_equal_scores_belong_to_the_fewest_bytes() -> None:
    assert pareto_front([INT3, INT3._replace(mib=20.0)]) == [INT3]
    draw = INT3._replace(mib=10.05)
    assert pareto_front([draw, INT3]) == [INT3, draw]


def test_the_picture_has_a_panel_for_each_place(tmp_path: Path) -> None:
    lines = {"Vanilla SFL": [FLOAT32, INT4], "CoeF-P": [FLOAT32, INT4, INT3, INT2]}
    panels = {"SICK, IID": lines, "SICK, non-IID": lines, "topics": {"CoeF-P": [FLOAT32, INT3]}}
    figure = plot_tradeoff(panels, tmp_path / "codecs.png", lower_is_better=["topics"], title="codecs")
    assert (tmp_path / "codecs.png").stat().st_size > 10_000
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == list(panels)
    assert {axes.get_xscale() for axes in shown} == {"log"}
    named = [[text.get_text() for text in axes.texts] for axes in shown]
    front = ["int2", "int3", "float32"]  # of two methods with the same float32, which is named once
    assert named == [front, front, ["int3"]]
    legends = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    assert legends == [["Vanilla SFL", "CoeF-P", "Pareto front"], ["float32", "int4", "int3", "int2"]]
