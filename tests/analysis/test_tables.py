from hf_coefsfl.analysis.tables import format_table

ROWS = [
    {"method": "vanilla", "accuracy": 0.9123, "MiB": 10.0, "transfers": 1364},
    {"method": "coef_j", "accuracy": 0.875, "MiB": 115.25, "transfers": None},
]
COLUMNS = {"method": "", "accuracy": ".1%", "MiB": ".1f", "transfers": ""}


def test_text_table_is_aligned_with_numbers_to_the_right():
    assert format_table(ROWS, COLUMNS).splitlines() == [
        "method  | accuracy |   MiB | transfers",
        "--------+----------+-------+----------",
        "vanilla |    91.2% |  10.0 |      1364",
        "coef_j  |    87.5% | 115.2 |",
    ]


def test_markdown_table_marks_the_alignment_and_escapes_bars():
    rows = [{"run": "a|b", "n": 1}, {"run": "c", "n": 22}]
    assert format_table(rows, markdown=True).splitlines() == [
        "| run  |   n |",
        "| ---- | --: |",
        "| a\\|b |   1 |",
        "| c    |  22 |",
    ]


def test_columns_choose_and_order_the_entries_and_default_to_all_of_any_row():
    rows = [{"a": 1}, {"b": "x"}]
    assert format_table(rows, ["b", "a"]).splitlines()[0] == "b | a"
    assert format_table(rows).splitlines() == ["a | b", "--+--", "1 |", "  | x"]


def test_table_without_rows_is_its_header():
    assert format_table([], ["method", "MiB"]).splitlines()[0] == "method | MiB"
