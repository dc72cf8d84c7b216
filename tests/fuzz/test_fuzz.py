"""A small campaign with a fixed seed; `make fuzz` runs a large one."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

from fuzz.campaign import Campaign
from fuzz.models import MODELS
from fuzz.mutations import forgeries
from subbayes import InputError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory by /proc")
SLOW = pytest.mark.slow
QUICK = ["samples", "laplace-subspace", "sampling-elliptical-slice"]


@pytest.mark.parametrize(
    ("names", "forged", "damaged"),
    [(QUICK, 12, 4), pytest.param(list(MODELS), 30, 10, marks=SLOW)],
    ids=["quick", "all"],
)
def test_damaged_and_forged_artifacts_are_refused_or_predict(
    tmp_path: Path, names: list[str], forged: int, damaged: int
):
    campaign = Campaign(tmp_path, names)
    try:
        campaign.run(campaign.cases(random.Random(0), forged, damaged))
    finally:
        campaign.close()
    assert not campaign.failures, campaign.failures
    whole = [name for name in names if not MODELS[name].checkpoint]
    assert sum(campaign.counts.values()) == damaged * len(names) + forged * len(whole)
    refused = sum(n for key, n in campaign.counts.items() if key[2] == "refused")
    assert refused > 2 / 3 * forged * len(whole)


@pytest.mark.few(4)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("temperature-scaled", "facts/model/facts/likelihoods/2 removed"),
        ("data-frame-sparse", "facts/encoder/options/missing_values = -1"),
        ("data-frame", "facts/model/facts/history/swa/learning_rate/0 = long int"),
        ("fitted-full-linearised", "facts/likelihood/noise = list"),
        ("laplace-diagonal", "tensor squares [-1] = -1.0"),
    ],
)
def test_forgeries_that_campaigns_have_found(tmp_path: Path, name: str, label: str):
    MODELS[name].make(tmp_path / name)
    (case,) = [case for case in forgeries(tmp_path / name) if case.label == label]
    case.write(tmp_path / "forged")
    with pytest.raises(InputError) as caught:
        MODELS[name].use(tmp_path / "forged")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["same", "code"],
        pytest.param(
            ["crash", "hang", "other", "raw error", "several lines", "memory"], marks=SLOW
        ),
    ],
)
def test_campaigns_notice_crashes_hangs_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
):
    (tmp_path / "fuzz").mkdir()
    (tmp_path / "fuzz" / "__init__.py").touch()
    here = Path(__file__).parent
    (tmp_path / "fuzz" / "worker.py").write_text((here / "worker.py").read_text())
    (tmp_path / "fuzz" / "models.py").write_text(
        "import ctypes, os, types, numpy as np\n"
        "from subbayes.utils.checks import InputError\n"
        "def use(path):\n"
        "    word = path.read_text()\n"
        "    if word == 'crash': os.abort()\n"
        "    while word == 'hang': pass\n"
        "    if word == 'code': os.system('true')\n"
        "    if word == 'library': ctypes.CDLL(None)\n"
        "    if word == 'question' and os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1':\n"
        "        ctypes.CDLL(None)\n"
        "    if word == 'raw error': raise KeyError(word)\n"
        "    if word == 'several lines': raise InputError('a\\nb')\n"
        "    if word == 'memory': bytearray(2**40)\n"
        "    return [np.array([float(word == 'other')])]\n"
        "MODELS = {'a': types.SimpleNamespace(use=use)}\n"
    )
    monkeypatch.setattr("fuzz.campaign._WORKER", tmp_path)
    monkeypatch.setattr("fuzz.campaign.SECONDS", 2.0)
    monkeypatch.setitem(MODELS, "a", MODELS["samples"])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a").write_text("same")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    campaign = Campaign(tmp_path, ["a"])
    place = tmp_path / "case"
    try:
        for word in words:
            place.write_text(word)
            assert campaign.child.load("a", place)[0] == word
        # A library is named, with the line that opened it.
        place.write_text("library")
        outcome, text = campaign.child.load("a", place)
        assert outcome == "code"
        assert re.fullmatch(r"ctypes\.dlopen \(None,\) of .*models\.py:\d+", text)
        place.write_text("question")  # of torch for devices, as after an import of lightning
        assert campaign.child.load("a", place)[0] == "same"
    finally:
        campaign.close()
