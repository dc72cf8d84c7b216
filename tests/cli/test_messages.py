"""Messages of the command line, without a fit."""

import re

import pytest
import typer

from subbayes import InputError
from subbayes.cli import evaluate, run
from subbayes.cli.console import ROWS_BEFORE, describe_error, naming_table, report_error

ERROR = InputError("X", "finite numbers in column 'a'", "1 infinite value", "Drop", row=1)


def described(path, before=0):
    with naming_table(path):
        token = ROWS_BEFORE.set(before)
        try:
            return describe_error(ERROR)
        finally:
            ROWS_BEFORE.reset(token)


@pytest.mark.parametrize(
    ("name", "text", "before", "place"),
    [
        ("t.csv", "a\n1\ninf\n", 0, " (first in row 1, line 3 of the file)"),
        ("t.tsv", "a\n1\n2\ninf\n", 1, " (first in row 2, line 4 of the file)"),
        ("t.csv", 'a\n"one\ntwo"\ninf\n', 0, " (first in row 1, counted from 0)"),
        ("t.csv", "a\n1\n\ninf\n", 0, " (first in row 1, counted from 0)"),
        ("t.csv.gz", "", 0, " (first in row 1, counted from 0)"),
        ("missing.csv", None, 0, " (first in row 1, counted from 0)"),
        ("t.csv", "a\n1\ninf\n", None, ""),
    ],
)
def test_rows_have_the_line_of_the_file_where_it_is_certain(tmp_path, name, text, before, place):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    expected = f"{path}: expected finite numbers in column 'a', got 1 infinite value{place}. Drop."
    assert described(path, before) == expected


def test_wrong_choices_point_at_the_help(capsys):
    error = typer.BadParameter("'pcaa' is not one of 'pca', 'random'.", param_hint=["--method"])
    assert report_error(error) == 2
    printed = capsys.readouterr().err
    assert "--method" in printed
    assert "'pca', 'random'" in printed
    assert printed.endswith("See 'subbayes --help'.\n")


@pytest.mark.parametrize(("areas", "noted"), [((0.3, 0.4), True), ((0.3, 0.6), False)])
def test_evaluate_says_where_detection_is_worse_than_chance(monkeypatch, capsys, areas, noted):
    class Model:
        def evaluate(self, frame, level, **_):
            return {"accuracy": 1.0}

        def out_of_distribution(self, frame, others, **_):
            names = ("entropy", "mutual_information")
            return {name: {"auroc": area} for name, area in zip(names, areas, strict=True)}

    monkeypatch.setattr(evaluate, "load_table_model", lambda _: Model())
    monkeypatch.setattr(evaluate, "read_rows", lambda *_, **__: [1, 2])
    assert run(["evaluate", "m", "a.csv", "--ood", "b.csv", "-q"]) == 0
    said = "note: every AUROC is below 0.5: the rows of b.csv are predicted with less uncertainty"
    assert (said in capsys.readouterr().err) == noted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank = 3", "rank: expected one of the .* that TableSettings lists, got 'rank'"),
        ("epochs = 3", r"epochs: .* Did you mean 'training.epochs'\?"),
        ("[training]\nepoch = 3", r"training.epoch: .* Did you mean 'epochs'"),
        ("[training]\nepochs = -3", r"epochs: expected"),
        *(
            (f"[sampling]\ninitial = {value}", r"initial: expected 'prior'")
            for value in ("[[1,2],[3]]", '[["a"]]', '[["a",1]]', "[{}]", "[1979-05-27]", "[1, 2]")
        ),
    ],
)
def test_settings_of_a_file_are_not_reported_as_options(tmp_path, capsys, text, expected):
    (tmp_path / "s.toml").write_text(text)
    (tmp_path / "t.csv").write_text("x,y\n1,2\n2,3\n3,4.5\n")
    words = ["fit", tmp_path / "t.csv", "--target", "y", "--config", tmp_path / "s.toml"]
    assert run([*map(str, words), "--out", str(tmp_path / "out")]) == 2
    assert re.match(f"subbayes: error: {expected}", capsys.readouterr().err)
