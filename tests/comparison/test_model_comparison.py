"""Comparison of posteriors against refits in closed form and ArviZ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import LinearGaussian
from scipy import stats

import subbayes
from subbayes import Draws, subspaces
from subbayes.cli.compare_models import _check_rows
from subbayes.comparison import compare_posteriors, reweight, to_arviz
from subbayes.inference.configuration import Sampling
from subbayes.priors import Normal
from subbayes.utils.checks import InputError, InputTypeError

SCALES, TEMPERATURES = (0.7, 1.5), (1.0, 3.0)


def exact_draws(model, chains=8, draws=500, seed=0, **facts):
    """Independent draws of the closed form."""
    mean, covariance = model.moments()
    rng = np.random.default_rng(seed)
    z = rng.multivariate_normal(mean, covariance, size=(chains, draws))
    return Draws(z, **{"engine": "exact", "temperature": model.temperature} | facts)


def log_evidence(model):
    """The tempered likelihood is a Gaussian of variance T s^2."""
    a, s2 = model.phi @ model.basis.T, model.temperature * model.noise**2
    factor = model.prior.from_standard(np.eye(2)).T
    known = stats.multivariate_normal.logpdf(
        model.y, model.phi @ model.shift, s2 * np.eye(model.n) + a @ factor @ factor.T @ a.T
    )
    return known + 0.5 * model.n * (
        np.log(2 * np.pi * s2) - np.log(2 * np.pi * model.noise**2) / model.temperature
    )


def exact_terms(model):
    """log p(y_i | y_-i) by a fit without each observation."""
    terms = []
    for i in range(model.n):
        kept = np.arange(model.n) != i
        without = LinearGaussian.__new__(LinearGaussian)
        vars(without).update(
            vars(model)
            | {"x": model.x[kept], "y": model.y[kept], "phi": model.phi[kept], "n": model.n - 1}
        )
        mean, covariance = without.moments()
        a = model.phi[i] @ model.basis.T
        terms.append(
            stats.norm.logpdf(
                model.y[i],
                model.phi[i] @ model.shift + a @ mean,
                np.sqrt(model.noise**2 + a @ covariance @ a),
            )
        )
    return np.array(terms)


def check(row, model):
    """The row has the exact score."""
    exact = exact_terms(model)
    assert row.reliable
    assert row.elpd == pytest.approx(exact.sum(), abs=0.15)
    assert row.se == pytest.approx(np.sqrt(model.n * exact.var()), rel=0.05)


def test_compares_posteriors():
    models = {
        "wide": LinearGaussian(rank=2),
        "narrow": LinearGaussian(rank=2, prior=Normal(0.05)),
        "tempered": LinearGaussian(rank=2, temperature=5.0),
    }
    found = compare_posteriors(
        {name: (model.posterior(), exact_draws(model)) for name, model in models.items()}
    )
    terms = {name: exact_terms(model) for name, model in models.items()}
    best = max(terms, key=lambda name: terms[name].sum())
    assert found.best == best
    for name, model in models.items():
        row = found[name]
        check(row, model)
        off = terms[name] - terms[best]
        assert row.difference == pytest.approx(off.sum(), abs=0.2)
        assert row.difference_se == pytest.approx(np.sqrt(model.n * off.var()), abs=0.1)
        assert np.isnan(row.log_evidence)
        assert np.isnan(row.weights_k)
        assert (row.rank, row.sampler, row.draws) == (2, "exact", 4000)
    assert 0.5 < found["wide"].p_loo < 6
    assert found["narrow"].p_loo < found["wide"].p_loo


def test_arviz_agrees():
    arviz = pytest.importorskip("arviz")
    model = LinearGaussian(rank=2)
    draws = exact_draws(model)
    row = compare_posteriors({"m": (model.posterior(), draws)})["m"]
    theirs = arviz.loo(to_arviz(draws, model.posterior()), pointwise=True)
    terms = getattr(theirs, "loo_i", None)  # elpd_i on ArviZ 1.x
    terms = np.asarray(theirs.elpd_i if terms is None else terms)
    assert row.elpd == pytest.approx(terms.sum(), abs=1e-3)
    # ArviZ divides the variance by N before version 1, by N - 1 since.
    assert row.se == pytest.approx(np.sqrt(model.n * terms.var(ddof=1)), rel=1e-4)


def test_reweights_to_other_priors_and_temperatures():
    model = LinearGaussian(rank=2, temperature=2.0)
    known = log_evidence(model)
    draws = exact_draws(model, log_evidence=known, log_evidence_error=0.01)
    found = reweight(
        model.posterior(), draws, temperatures=(2.0, *TEMPERATURES), prior_scales=(1.0, *SCALES)
    )
    assert len(found.rows) == 9
    check(found["as sampled"], model)
    assert found["as sampled"].log_evidence == known
    for t in (2.0, *TEMPERATURES):
        for s in SCALES:
            row = found[f"T = {t:g}, prior scale {s:g}"]
            other = LinearGaussian(rank=2, prior=Normal(s), temperature=t)
            assert row.temperature == t
            check(row, other)
            assert abs(row.log_evidence - log_evidence(other)) < 5 * row.log_evidence_error + 1e-3
            assert row.log_evidence_error < 0.2
            assert row.weights_k < 0.7


def autoregressive_draws(model, rho, seed, **facts):
    """Four chains of 500 draws of the closed form, each an autoregressive process."""
    mean, covariance = model.moments()
    rng = np.random.default_rng(seed)
    noise = rng.multivariate_normal(np.zeros(len(mean)), covariance, size=(500, 4))
    z = [noise[0]]
    for step in noise[1:]:
        z.append(rho * z[-1] + np.sqrt(1 - rho**2) * step)
    return Draws(mean + np.stack(z, 1), **{"engine": "exact"} | facts)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rho", "independent"), [(0.0, False), (0.9, False), (0.97, False), (0.0, True)]
)
def test_the_error_of_the_evidence_is_the_spread_of_repeated_runs(rho, independent):
    model = LinearGaussian(rank=2)
    posterior, known = model.posterior(), log_evidence(model)
    exact = {"independent": independent, "log_evidence": known, "log_evidence_error": 0.0}
    rows = []
    for seed in range(50):
        draws = autoregressive_draws(model, rho, seed, **exact)
        rows.append(reweight(posterior, draws, temperatures=1.5)["T = 1.5"])
    found = np.array([row.log_evidence for row in rows])
    error = np.array([row.log_evidence_error for row in rows])
    assert found.std(ddof=1) == pytest.approx(error.mean(), rel=0.4)  # 4 sd of a standard deviation
    other = log_evidence(LinearGaussian(rank=2, temperature=1.5))
    assert abs(found.mean() - other) < 4 * error.mean() / np.sqrt(50) + 2 * error.mean() ** 2


def test_the_error_of_the_evidence_of_short_chains_is_unknown():
    model = LinearGaussian(rank=2)
    draws = exact_draws(model, draws=3, log_evidence=-68.0, log_evidence_error=0.0)
    one, other = (
        reweight(model.posterior(), replace(draws, independent=apart), temperatures=1.5)["T = 1.5"]
        for apart in (True, False)
    )
    assert (one.log_evidence_error > 0, np.isnan(other.log_evidence_error)) == (True, True)


def test_members_of_an_ensemble_are_no_candidates():
    model = LinearGaussian(rank=2)
    draws = exact_draws(model, chains=1, draws=5, engine="deep ensemble", validity="ensemble")
    line = "expected draws of a posterior for leave-one-out, got a deep ensemble. Score held-out"
    with pytest.raises(InputError, match=rf"models\['e'\]: {line}"):
        compare_posteriors({"e": (model.posterior(), draws)})
    with pytest.raises(InputError, match=f"draws: {line}"):
        reweight(model.posterior(), draws, prior_scales=[0.9])


def test_scores_of_mostly_unreliable_terms_are_ranked_last():
    model = LinearGaussian(rank=2)
    few = exact_draws(model, chains=1, draws=6)  # so few that no Pareto k is reliable
    found = compare_posteriors(
        {"few": (model.posterior(), few), "many": (model.posterior(), exact_draws(model, seed=1))}
    )
    assert [(row.name, row.reliable) for row in found.rows] == [("many", True), ("few", False)]
    assert (found["few"].n_bad, found["few"].n_rows) == (model.n, model.n)
    assert f"unreliable: Pareto k is too large at {model.n} of {model.n} rows" in repr(found)


def test_unreliable_weights_are_marked():
    model = LinearGaussian(rank=2, temperature=1.0)
    draws = exact_draws(model)
    found = reweight(model.posterior(), draws, temperatures=[0.01, 100.0])
    assert found.rows[0].name == "as sampled"
    assert not any(row.reliable for row in found.rows[1:])
    assert "unreliable: Pareto k of the weights" in found.to_text()
    assert [row.weight for row in found.rows] == [1.0, *[0.0] * (len(found.rows) - 1)]


def test_a_poor_approximation_is_marked():
    model = LinearGaussian(rank=2)
    found = compare_posteriors(
        {
            "exact": (model.posterior(), exact_draws(model)),
            "laplace": (model.posterior(), exact_draws(model, seed=1, pareto_k=0.9)),
        }
    )
    assert found.best == "exact"
    assert "unreliable: the approximation misses a part" in found.to_text()


def test_text_table_and_json():
    model = LinearGaussian(rank=2)
    draws = exact_draws(model, log_evidence=-68.0)
    found = reweight(model.posterior(), draws, prior_scales=[2.0])
    assert list(found.to_frame().index) == [row.name for row in found.rows]
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["n"] == model.n
    assert plain["best"] == found.best
    assert {row["name"]: row for row in plain["rows"]}["as sampled"]["log_evidence"] == -68.0
    assert "prior scale 2" in repr(found)
    assert "-68.0" in repr(found)


def test_evenly_spaced_draws_suffice(monkeypatch):
    model = LinearGaussian(rank=2)
    draws = exact_draws(model)
    monkeypatch.setattr("subbayes.comparison.posteriors._MOST_DRAWS", 800)
    few = compare_posteriors({"m": (model.posterior(), draws)})["m"]
    assert few.draws == 800
    check(few, model)


def test_a_fitted_model_is_a_candidate():
    x = torch.linspace(-1, 1, 40)[:, None]
    fitted = subbayes.fit(
        subbayes.MLP(1, (5,), 1),
        (x, x[:, 0] ** 2),
        subspace=subspaces.Random(rank=2),
        training=subbayes.Training(epochs=5, swa_epochs=2),
        sampling=Sampling(draws=30, progress=False),
    )
    found = compare_posteriors({"fit": fitted})
    assert found["fit"].sampler == "elliptical-slice"
    with pytest.raises(InputTypeError, match=r"models\['fit'\]: expected a pair .*load\(path, dat"):
        compare_posteriors({"fit": replace(fitted, posterior=None)})


def test_bad_input(unchecked):
    model, other = LinearGaussian(rank=2), LinearGaussian(rank=2, seed=1)
    posterior, draws = model.posterior(), exact_draws(model)
    with pytest.raises(InputError, match=r"models\['b'\]: expected the 40 observations of 'a'"):
        compare_posteriors({"a": (posterior, draws), "b": (other.posterior(), draws)})
    short = LinearGaussian(n=20).posterior()
    with pytest.raises(InputError, match="40 obs.* got 20 observations. Fit all to the same"):
        compare_posteriors({"a": (posterior, draws), "b": (short, draws)})
    with pytest.raises(InputError, match="draws at temperature 3, as the posterior, got 1"):
        compare_posteriors({"a": (posterior.with_temperature(3.0), draws)})
    with pytest.raises(InputError, match="temperatures: expected a finite number above 0, got 0"):
        reweight(posterior, draws, temperatures=[0.0])
    with pytest.raises(InputError, match="prior_scales: expected a finite number above 0, got -1"):
        reweight(posterior, draws, prior_scales=[-1.0])
    with pytest.raises(InputError, match="name: expected one of 'as sampled', got 'x'"):
        reweight(posterior, draws)["x"]
    with pytest.raises(InputTypeError, match="models.*: expected a pair"):
        compare_posteriors({"a": 3})


@pytest.mark.usefixtures("unchecked")
def test_single_numbers_are_accepted():
    posterior = LinearGaussian(rank=2).posterior()
    draws = subbayes.inference.EllipticalSlice().sample(
        posterior, draws=60, chains=4, progress=False
    )
    one, listed = (reweight(posterior, draws, temperatures=t) for t in (2.0, [2.0]))
    assert [row.elpd for row in one.rows] == [row.elpd for row in listed.rows]


def test_linearised_laplace_is_not_scored_as_if_it_predicted_through_the_network():
    model = LinearGaussian()
    posterior = model.posterior()
    choice = compare_posteriors(
        {
            "linearised": (posterior, exact_draws(model, prediction="linearised")),
            "sampled": (posterior, exact_draws(model, seed=1)),
        }
    )
    assert choice.best == "sampled"
    assert not choice["linearised"].reliable
    assert "score held-out rows" in choice.to_text()


def test_log_likelihoods_of_nan_are_refused():
    model = LinearGaussian(rank=2)
    draws = exact_draws(model, draws=10)
    nan = replace(draws, stats={"log_likelihood": np.full((8, 10), np.nan)})
    line = r"models\['a'\]: expected log-likelihoods that are numbers, got NaN saved .* 80 places"
    with pytest.raises(InputError, match=line):
        compare_posteriors({"a": (model.posterior(), nan)})
    with pytest.raises(InputError, match="draws: expected log-likelihoods that are numbers"):
        reweight(model.posterior(), nan, temperatures=[2.0])
    posterior = model.posterior()
    posterior.pointwise = lambda z: np.full((len(z), model.n), np.nan)
    with pytest.raises(InputError, match="got NaN of the rows at"):
        compare_posteriors({"a": (posterior, draws)})


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_saved_log_likelihoods_belong_to_the_rows_of_a_table(value):
    model = LinearGaussian(rank=2)
    posterior, draws = model.posterior(), exact_draws(model, draws=10)
    own = np.stack([posterior.log_likelihood(z) for z in draws.z])
    _check_rows(posterior, replace(draws, stats={"log_likelihood": own}), Path("model"))
    stats = {"log_likelihood": np.full((8, 10), value)}
    with pytest.raises(InputError, match="table: expected the rows that 'model' was fitted to"):
        _check_rows(posterior, replace(draws, stats=stats), Path("model"))
