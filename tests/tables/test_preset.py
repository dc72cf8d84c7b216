"""Presets: what they choose, within which time, and how they resume."""

from __future__ import annotations

import dataclasses
import importlib
from functools import partial

import numpy as np
import pandas as pd
import pytest
from msgspec import ValidationError

import subbayes
from subbayes import Sampling, SubspaceClassifier, SubspaceRegressor, Training
from subbayes.artifacts.facts import decode, encode
from subbayes.artifacts.saving import checked_facts
from subbayes.cli import run
from subbayes.draws import Draws
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.models import presets
from subbayes.models.presets import Preset, describe_preset, largest
from subbayes.models.settings import TableSettings
from subbayes.tables import preset_choice
from subbayes.tables.array_model import fit_arrays
from subbayes.tables.held_out import HeldOut
from subbayes.tables.preset_checkpoint import PresetCheckpoint
from subbayes.tables.preset_sampling import Clock, PlannedMCLMC, _Planned
from subbayes.utils.checks import InputError

SMALL = Preset(
    networks=(((3,), 1e-4), ((12, 12), 1e-4)),
    priors=(1.0, 0.01),
    training=Training(
        epochs=40, learning_rate=2e-2, batch_size=None, patience=20, validation=0.1, swa_epochs=0
    ),
    members=3,
    compared=2,
    draws=10,
    epochs=(5, 10, 40),
    steps=(50, 100, 200),
    fixed_epochs=30,
    fixed_steps=200,
    warmup=60,
    thin=2,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The preset "best" at a small size."""
    monkeypatch.setitem(presets.PRESETS, "best", SMALL)


def table(n=120, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    return x, np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=n)


def fitted(**changes):
    options = {"preset": "best", "budget": None, "random_state": 0}
    return SubspaceRegressor(**options | changes).fit(*table())


@pytest.fixture(scope="module")
def model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "best", SMALL)
        return fitted()


# --- the choice -----------------------------------------------------------------------------------


def test_the_record_has_the_best_of_the_candidates(model):
    record = model.model_.settings["preset"]
    networks, chains = record["networks"], record["chains"]
    assert [one["hidden"] for one in networks] == [[3], [12, 12]]
    assert [one["prior"] for one in chains] == [1.0, 1.0, 0.01]
    assert [one["hidden"] for one in chains] == [[3], [12, 12], record["hidden"]]
    best = max(chains, key=lambda one: one["score"])
    assert (record["hidden"], record["prior"]) == (best["hidden"], best["prior"])
    assert record["prior"] == 1.0  # weights of scale 0.01 predict the mean
    assert best["score"] > chains[2]["score"] + 0.1
    fit = model.model_
    assert fit.network.module_with().settings["hidden"] == record["hidden"]
    assert float(fit.prior.scale.reshape(-1)[0]) == record["prior"]
    assert fit.settings["training"]["weight_decay"] == record["weight_decay"]
    assert fit.sampled.z.shape[:2] == (3, 10)
    assert (fit.sampled.engine, fit.sampled.meta["warmup"], fit.sampled.meta["thin"]) == (
        "mclmc",
        60,
        2,
    )


@pytest.mark.slow
def test_without_a_budget_a_seed_determines_everything(model):
    again = fitted()
    assert np.array_equal(again.model_.sampled.z, model.model_.sampled.z)
    same = ("networks", "chains", "hidden", "epochs")
    records = [one.model_.settings["preset"] for one in (again, model)]
    assert [records[0][key] for key in same] == [records[1][key] for key in same]
    other = fitted(random_state=1)
    assert other.model_.settings["preset"]["networks"] != records[0]["networks"]


def test_the_chosen_settings_by_hand_give_the_same_draws(model):
    record = model.model_.settings["preset"]
    by_hand = SubspaceRegressor(
        network={"hidden": tuple(record["hidden"])},
        subspace="full",
        inference=MCLMC(target=SMALL.target, metric="prior"),
        prior=record["prior"],
        training=dataclasses.replace(SMALL.training, weight_decay=record["weight_decay"]),
        sampling=Sampling(initial="ensemble", chains=3, draws=10, warmup=60, thin=2),
        random_state=0,
    ).fit(*table())
    assert np.array_equal(by_hand.model_.sampled.z, model.model_.sampled.z)


def test_a_line_says_what_was_chosen_and_how_long_it_took(model, capsys):
    line = model.model_.describe()["preset"]
    assert line == describe_preset(model.model_.settings["preset"])
    assert "\n" not in line
    for words in ("hidden layers", "prior scale 1,", "2 of 2 networks and 3 of 3 posteriors"):
        assert words in line
    for words in ("s to choose", "s to train", "s to sample"):
        assert words in line
    assert capsys.readouterr().err == ""
    fitted(verbose=True)
    assert "preset 'best': hidden layers" in capsys.readouterr().err


def test_chains_are_compared_with_the_ensemble_at_which_they_start(model):
    """By the difference of their scores, which both are in the record, and its standard error."""
    record = model.model_.settings["preset"]
    networks = {tuple(one["hidden"]): one["score"] for one in record["networks"]}
    for one in record["chains"]:
        expected = one["score"] - networks[tuple(one["hidden"])]
        assert one["gain"] == pytest.approx(expected, abs=1e-9)
        assert 0 < one["gain_error"] < 1
    best = max(record["chains"], key=lambda one: one["score"])
    line = describe_preset(record)
    said = f"(mean log density {best['gain']:+.2f} ± {best['gain_error']:.2f} from that of their"
    assert said in line
    worst = record | {"chains": [record["chains"][2]]}  # weights of scale 0.01
    (warning,) = presets.preset_warnings(worst)
    assert warning.startswith("chains of 200 steps scored ")
    assert "budget=..." in warning
    fit = dataclasses.replace(model.model_, settings=model.model_.settings | {"preset": worst})
    assert fit.warnings() == [warning, *model.model_.warnings()]
    even = worst["chains"][0] | {"gain": -0.1, "gain_error": 0.06}
    assert presets.preset_warnings(record | {"chains": [even]}) == []
    assert presets.preset_warnings(record | {"chains": []}) == []
    lost = even | {"score": -1e30, "gain": 0.0, "gain_error": 1e30}
    (warning,) = presets.preset_warnings(record | {"chains": [lost]})
    assert warning.startswith(
        "chains of 200 steps gave a row that was held out a density of 0: give"
    )


def test_weights_of_rows_held_out():
    """Against repeated rows: the gain alone, since repeating rows narrows its standard error."""
    rng = np.random.default_rng(0)
    chains, members = rng.normal(size=(2, 20))
    weights = rng.integers(1, 4, 20)
    held = HeldOut(np.zeros(20), weights.astype(float))
    found = held.gain(chains, members)
    again = HeldOut(np.zeros(weights.sum()), None)
    repeated = np.repeat(chains, weights), np.repeat(members, weights)
    assert found["gain"] == pytest.approx(again.gain(*repeated)["gain"])
    assert held.score(chains) == pytest.approx(again.score(repeated[0]))
    draws = rng.multinomial(20, np.full(20, 1 / 20), size=20_000)  # bootstrap of the rows
    totals = (draws * weights) @ (chains - members) / (draws @ weights)
    assert found["gain_error"] == pytest.approx(totals.std(), rel=0.05)
    chains[3] = -np.inf
    assert held.score(chains) == -1e30
    assert held.gain(chains, members) == {"gain": 0.0, "gain_error": 1e30}


@pytest.mark.slow
def test_classes_counts_and_weights():
    x, y = table()
    labels = np.where(y > 0, "high", "low")
    options = {"preset": "best", "budget": None, "random_state": 0}
    classifier = SubspaceClassifier(**options).fit(x, labels)
    assert classifier.score(x, labels) > 0.8
    assert classifier.model_.settings["preset"]["prior"] == 1.0
    counts = SubspaceRegressor(likelihood="poisson", **options).fit(x, np.rint(2 + 2 * y).clip(0))
    assert counts.model_.settings["preset"]["networks"][0]["score"] < 0
    weights = np.where(np.arange(len(y)) % 2, 1.0, 0.5)
    weighted = SubspaceRegressor(**options).fit(x, y, sample_weight=weights)
    assert weighted.model_.settings["preset"]["hidden"]


@pytest.mark.slow
def test_a_candidate_that_diverges_is_not_chosen(monkeypatch):
    train = preset_choice._Search._train

    def diverging(self, candidate, epochs):
        if candidate[0] in bad:
            raise InputError("learning_rate", "a finite loss", "nan")
        return train(self, candidate, epochs)

    monkeypatch.setattr(preset_choice._Search, "_train", diverging)
    bad = [(12, 12)]
    record = fitted().model_.settings["preset"]
    assert record["networks"][1]["score"] == -1e30
    assert record["hidden"] == [3]
    assert len(record["chains"]) == 2
    bad = [(3,), (12, 12)]
    with pytest.raises(InputError, match="^preset: .*finite, got every candidate diverged"):
        fitted()


# --- the time -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "expected"), [(4.9, None), (5, 5), (39, 10), (1e9, 40)])
def test_entries_of_a_ladder(most, expected):
    assert largest(SMALL.epochs, most) == expected


@pytest.mark.slow
def test_a_budget_plans_the_steps_of_the_sampling():
    fit = fitted(budget=20.0).model_
    record, meta = fit.settings["preset"], fit.sampled.meta
    assert record["budget"] == 20.0
    assert record["compared_epochs"] in SMALL.epochs
    assert all(one["steps"] in SMALL.steps for one in record["chains"])
    assert 4 <= fit.sampled.n_draws <= 10  # fewer if steps became slower than planned
    assert meta["warmup"] >= 100


@pytest.mark.parametrize(
    ("until", "least", "expected"),
    [
        (10.0, 1, "abc"),
        (9.9, 1, "ab"),
        (0.5, 1, "a"),
        (0.5, 0, "a"),
        (-1.0, 0, ""),
        (-1.0, 2, "ab"),
    ],
)
def test_candidates_end_before_the_time_of_the_next_is_over(until, least, expected, monkeypatch):
    """The third may start at 6.5 if 3.5 seconds are left, as many as the slowest took."""
    now, seconds = [0.0], {"a": 3.0, "b": 3.5, "c": 2.0}
    monkeypatch.setattr(preset_choice.time, "monotonic", lambda: now[0])
    found, clock = "", Clock(until)
    for item in clock.while_time("abc", least):
        now[0] += seconds[item]
        found += item
    assert found == expected
    clock.until = now[0] + clock.slowest - 0.1  # the slowest item before counts
    assert list(clock.while_time("d", least=0)) == []


@pytest.mark.parametrize(("left", "steps"), [(100.0, 970), (1e-9, 200)])
def test_half_of_the_planned_steps_are_the_warm_up(left, steps, monkeypatch):
    monkeypatch.setattr("subbayes.tables.preset_sampling.step_seconds", lambda *_: 0.1)
    monkeypatch.setattr("subbayes.tables.preset_sampling.time.monotonic", lambda: 0.0)
    sampling = Sampling(initial=np.zeros((3, 2)), chains=3, draws=10)
    plan = PlannedMCLMC(ends=left)._plan(MCLMC(), None, sampling)
    assert plan["warmup"] + plan["draws"] * plan["thin"] == steps
    assert (plan["draws"], plan["thin"]) == (10, steps // 2 // 10)
    assert plan["time_limit"] == max(left, 1.0)


@pytest.mark.usefixtures("unchecked")
def test_a_budget_is_a_number():
    assert TableSettings(budget="10").budget == 10.0
    with pytest.raises(InputError, match="budget: expected a number above 0, got 'ten'"):
        TableSettings(budget="ten")


def test_a_budget_that_is_too_small_is_refused_in_one_line():
    message = (
        r"budget: expected at least \d+ s, of which 12% suffice to train 2 networks for 10 epochs "
        r"on 96 rows, got 0.001 s\. Rai"
    )
    with pytest.raises(InputError, match=message) as error:
        fitted(budget=0.001)
    assert "\n" not in str(error.value)


def test_sampling_ends_at_its_time_limit(monkeypatch):
    from densities import Toy

    clock = iter(np.arange(0.0, 1e5, 0.5))
    monkeypatch.setattr("subbayes.inference.samplers.chains.time.perf_counter", lambda: next(clock))
    options = {"draws": 1000, "chains": 3, "warmup": 10, "thin": 2, "progress": False}
    with pytest.warns(UserWarning, match="stopped at its time limit of 20 s after 1. of 1000 draw"):
        draws = MCLMC().run(Toy(3), Sampling(**options, time_limit=20.0))
    assert 12 <= draws.n_draws <= 16
    monkeypatch.undo()
    whole = MCLMC().run(Toy(3), Sampling(**options))
    assert np.array_equal(whole.z[:, : draws.n_draws], draws.z)
    late = iter([0.0, *[0.5] * 12, *[2.0] * 1000])  # after the warm-up
    monkeypatch.setattr("subbayes.inference.samplers.chains.time.perf_counter", lambda: next(late))
    with pytest.warns(UserWarning, match="after 4 of 1000 draws"):
        assert MCLMC().run(Toy(3), Sampling(**options, time_limit=1.0)).n_draws == 4
    with pytest.raises(InputError, match="time_limit"):
        Sampling(time_limit=-1.0)


def test_a_warm_up_that_is_not_over_at_the_time_limit(monkeypatch, tmp_path):
    from densities import Toy

    options = {"draws": 20, "chains": 3, "warmup": 100, "seed": 1, "progress": False}
    whole = MCLMC().run(Toy(3), Sampling(**options))
    limited = Sampling(**options, time_limit=40.0, checkpoint=tmp_path)
    with monkeypatch.context() as patch:
        clock = iter(np.arange(0.0, 1e5))
        patch.setattr("subbayes.inference.samplers.chains.time.perf_counter", lambda: next(clock))
        with pytest.raises(
            InputError, match=r"time_limit: .* 100 draws of warm-up .* made (3\d|4\d)\."
        ) as error:
            MCLMC().run(Toy(3), limited)
        assert "\n" not in str(error.value)
        assert "run again from the checkpoint" in str(error.value)
        with pytest.warns(UserWarning, match="stopped at its time limit of 40 s after 4 of 20"):
            planned = _Planned().run(Toy(3), Sampling(**options, time_limit=40.0))
        assert np.array_equal(planned.z, whole.z[:, :4])
    assert np.array_equal(MCLMC().run(Toy(3), limited).z, whole.z)


# --- saving, resuming, refusing -------------------------------------------------------------------


def test_saved_and_loaded(model, tmp_path):
    x, _ = table()
    path = model.save(tmp_path / "model")
    loaded = subbayes.load(path)
    assert (loaded.preset, loaded.budget) == ("best", None)
    assert loaded.model_.describe()["preset"] == model.model_.describe()["preset"]
    assert np.array_equal(loaded.predict(x), model.predict(x))


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden": [0]},
        {"prior": -1.0},
        {"seconds": {"choice": 1.0}},
        {"networks": [{}]},
        {"candidates": [1]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_damaged_record_is_refused(model, wrong):
    facts, tensors = decode(encode(model.model_.facts())), _torch(model.model_.tensors())
    checked_facts("fitted-model", tensors, facts)
    settings = facts["settings"] | {"preset": facts["settings"]["preset"] | wrong}
    with pytest.raises(ValidationError):
        checked_facts("fitted-model", tensors, facts | {"settings": settings})


def _torch(tensors):
    import torch

    return {name: torch.as_tensor(value) for name, value in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 30.0])
def test_an_interrupted_fit_resumes_with_its_choice_and_its_plan(budget, tmp_path, monkeypatch):
    x, y = table()
    settings = TableSettings(preset="best", budget=budget)
    steps, step = [], MCLMC.kernel

    def interrupted(self, posterior, warmup):
        steps.append(warmup)
        if posterior.n == len(y) and warmup:  # not while candidates are compared or steps timed
            raise KeyboardInterrupt
        return step(self, posterior, warmup)

    with monkeypatch.context() as patch:
        patch.setattr(MCLMC, "kernel", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit_arrays(x.astype("f4"), y, "regression", settings, checkpoint=tmp_path)
    planned = steps[-1]
    monkeypatch.setattr("subbayes.tables.preset_choice._Search.run", None)  # not called again
    resumed = fit_arrays(x.astype("f4"), y, "regression", settings, checkpoint=tmp_path)
    assert resumed.sampled.meta["warmup"] == planned
    assert resumed.settings["preset"]["budget"] == budget
    with pytest.raises(InputError, match="checkpoint: .*same rows and settings"):
        fit_arrays(x.astype("f4"), 2 * y, "regression", settings, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "worst"}, "preset: expected .*best"),
        ({"budget": -1.0}, "budget: "),
        ({"subspace": "random"}, "subspace: expected no value of yours, since preset='best'"),
        ({"prior": 0.3}, "prior: expected no value"),
        ({"network": {"hidden": (4,)}}, "network.hidden: expected no value"),
        ({"training": {"epochs": 4}}, "training.epochs: expected no value.* got 4"),
        ({"sampling": {"warmup": 4}}, "sampling.warmup: expected no value"),
        ({"sampling": {"warmup": None}}, "sampling.warmup: expected no value.* got None"),
        ({"training": {"epochs": 100}}, "training.epochs: expected no value.* got 100"),
        ({"sampling": {"initial": np.zeros((8, 2))}}, "sampling.initial: .*start points"),
        ({"temperature": "loo"}, "temperature: expected a number"),
    ],
)
def test_what_the_preset_chooses_cannot_be_given(changes, message):
    with pytest.raises(InputError, match=message) as error:
        fitted(**changes)
    assert "\n" not in str(error.value)


def test_chains_and_draws_that_are_given_are_respected_though_they_are_the_defaults():
    default = Sampling()
    given = {"chains": default.chains, "draws": default.draws}
    assert fitted(sampling=given).model_.draws.z.shape[:2] == (default.chains, default.draws)
    assert fitted(sampling=default).model_.draws.z.shape[:2] == (SMALL.members, SMALL.draws)


def test_a_checkpoint_is_of_the_settings_that_were_given(tmp_path):
    x, y = table()
    plain = TableSettings(preset="best", sampling=Sampling(checkpoint=tmp_path))
    same = plain.change({"sampling.chains": plain.sampling.chains})
    assert same == plain
    of = partial(PresetCheckpoint.of, (x, y), "regression", weights=None)
    assert of(settings=same).identity != of(settings=plain).identity


def test_few_rows_and_other_methods_are_refused():
    x, y = table(12)
    with pytest.raises(InputError, match="preset: expected at least 20 rows to choose by, got 12"):
        SubspaceRegressor(preset="best").fit(x, y)
    with pytest.raises(InputError, match="preset: expected None for 'map'"):
        fit_arrays(x, y, "regression", TableSettings(preset="best"), method="map")


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys):
    x, y = table()
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(y=y)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    words = ["fit", str(tmp_path / "rows.csv"), "--target", "y", "--out", str(tmp_path / "m")]
    assert run([*words, "--preset", "best", "--budget", "none"]) == 0
    out = capsys.readouterr().out
    assert "'best': hidden layers" in out
    assert "full subspace" in out
    assert run(["report", str(tmp_path / "m"), "--out", str(tmp_path / "r.html")]) == 0
    assert "prior scale 1" in (tmp_path / "r.html").read_text()
    assert run([*words, "--overwrite", "--preset", "best", "--budget", "0.001"]) == 2
    assert "--budget" in capsys.readouterr().err.splitlines()[-1]


# --- remedies of warnings -------------------------------------------------------------------------


def problematic_draws():
    """Draws of chains that drift and whose steps have failed, and fewer than 4 of them."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2, 40, 3))
    stats = {
        "log_density": np.linspace(0, 50, 40) + rng.normal(size=(2, 40)),
        "failures": np.repeat([[0.0], [1.0]], 20, axis=1).reshape(1, 40).repeat(2, 0),
        "restarts": np.zeros((2, 40)),
    }
    whole = Draws(z, stats, engine="mclmc")
    return whole, Draws(z[:, :3], {}, engine="mclmc")


def test_warnings_of_a_preset_end_with_its_remedy(model):
    for draws in problematic_draws():
        fit = dataclasses.replace(model.model_, draws=draws, posterior=None)
        lines = draws.warnings(separate=True)
        assert lines
        assert fit.warnings() == [*lines, presets.PRESET_REMEDY]
        assert dataclasses.replace(fit, settings={}).warnings() == lines


def test_warnings_of_a_fit_of_a_preset(monkeypatch, recwarn):
    """Members diverge at first, and sampling ends at its time limit."""
    module = importlib.import_module("subbayes.baselines.deep_ensemble")
    from subbayes.inference.samplers import chains

    real, calls = module._diverged, []

    def diverged(result):
        calls.append(result)
        return len(calls) == 1 or real(result)

    def one_fewer(store, sampling):
        most = kept(store, sampling)
        return most if sampling.time_limit is None else min(most, sampling.draws - 1)

    kept = chains._kept
    monkeypatch.setattr(module, "_diverged", diverged)
    monkeypatch.setattr(chains, "_kept", one_fewer)
    monkeypatch.setattr(
        PlannedMCLMC, "_plan", lambda *arguments: {"time_limit": 1e3, "warmup": 20, "thin": 1}
    )
    fitted(budget=20.0)
    lines = [str(one.message) for one in recwarn]
    assert any("that diverged (0, counted" in line for line in lines)
    assert any("sampling stopped at its time limit" in line for line in lines)
