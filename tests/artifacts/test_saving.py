"""Artifacts beside an adapter write nothing outside of its folder."""

import os
import shutil
import warnings
from pathlib import Path

import pytest

import subbayes
from subbayes import InputError
from subbayes.artifacts.saving import CARD_MARK
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
    with pytest.warns(UserWarning, match=r"README.md' is a symbolic link, .*; remove the link$"):
        model.save(adapter)
    assert sorted(outside.rglob("*")) == before
    assert text is None or (adapter / target).read_text() == text
    assert os.readlink(adapter / "README.md") == target
    assert (adapter / "MODEL_CARD.md").read_text().startswith(CARD_MARK)


def test_no_card_where_both_names_are_links(model, adapter):
    for name in ("README.md", "MODEL_CARD.md"):
        (adapter / name).symlink_to("../outside/file")
    with pytest.warns(UserWarning, match="symbolic link"):
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
    if exists:
        model.save(target)
        with pytest.raises(InputError, match=r"got a symbolic link at .*subbayes'"):
            subbayes.load(adapter)
        shutil.rmtree(target)
        target.mkdir()
    assert target.exists() == exists
    assert not exists or list(target.iterdir()) == []
    assert sorted(p.name for p in adapter.iterdir()) == ["adapter_config.json", "subbayes"]


def test_an_adapter_behind_a_link_of_the_caller(model, adapter):
    link = adapter.parent / "link"
    link.symlink_to(adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save(link)
        model.save(link, overwrite=True)
    assert (adapter / "README.md").read_text().startswith(CARD_MARK)
    assert subbayes.load(link).name == "MAP"
