"""Settings of the command line: options, `--set` and files together."""

from __future__ import annotations

import pytest

from subbayes.cli import run
from subbayes.cli.settings_options import _settings
from subbayes.models.settings import LIKELIHOODS
from subbayes.utils.checks import InputError


def test_set_reaches_the_settings_of_what_options_name():
    options = {"inference": "mclmc", "subspace": "subnetwork", "subspace.rank": "9"}
    pairs = ["inference.step_size=0.1", "inference.target=0.5,0.1", "subspace.scale_prior=false"]
    found = _settings(options, None, pairs)
    assert found.inference.name == "mclmc"
    assert (found.inference.step_size, found.inference.target) == (0.1, (0.5, 0.1))
    assert (found.subspace.rank, found.subspace.scale_prior) == (9, False)


def test_options_take_precedence_over_set_and_that_over_the_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("inference = 'nuts'\n[sampling]\ndraws = 5\nchains = 3\nthin = 2\n")
    pairs = ["inference=hmc", "sampling.draws=6", "sampling.chains=4"]
    found = _settings({"inference": "mams", "sampling.draws": "7"}, file, pairs)
    assert found.inference == "mams"
    assert (found.sampling.draws, found.sampling.chains, found.sampling.thin) == (7, 4, 2)
    assert _settings({}, file, pairs).inference == "hmc"
    assert _settings({}, file, []).inference == "nuts"


def test_settings_of_another_engine_are_refused():
    with pytest.raises(InputError, match=r"^inference.max_depth: expected one of"):
        _settings({"inference": "mclmc"}, None, ["inference.max_depth=4"])


def test_help_does_not_restrict_likelihoods_to_a_few_of_those_it_names(capsys):
    assert run(["fit", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    names = [name for names in LIKELIHOODS.values() for name in names]
    assert f"--likelihood NAME Distribution of the target: {', '.join(names)}." in text


@pytest.mark.parametrize("command", ["predict", "evaluate", "report"])
def test_help_of_commands_for_both_kinds_of_models_names_both(command, capsys):
    assert run([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "`subbayes fit --out` or `subbayes regress --out` wrote" in text


def test_what_is_given_is_known_though_it_is_the_default(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("[sampling]\nchains = 8\n")
    found = _settings({"sampling.draws": "500"}, file, ["training.epochs=100"])
    assert found.given == {"sampling.chains", "sampling.draws", "training.epochs"}
    assert found == _settings({}, None, [])
    options = {"prior": "evidence", "subspace.rank": "7"}
    assert _settings(options, None, []).given == {"prior", "subspace.rank"}
