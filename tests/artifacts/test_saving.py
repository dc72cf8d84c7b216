"""Kinds of other packages; artifacts beside an adapter write nothing outside of its folder."""

import os
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import subbayes
from subbayes import InputError
from subbayes.artifacts import folder, saving
from subbayes.artifacts.arrays import Array
from subbayes.artifacts.facts import Positive
from subbayes.artifacts.saving import CARD_MARK, KindFacts, artifact, save
from subbayes.baselines.ensemble import WeightSamples
from subbayes.likelihoods import Gaussian


@pytest.fixture
def model() -> WeightSamples:
    network = subbayes.Network(subbayes.MLP(2, (3,), 1, seed=0))
    return WeightSamples(network, network.weights[None], Gaussian(1.0), "MAP")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


LINKS = {  # of README.md, relative to the folder of the adapter
    "to nothing": ("../outside/new.txt", None),
    "to nothing in no folder": ("../outside/new/deep/file", None),
    "to a file": ("../outside/file", "mine"),
    "to a card": ("../outside/card", f"{CARD_MARK}\nmine"),
    "to a device": (os.devnull, None),
    "to itself": ("README.md", None),
}


@pytest.mark.parametrize("case", LINKS)
def test_a_card_is_not_written_through_a_link(model, adapter, case):
    target, text = LINKS[case]
    if text is not None:
        (adapter / target).write_text(text)
    (adapter / "README.md").symlink_to(target)
    outside = adapter.parent / "outside"
    before = sorted(outside.rglob("*"))
    model.save(adapter)
    assert sorted(outside.rglob("*")) == before
    assert text is None or (adapter / target).read_text() == text
    assert os.readlink(adapter / "README.md") == target
    assert (adapter / "MODEL_CARD.md").read_text().startswith(CARD_MARK)


def test_no_card_where_both_names_are_links(model, adapter):
    for name in ("README.md", "MODEL_CARD.md"):
        (adapter / name).symlink_to("../outside/file")
    model.save(adapter)
    assert list((adapter.parent / "outside").iterdir()) == []
    assert subbayes.load(adapter).name == "MAP"


@pytest.mark.parametrize("exists", [True, False])
def test_a_subfolder_that_is_a_link_is_refused(model, adapter, exists):
    target = adapter.parent / "outside" / "folder"
    if exists:
        target.mkdir()
    (adapter / "subbayes").symlink_to(target)
    with pytest.raises(InputError, match=r"got a symbolic link at .*subbayes'. Remove the link"):
        model.save(adapter)
    assert target.exists() == exists


def test_an_adapter_behind_a_link_of_the_caller(model, adapter):
    link = adapter.parent / "link"
    link.symlink_to(adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save(link)
        model.save(link, overwrite=True)
    assert (adapter / "README.md").read_text().startswith(CARD_MARK)
    assert subbayes.load(link).name == "MAP"


# --- kinds of others ------------------------------------------------------------------------------


class ShiftedFacts(KindFacts):
    scale: Positive

    def arrays(self):
        return {"weights": Array("D")}


class Shifted:
    kind = "shifted"

    def __init__(self, weights, scale):
        self.weights, self.scale = weights, scale

    def tensors(self):
        return {"weights": self.weights}

    def facts(self):
        return ShiftedFacts(scale=self.scale)


def rebuild(tensors, facts, likelihood=None):
    return Shifted(tensors["weights"], facts.scale)


@pytest.fixture
def registered(monkeypatch):
    """The kind, which an entry point names, whose module registers it when it is loaded."""
    monkeypatch.setattr(saving, "_KINDS", dict(saving._KINDS))

    def points(group, name):
        load = SimpleNamespace(load=lambda: artifact("shifted", ShiftedFacts)(rebuild))
        return [load] if (group, name) == ("subbayes.artifact", "shifted") else []

    monkeypatch.setattr(saving, "entry_points", points)


def test_kinds_of_other_packages_are_saved_and_loaded(registered, tmp_path):
    save(Shifted(torch.arange(3.0), 2.0), tmp_path / "a")
    loaded = subbayes.load(tmp_path / "a", likelihood=Gaussian(1.0))
    assert isinstance(loaded, Shifted)
    assert (loaded.weights.tolist(), loaded.scale) == ([0.0, 1.0, 2.0], 2.0)
    with pytest.raises(InputError, match="data: expected nothing, because a shifted does not"):
        subbayes.load(tmp_path / "a", data=(1, 2))
    for wrong in (Shifted(torch.arange(3.0), -2.0), Shifted(torch.zeros(2, 2), 1.0)):
        with pytest.raises(InputError, match="shifted: expected what load gives back, got Exp"):
            save(wrong, tmp_path / "b")
        folder.write(tmp_path / "b", "shifted", wrong.tensors(), wrong.facts(), overwrite=True)
        with pytest.raises(
            InputError, match="the content of a shifted in .*got other content: Exp"
        ):
            subbayes.load(tmp_path / "b")
        shutil.rmtree(tmp_path / "b")


def test_kinds_that_nobody_registers_are_saved_and_not_loaded(tmp_path):
    save(Shifted(torch.arange(3.0), 2.0), tmp_path / "a")
    with pytest.raises(InputError, match="of a kind that this version knows, got kind 'shifted'"):
        subbayes.load(tmp_path / "a")
