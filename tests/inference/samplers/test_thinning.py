"""Divergences and E-BFMI of thinned chains are those of the same chains without thinning."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from densities import Toy

from subbayes import diagnostics
from subbayes.draws import Draws
from subbayes.inference.samplers.hmc import HMC
from subbayes.inference.samplers.mams import MAMS
from subbayes.inference.samplers.nuts import NUTS

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

THIN, KEPT = 5, 12
ADDED = {"divergences", "ebfmi"}


class Cliff(Toy):
    """A half normal, whose edge is a divergence; may be interrupted after some evaluations."""

    stop = None

    def likelihood(self, z):
        if self.stop is not None:
            self.stop -= 1
            if self.stop == 0:
                os.kill(os.getpid(), signal.SIGINT)
        return np.where(z[:, 0] > 0, 0.0, -np.inf), np.zeros_like(z)


def run(engine, draws, thin, posterior=None, **options):
    options = {"chains": 3, "warmup": 0, "seed": 1, "progress": False} | options
    posterior = Cliff(2) if posterior is None else posterior
    return engine(step_size=0.5).sample(posterior, draws=draws, thin=thin, **options)


def thinned(stats, thin):
    """Statistics of the draws kept, from those of all transitions, shape (chains, draws x thin)."""
    kept = {name: values[:, thin - 1 :: thin] for name, values in stats.items()}
    chains, draws = kept["divergent"].shape
    kept["divergences"] = stats["divergent"].reshape(chains, draws, thin).sum(2)
    if "energy" in kept:
        fractions = diagnostics.ebfmi(stats["energy"])
        kept["ebfmi"] = np.repeat(fractions[:, None], draws, 1)
    return kept


@pytest.mark.parametrize("warmup", [0, 30])
@pytest.mark.parametrize("engine", [NUTS, HMC, MAMS])
def test_thinned_chains_report_all_transitions(engine, warmup):
    every = run(engine, KEPT * THIN, 1, warmup=warmup)
    kept = run(engine, KEPT, THIN, warmup=warmup)
    np.testing.assert_array_equal(kept.z, every.z[:, THIN - 1 :: THIN])
    parts = every.stats["divergent"].reshape(3, KEPT, THIN)
    assert parts.sum() > every.stats["divergent"][:, THIN - 1 :: THIN].sum()
    np.testing.assert_array_equal(kept.stats["divergences"], parts.sum(2))
    assert not ADDED & set(every.stats)
    expected = thinned(every.stats, THIN)
    assert expected.keys() == kept.stats.keys()
    for name, values in kept.stats.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-12, err_msg=name)
        assert values.dtype == expected[name].dtype


def test_warnings_of_thinned_chains():
    """Three of the four divergences, and the slow energies, are between the draws kept."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4, 500, 2))
    divergent = np.zeros((4, 2000), dtype=bool)
    divergent[1, :4] = True
    slow = np.cumsum(rng.normal(size=(4, 2000)), 1) * 0.1
    stats = thinned({"divergent": divergent, "energy": slow}, 4)
    first, second = Draws(z, stats, {"thin": 4}, engine="nuts").warnings()
    assert first.startswith("4 of 8000 trajectories diverged")
    assert second.startswith(f"E-BFMI is {diagnostics.ebfmi(slow).min():.2f}")
    assert diagnostics.ebfmi(slow[:, 3::4]).min() > 1.2 * diagnostics.ebfmi(slow).min()


@pytest.mark.parametrize("stop", [7, 40, 101])
def test_an_interrupted_thinned_run_resumes_with_the_same_statistics(tmp_path, stop):
    """It stops between two draws that are kept, whose statistics are in the checkpoint."""
    whole, cliff = run(NUTS, KEPT, THIN), Cliff(2)
    cliff.stop = stop
    with pytest.raises(KeyboardInterrupt):
        run(NUTS, KEPT, THIN, cliff, checkpoint=tmp_path / "run")
    again = run(NUTS, KEPT, THIN, checkpoint=tmp_path / "run")
    longer = run(NUTS, KEPT + 3, THIN, checkpoint=tmp_path / "run")
    shorter = run(NUTS, KEPT - 2, THIN, checkpoint=tmp_path / "run")
    for found, count in ((again, KEPT), (longer, KEPT), (shorter, KEPT - 2)):
        for name, values in whole.stats.items():
            if name == "ebfmi" and found.n_draws != KEPT:
                continue  # of all transitions of another run
            np.testing.assert_array_equal(
                found.stats[name][:, :count], values[:, :count], err_msg=name
            )


def test_draws_without_a_record_of_thinning_count_as_not_thinned():
    z = np.random.default_rng(0).normal(size=(2, 50, 1))
    draws = Draws(z, {"divergences": np.eye(2, 50)}, engine="nuts")
    assert any(message.startswith("2 of 100 trajectories") for message in draws.warnings())
