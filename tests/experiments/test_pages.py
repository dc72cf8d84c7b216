"""Tables of experiments that are written to pages."""

from __future__ import annotations

import argparse
import importlib

import numpy as np
import pytest
import torch

from experiments import __main__ as command
from experiments import tables_data
from experiments.markdown import publish, write_between
from subbayes.utils.checks import InputError


@pytest.mark.parametrize(
    "given",
    [
        ["sparse_phoneme", "--mode", "compile"],
        ["sparse_images", "--post", "fixed"],
        ["sparse_tabular"],
        ["tables", "--only", "bike"],
        ["cifar"],
        ["laplace_images"],
        ["adapters", "--only", "banking77"],
    ],
)
def test_settings_without_records_leave_the_page_as_it_is(given, tmp_path, capsys, monkeypatch):
    if given[0] == "adapters":
        pytest.importorskip("peft")
        adapters = importlib.import_module("experiments.adapters")
        monkeypatch.setattr(adapters, "corpus_of", lambda _: None)
        monkeypatch.setattr(adapters, "rows_of", lambda *_: argparse.Namespace(name="banking77"))
    few = tables_data.Rows(np.ones((9, 1)), np.ones(9), np.ones((2, 1)), np.ones(2))
    monkeypatch.setattr("experiments.tables.rows_of", lambda *_: few)
    page, name = tmp_path / "page.md", given[0] + "_post" * ("--post" in given)
    before = f"<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n"
    page.write_text(before)
    threads = torch.get_num_threads()
    given = [*given, "--recorded", "--json", "--results", str(tmp_path), "--write", str(page)]
    try:
        assert command.main(given) == 2
    finally:
        torch.set_num_threads(threads)
    assert page.read_text() == before
    said = capsys.readouterr().err
    assert said.startswith("error: write: expected records of ")
    options = [f"{key[2:]}=" for key in given[1::2] if key in ("--mode", "--post")]
    assert all(option in said for option in options)


def test_tables_are_printed_and_written_to_the_page(tmp_path):
    page, said = tmp_path / "page.md", []
    page.write_text("<!-- a: begin -->\nold\n<!-- a: end -->\n")
    publish("text", "a", argparse.Namespace(write=None), said.append)
    assert "old" in page.read_text()
    publish("text", "a", argparse.Namespace(write=str(page)), said.append)
    assert page.read_text() == "<!-- a: begin -->\n\ntext\n\n<!-- a: end -->\n"
    assert said == ["text"] * 2


def test_a_page_without_marks_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("nothing here")
    with pytest.raises(InputError, match="page: expected the marks"):
        write_between(tmp_path / "page.md", "uci_small", "text")
