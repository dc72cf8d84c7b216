"""What inference returns: rows in order, diagnostics, and ArviZ data."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from densities import Bimodal, Toy
from hypothesis import given
from hypothesis import strategies as st

from subbayes import Draws, InputError, diagnostics
from subbayes.inference.samplers.hmc import HMC
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.priors import Normal

arviz = pytest.importorskip("arviz")


def some(chains: int = 4, draws: int = 250, k: int = 3, seed: int = 0) -> Draws:
    rng = np.random.default_rng(seed)
    return Draws(
        rng.normal(size=(chains, draws, k)),
        {
            "log_likelihood": rng.normal(size=(chains, draws)),
            "evaluations": rng.integers(1, 9, size=(chains, draws)),
        },
        {"seed": seed},
    )


# --- rows ----------------------------------------------------------------------------------------


def test_shapes_and_order():
    draws = some(2, 5, 3)
    assert (draws.n_chains, draws.n_draws, draws.rank) == (2, 5, 3)
    rows = draws.flat()
    assert rows.shape == (10, 3)
    np.testing.assert_array_equal(rows[:5], draws.z[0])
    np.testing.assert_array_equal(rows[5:], draws.z[1])


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 150))
def test_evenly_spaced_rows(chains, draws, n):
    z = np.arange(float(chains * draws)).reshape(chains, draws, 1)
    rows = Draws(z).flat(n)[:, 0]
    total = chains * draws
    assert len(rows) == min(n, total)
    assert len(np.unique(rows)) == len(rows)
    if n > 1:
        assert rows[0] + rows[-1] == pytest.approx(total - 1, abs=1.001)  # the same at both ends
        gaps = np.diff(rows)
        assert gaps.size == 0 or gaps.max() - gaps.min() <= 1


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 150))
def test_thinned_draws_are_even_in_every_chain(chains, draws, n):
    z = np.arange(float(chains * draws)).reshape(chains, draws, 1)
    all_draws = Draws(z, {"value": z[..., 0]}, {"seed": 3})
    thinned = all_draws.thin(n)
    if n >= chains * draws:
        assert thinned is all_draws
        return
    kept = max(1, n // chains)
    assert thinned.z.shape == (min(chains, n), kept, 1)
    np.testing.assert_array_equal(thinned.stats["value"], thinned.z[..., 0])
    assert thinned.meta["seed"] == 3
    assert thinned.meta["thinned_from"] == chains * draws
    if n % chains == 0:
        np.testing.assert_array_equal(thinned.flat(), all_draws.flat(n))
        gaps = np.diff(thinned.z[..., 0], axis=1)
        assert gaps.size == 0 or gaps.max() - gaps.min() <= 1


def test_thinned_draws_keep_the_warnings_of_all():
    good, z = some(4, 500), np.random.default_rng(0).normal(size=(4, 500, 3))
    assert good.warnings() == good.thin(8).warnings() == good.thin(40).thin(8).warnings() == []
    bad = Draws(z + 9 * np.arange(4)[:, None, None])
    assert bad.thin(8).warnings() == bad.warnings() != []
    with pytest.raises(InputError, match="n_draws: expected a whole number of at least 1"):
        good.thin(0)


def test_moments_over_all_chains():
    draws = some(k=3)
    rows = draws.z.reshape(-1, 3)
    np.testing.assert_allclose(draws.mean(), rows.mean(0))
    np.testing.assert_allclose(draws.covariance(), np.cov(rows.T))
    single = some(k=1)
    assert single.covariance().shape == (1, 1)
    np.testing.assert_allclose(single.covariance()[0, 0], single.z.var(ddof=1))


# --- diagnostics ---------------------------------------------------------------------------------


def test_diagnostics_equal_arvizs():
    draws = some(k=2, seed=3)
    for name, method in (("rhat", "rank"), ("ess_bulk", "bulk"), ("ess_tail", "tail")):
        function = arviz.rhat if name == "rhat" else arviz.ess
        prob = {"prob": (0.05, 0.95)} if method == "tail" else {}
        expected = [float(function(draws.z[..., i], method=method, **prob)) for i in range(2)]
        np.testing.assert_allclose(getattr(draws, name)(), expected, rtol=1e-6)


def test_summary_has_a_row_per_coordinate():
    draws = some()
    table = draws.summary()
    rows = draws.flat()
    assert list(table.index) == ["z[0]", "z[1]", "z[2]"]
    assert table.index.name == "coordinate"
    np.testing.assert_allclose(table["mean"], rows.mean(0))
    np.testing.assert_allclose(table["sd"], rows.std(0, ddof=1))
    np.testing.assert_allclose(table["2.5%"], np.quantile(rows, 0.025, axis=0))
    np.testing.assert_allclose(table["97.5%"], np.quantile(rows, 0.975, axis=0))
    np.testing.assert_array_equal(table["rhat"], draws.rhat())
    np.testing.assert_array_equal(table["ess_bulk"], draws.ess_bulk())
    np.testing.assert_array_equal(table["ess_tail"], draws.ess_tail())


def test_good_draws_give_no_warnings():
    draws = some(4, 1000)
    assert draws.warnings() == []
    assert repr(draws) == "Draws(chains=4, draws=1000, rank=3; no warnings)"


def test_warning_of_chains_that_disagree():
    draws = some(4, 1000)
    draws.z[0, :, 1] += 3
    first, second = draws.warnings()
    assert first.startswith("R-hat is 1.")
    assert "chains are in different places; lower the rank, raise the temperature" in first
    assert second.startswith("bulk effective sample size is ")
    assert "R-hat" in repr(draws)


def test_warning_suggests_the_number_of_draws():
    """Autoregressive chains: of twice the draws named, the effective sample is large enough."""

    def chains(n):
        rng, z = np.random.default_rng(3), np.zeros((4, n, 1))
        for i in range(1, n):
            z[:, i] = 0.97 * z[:, i - 1] + rng.normal(size=(4, 1))
        return Draws(z, engine="elliptical-slice")

    said = chains(600).warnings()
    assert "follow gradients (inference='nuts')" in said[0]
    about = int(said[-1].split("about ")[1].rstrip(")"))
    assert 3000 <= about <= 20000
    assert not any("effective" in s for s in chains(2 * about).warnings())


def test_warning_of_slowly_mixing_chains():
    z = np.cumsum(np.random.default_rng(0).normal(size=(4, 500, 1)) * 0.1, 1)
    said = Draws(z + np.linspace(0, 0.01, 4)[:, None, None]).warnings()
    assert any("bulk effective sample size" in s and "below 400: run longer" in s for s in said)


@pytest.mark.parametrize(
    "z", [np.zeros((2, 50, 1)), np.full((2, 50, 3), np.nan), np.full((1, 50, 2), 7.0)]
)
def test_warning_of_constant_chains(z):
    draws = Draws(z)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (said,) = draws.warnings()
        repr(draws)
    k = z.shape[2]
    assert said == (
        f"{k} of {k} coordinates never moved or are not finite: start elsewhere "
        "(initial=...) or check the prior"
    )


def test_warning_of_a_constant_coordinate():
    draws = some(4, 1000)
    draws.z[..., 1] = 2.0
    (said,) = draws.warnings()
    assert said.startswith("1 of 3 coordinates never moved")


def test_warning_of_one_constant_chain():
    draws = some(4, 1000)
    draws.z[2] = draws.z[2, 0]
    first = draws.warnings()[0]
    assert first == (
        "1 of 4 chains never moved (the first is chain 2): start them elsewhere "
        "(initial=...), or use another engine (inference='slice')"
    )


def test_warning_of_chains_in_separate_modes(unchecked):
    """HMC on two bumps 16 standard deviations apart: no chain crosses."""
    density = Bimodal(3, prior=Normal(5.0), distance=4.0, sd=0.5)
    start = np.random.default_rng(0).normal(size=(6, 3)) * 0.5
    start[:, 0] += np.array([-4, 4, 4, -4, 4, 4])
    draws = HMC().sample(density, draws=200, chains=6, warmup=100, initial=start, progress=False)
    assert [g.tolist() for g in diagnostics.separate_groups(draws.z)] == [[1, 2, 4, 5], [0, 3]]
    first, *others = draws.warnings()
    assert first.startswith("chains are stuck in 2 modes (4 and 2 chains, of mean log density ")
    assert "sample with inference='smc' or 'parallel-tempering'" in first
    assert not any("R-hat" in line for line in others)
    near = HMC().sample(Bimodal(3, distance=1.0), draws=200, chains=6, warmup=100, progress=False)
    assert not any("stuck" in line for line in near.warnings())


@pytest.mark.parametrize("k", [1, 20])
@pytest.mark.parametrize("memory", [0.0, 0.9, 0.999])
def test_no_false_warning_of_modes(k, memory):
    """Good chains, slow chains and chains still on their way are not chains in modes."""
    rng = np.random.default_rng(1)
    for draws in (20, 300):
        z = rng.normal(size=(8, draws, k))
        for i in range(1, draws):
            z[:, i] = memory * z[:, i - 1] + np.sqrt(1 - memory**2) * z[:, i]
        assert not any("stuck" in line for line in Draws(z).warnings())


def test_warning_of_too_few_draws():
    draws = some(2, 3)
    assert draws.warnings() == ["fewer than 4 draws per chain: run longer (draws=...)"]
    assert np.isnan(draws.rhat()).all()
    assert "fewer than 4" in repr(draws)


@pytest.mark.parametrize("function", [diagnostics.rhat, diagnostics.ess_bulk, diagnostics.ess_tail])
def test_diagnostics_of_constant_chains_are_nan(function):
    assert np.isnan(function(np.zeros((2, 50, 3)))).all()
    assert np.isnan(function(np.zeros((2, 50))))


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_invalid_draws_raise():
    with pytest.raises(InputError, match=r"z: expected shape \(chains, draws, k\), got \(3, 2\)"):
        Draws(np.zeros((3, 2)))
    with pytest.raises(InputError, match=r"stats\['x'\]: expected shape \(2, 5\), got \(2, 4\)"):
        Draws(np.zeros((2, 5, 1)), {"x": np.zeros((2, 4))})


@pytest.mark.parametrize("n", [0, -3])
def test_invalid_numbers_of_rows_raise(n):
    with pytest.raises(InputError, match="n_draws: expected a whole number of at least 1"):
        some().flat(n)


def test_warning_of_divergences_and_low_ebfmi():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4, 500, 2))
    stats = {"divergent": np.zeros((4, 500), dtype=bool), "energy": rng.normal(size=(4, 500))}
    assert Draws(z, stats).warnings() == []
    stats["divergent"][1, :3] = True
    stats["energy"] = np.cumsum(stats["energy"], 1)
    first, second = Draws(z, stats, engine="nuts").warnings()
    assert first.startswith("3 of 2000 trajectories diverged: raise target_acceptance")
    assert second.startswith("E-BFMI is 0.0")


def test_ebfmi_equals_arvizs():
    arviz = pytest.importorskip("arviz")
    energy = np.cumsum(np.random.default_rng(1).normal(size=(3, 200)), 1) * 0.1
    energy += np.random.default_rng(2).normal(size=energy.shape)
    if not hasattr(arviz, "bfmi"):
        pytest.skip("this arviz has no bfmi")
    np.testing.assert_allclose(diagnostics.ebfmi(energy), arviz.bfmi(energy))


def test_warning_of_a_poor_approximation():
    z = np.random.default_rng(0).normal(size=(4, 500, 2))
    assert Draws(z, independent=True, pareto_k=0.3).warnings() == []
    (said,) = Draws(z, independent=True, pareto_k=0.9).warnings()
    assert said.startswith("Pareto k of the approximation is 0.90, above 0.7")


def test_independent_draws_have_no_chain_warnings():
    z = np.random.default_rng(0).normal(size=(4, 20, 2)) + np.arange(4)[:, None, None]
    assert any("R-hat" in line for line in Draws(z).warnings())
    assert Draws(z, independent=True).warnings() == []
    assert not Draws(z).independent


def test_draws_of_a_density_without_a_finite_integral_are_warned_of():
    walks = np.random.default_rng(0).normal(size=(4, 200, 2)).cumsum(1)
    (warning,) = Draws(walks * 1e17).warnings()
    assert re.match(
        r"draws reach \de\+18 and chains disagree .*: the density seems to have", warning
    )
    assert "smc" not in warning
    assert "no finite integral" not in " ".join(Draws(walks).warnings())
    proper = np.random.default_rng(1).normal(size=(4, 400, 2)) * 1e17
    assert Draws(proper).warnings() == []


@pytest.mark.parametrize("k", [1, 3])
def test_chains_of_which_none_moves_are_told_so_alone(k):
    z = np.repeat(np.arange(3.0)[:, None, None], 50, axis=1) + np.arange(k)
    (said,) = Draws(z).warnings()
    assert said == (
        "none of the 3 chains moved from its start: start them elsewhere (initial=...), or use "
        "another engine (inference='slice')"
    )


@pytest.mark.parametrize(("shift", "words"), [(4.0, "are in different places"), (0.35, "disagree")])
def test_halves_of_a_single_chain(shift, words):
    draws = some(1, 1000, 1)
    draws.z[:, 500:] += shift
    said = draws.warnings()[0]
    assert said.startswith("R-hat is ")
    assert f"above 1.01: the halves of the chain {words}; " in said
    assert "chains" not in said


def test_energy_errors_far_above_their_target_are_reported():
    rng = np.random.default_rng(0)
    k, target = 5, 0.01
    error = np.sqrt(k * target) * rng.normal(size=(3, 200))
    error[0, :10] *= 1e3  # rare errors, as networks have them, are not
    z = rng.normal(size=(3, 200, k))

    def lines(error, **meta):
        found = Draws(z, {"energy_error": error}, engine="mclmc", meta=meta).warnings(separate=True)
        return [line for line in found if line.startswith("energy errors")]

    assert lines(error, target=target) == []
    error[2] *= np.sqrt(30)
    (line,) = lines(error, target=target)
    assert line.startswith("energy errors of 1 of 3 chains exceed their target (squares are ")
    factor = int(line.partition("up to ")[2].partition(" times 0.01 ")[0])
    assert factor == pytest.approx(30, rel=0.3)
    assert line.endswith("warm up longer (warmup=...)")
    assert lines(error) == []
    assert lines(1e-3 * error, target=target) == []


def test_draws_of_mclmc_know_their_target():
    options = {"draws": 5, "chains": 2, "warmup": 20, "progress": False}
    for both, last in ((0.02, 0.02), ((0.5, 0.1), 0.1)):
        assert MCLMC(target=both).sample(Toy(3), **options).meta["target"] == last
