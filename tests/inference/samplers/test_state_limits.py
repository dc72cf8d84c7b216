"""States of samplers in checkpoints: those of runs are accepted, all others are refused."""

from __future__ import annotations

import copy
import os
import signal

import numpy as np
import pytest
import torch
from densities import Banana, Narrow, Toy

from subbayes.inference.samplers import chain_storage
from subbayes.inference.samplers.chain_storage import Store
from subbayes.inference.samplers.chains import chain_generators, start_points
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.hmc import HMC
from subbayes.inference.samplers.mams import MAMS
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.inference.samplers.nuts import NUTS
from subbayes.inference.samplers.parallel_tempering import ParallelTempering
from subbayes.inference.samplers.slice import SliceSampling
from subbayes.inference.samplers.state_limits import near, windows, wrong_field
from subbayes.utils import artifact
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")

ENGINES = {
    "elliptical-slice": EllipticalSlice(),
    "slice": SliceSampling(),
    "slice-dense": SliceSampling(metric="dense"),
    "hmc": HMC(),
    "hmc-diagonal": HMC(metric="diagonal"),
    "mclmc": MCLMC(),
    "mclmc-diagonal": MCLMC(metric="diagonal", length="scale", integrator="leapfrog"),
    "mclmc-prior": MCLMC(metric="prior", target=(0.5, 0.1)),
    "mams": MAMS(),
    "mams-diagonal": MAMS(metric="diagonal", integrator="leapfrog"),
    "nuts": NUTS(),
    "nuts-diagonal": NUTS(metric="diagonal", max_depth=3),
    "parallel-tempering": ParallelTempering(4),
}


class Half(Toy):
    """A normal posterior of which one half has zero density."""

    def likelihood(self, z):
        """Minus infinity where the first coordinate is negative."""
        return np.where(z[:, 0] < 0, -np.inf, 0.0), np.zeros_like(z)


DENSITIES = {
    "normal": Toy(3),
    "narrow": Narrow(2, temperature=2.0),
    "banana": Banana(2),
    "half": Half(2),
}


@pytest.mark.parametrize(
    "warmup", [0, 150, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 30))]
)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_state_of_a_run_is_accepted(engine, density, warmup):
    posterior, chains = DENSITIES[density], 3
    kernel, rngs = ENGINES[engine].kernel(posterior, warmup), chain_generators(1, chains)
    store = Store(np.zeros((chains, 5000, posterior.rank)), {}, np.zeros(chains, dtype=np.int64))
    with np.errstate(all="ignore"):
        state = kernel.init(posterior, start_points(posterior, "prior", rngs), rngs)
        for _ in range(1200):
            assert wrong_field(state, kernel.limits(posterior, state, store)) is None
            state, info = kernel.step(posterior, state, rngs)
            store.add(state, info, warmup, 1)
            if store.count.min() > warmup + 40:
                break
    assert store.count.min() > 0


CHANGES = {
    "nan": np.nan,
    "infinity": np.inf,
    "minus infinity": -np.inf,
    "huge": 2.0**62,
    "negative": -3.0,
    "zero": 0.0,
    "largest": 2.0**63 - 1025,
}

ANY_NUMBER = ("huge", "negative", "zero", "largest")
POSSIBLE = {
    # A density may have any gradient, and its draws may be at any point.
    "gradient": ANY_NUMBER,
    "z": ANY_NUMBER,
    "points": ANY_NUMBER,
    "start": ANY_NUMBER,
    # The covariance of a Laplace approximation, which the mass matrix no longer follows.
    **dict.fromkeys(("target", "laplace"), ("huge", "zero", "largest")),
    # Ellipses pass through draws of any Gaussian.
    "direction": ANY_NUMBER,
    # A log density may be of any sign; a search may be at any angle of a bracket that contains 0.
    "threshold": ("negative", "zero"),
    **dict.fromkeys(("angle", "low", "high", "trial"), ("zero",)),
    # A generator may draw these.
    "uniforms": ("zero",),
    "normals": ("zero", "negative"),
    "swap_uniforms": ("zero",),
    "n_normals": ("zero",),  # elliptical slice sampling refills a block before it reads it
    # Sums over momenta and over densities of the points of a trajectory or a rung.
    "p_sum": ANY_NUMBER,
    "sub_p_sum": ANY_NUMBER,
    "sub_log_weight": ("huge", "largest"),
    "log_weight": ("huge", "largest"),
    "levels": ANY_NUMBER,
    "bridge_up": (*ANY_NUMBER, "minus infinity"),
    "bridge_down": ANY_NUMBER,
    # Spread of draws of any size; the running mean of the logarithm of any step size.
    "log_step_mean": ("negative", "zero"),
    "window_mean": ANY_NUMBER,
    "window_spread": ("huge", "zero", "largest"),
    # The first angle is an end of its bracket, which its rejection leaves as wide as it was.
    "evaluations": ("zero",),
    "expansions": ("zero",),  # both ends of the interval are off the slice
    "excess": ("zero",),  # of the acceptance, which may be as wanted
    "acceptance": ("zero",),  # of points of very low density
    # Nothing has happened yet: the counts of a new round, draw or line.
    **dict.fromkeys(("failures", "consecutive", "restarts"), ("zero",)),
    **dict.fromkeys(("steps", "trips", "origin", "moves_left", "spent"), ("zero",)),
}
"""Changes of a field that yield what a run can have, with the reasons."""


def interrupted(engine, posterior, path, steps=700, **options):
    """The content of a checkpoint of chains that are amid their draws."""
    name = "value_and_grad" if engine.name in ("hmc", "nuts", "mclmc", "mams") else "log_likelihood"
    evaluate, calls = getattr(posterior, name), [0]

    def interrupting(z):
        calls[0] += 1
        if calls[0] == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(z)

    setattr(posterior, name, interrupting)
    with pytest.raises(KeyboardInterrupt):
        engine.sample(posterior, checkpoint=path, **options)
    setattr(posterior, name, evaluate)
    return artifact.read(path)


@pytest.mark.parametrize(
    "engine", ["elliptical-slice", "slice", "hmc", "mclmc", "mams", "nuts", "parallel-tempering"]
)
@pytest.mark.parametrize("warmup", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_changed_fields_are_refused(engine, warmup, tmp_path, monkeypatch):
    sampler, posterior = ENGINES[engine], Banana(2)
    options = {"draws": 3000, "warmup": warmup, "chains": 3, "progress": False}
    tensors, facts, kind = interrupted(sampler, posterior, tmp_path / "run", **options)
    accepted = set()
    for name in [name for name in tensors if name.startswith("state.")]:
        for label, value in CHANGES.items():
            whole = not tensors[name].is_floating_point()
            if whole and not np.isfinite(value):
                continue
            forged = tensors | {
                name: torch.full_like(tensors[name], int(value) if whole else value)
            }
            if torch.equal(forged[name], tensors[name]):
                continue
            found = artifact.Artifact(forged, copy.deepcopy(facts), kind)
            monkeypatch.setattr(chain_storage, "read_checkpoint", lambda *_, found=found: found)
            monkeypatch.setattr("subbayes.inference.samplers.chains._most_steps", lambda *_: 0)
            with pytest.raises(InputError) as caught:  # a state that is accepted fails to sample
                sampler.sample(posterior, checkpoint=tmp_path / "run", **options)
            assert "\n" not in str(caught.value)
            if caught.value.argument != "checkpoint":
                accepted.add((name.removeprefix("state."), label))
    unexpected = {(n, label) for n, label in accepted if label not in POSSIBLE.get(n, ())}
    assert not unexpected, sorted(unexpected)


def _all(name, value, chain=slice(None)):
    def change(tensors, facts):
        tensors[name][chain] = value

    return change


def _both_densities(tensors, facts):
    """Log density and log-likelihood of the points, and what follows from them."""
    tensors["state.log_likelihood"] += 100.0
    tensors["state.threshold"] += 100.0
    if "state.value" in tensors:
        tensors["state.value"] += 100.0


def _higher(tensors, facts):
    """A higher density of every point of the trajectories."""
    tensors["state.value"] += 1e3
    tensors["state.start_energy"] -= 1e3
    tensors["state.end"][:, 4 * 2] += 1e3


def _of_stream(increment):
    def change(tensors, facts):
        facts["rngs"][0]["state"]["inc"] = increment

    return change


FORGED = {
    "mclmc": {
        "direction": _all("state.direction", 0.0, 1),
        "density": _all("state.value", 1e30),
        "stream": _of_stream(0),
        "stream of another seed": _of_stream(12345),
    },
    "mams": {
        "direction": lambda tensors, facts: tensors["state.end"][1, 2:4].zero_(),
        "density": _higher,
    },
    "hmc": {"density": _higher},
    "slice": {"density": _both_densities},
    "elliptical-slice": {
        "density": _both_densities,
        "evaluations": _all("stats.evaluations", 2**63 - 1),
        "evaluations of a draw": _all("stats.evaluations", 10**6, (0, 0)),
    },
    "parallel-tempering": {
        "moves": _all("state.moves_made", 100, (0, 0)),
        "swaps": _all("state.swaps_tried", 2.0, (0, 0)),
        "density": lambda tensors, facts: tensors["state.log_likelihood"].add_(10.0),
    },
}


@pytest.mark.parametrize("engine", FORGED)
def test_forged_states_whose_parts_agree_are_refused(engine, tmp_path):
    posterior, sampler = Banana(2), ENGINES[engine]
    options = {"draws": 300, "warmup": 20, "chains": 3, "progress": False}
    found = interrupted(sampler, posterior, tmp_path / "run", steps=200, **options)
    for name, change in FORGED[engine].items():
        tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
        facts = copy.deepcopy(found.facts)
        change(tensors, facts)
        artifact.write(tmp_path / "run", found.kind, tensors, facts, overwrite=True)
        with pytest.raises(InputError, match="checkpoint") as caught:
            sampler.sample(posterior, checkpoint=tmp_path / "run", **options)
        assert "\n" not in str(caught.value), name
    artifact.write(tmp_path / "run", found.kind, found.tensors, found.facts, overwrite=True)
    resumed = sampler.sample(posterior, checkpoint=tmp_path / "run", **options)
    assert np.array_equal(resumed.z, sampler.sample(posterior, **options).z)


def test_windows_are_of_points_that_a_chain_can_visit():
    z, count = np.array([[0.5, 2.0]]), np.array([3])
    mean, scatter = z + 0.1, np.ones((1, 2))
    assert windows(mean, scatter, count, z).all()
    assert windows(mean * 0, scatter * 0, count * 0, z).all()
    assert not windows(mean, scatter, count * 0, z).any()
    for forged in (-1e17, 1e17, np.nan):
        assert not windows(mean * 0 + forged, scatter, count, z).any()
    for forged in (-1.0, 1e17, np.inf, np.nan):
        assert not windows(mean, scatter * forged, count, z).any()


def test_points_are_near_the_gaussian_that_they_follow():
    points = np.array([[[3.0, -2.0], [1e150, 0.0]], [[1e8, 0.0], [np.nan, 0.0]]])
    assert near(points, 1.0, np.array([2.0, 5.0])).tolist() == [[True, False], [False, False]]
