"""An interrupted run resumes and yields the same draws, bit for bit."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from densities import Banana
from oracles import LinearGaussian

from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.hmc import HMC
from subbayes.inference.samplers.mams import MAMS
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.inference.samplers.nuts import NUTS
from subbayes.inference.samplers.parallel_tempering import ParallelTempering
from subbayes.inference.samplers.slice import SliceSampling
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

DRAWS = 400
SCRIPT = textwrap.dedent(f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parents[2])!r})
    import torch
    torch.set_num_threads(1)
    from oracles import LinearGaussian
    from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
    print("go", flush=True)
    EllipticalSlice().sample(
        LinearGaussian().posterior(), draws={DRAWS}, chains=3, warmup=10,
        checkpoint=sys.argv[1], checkpoint_seconds=0.01, progress=False,
    )
    print("done", flush=True)
""")


@functools.cache
def uninterrupted() -> np.ndarray:
    return (
        EllipticalSlice()
        .sample(LinearGaussian().posterior(), draws=DRAWS, chains=3, warmup=10, progress=False)
        .z
    )


def resumed(path: Path) -> np.ndarray:
    return (
        EllipticalSlice()
        .sample(
            LinearGaussian().posterior(),
            draws=DRAWS,
            chains=3,
            warmup=10,
            checkpoint=path,
            progress=False,
        )
        .z
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 1), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_stopped_runs_resume_bit_for_bit(tmp_path, number, code):
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not (path / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert "done" not in out
    assert process.returncode in (code, -number)
    assert np.array_equal(resumed(path), uninterrupted())


def test_a_finished_run_is_read_and_can_be_extended(tmp_path):
    posterior = LinearGaussian().posterior()
    options = dict(chains=4, warmup=5, thin=2, progress=False)
    path = tmp_path / "run"
    short = EllipticalSlice().sample(posterior, draws=20, checkpoint=path, **options)
    again = EllipticalSlice().sample(posterior, draws=20, checkpoint=path, **options)
    assert again.meta["seconds"] >= short.meta["seconds"]  # those of the first run count
    longer = EllipticalSlice().sample(posterior, draws=70, checkpoint=path, **options)
    fresh = EllipticalSlice().sample(posterior, draws=70, **options)
    assert np.array_equal(short.z, again.z)
    assert np.array_equal(longer.z, fresh.z)
    assert np.array_equal(longer.stats["log_likelihood"], fresh.stats["log_likelihood"])
    assert np.array_equal(
        EllipticalSlice().sample(posterior, draws=10, checkpoint=path, **options).z, fresh.z[:, :10]
    )
    kept = EllipticalSlice().sample(posterior, draws=70, checkpoint=path, **options)
    assert np.array_equal(kept.z, fresh.z)  # the shorter run did not cut the longer one


def test_a_run_that_resumes_evaluates_no_start_points(tmp_path):
    posterior = LinearGaussian().posterior()
    options = dict(draws=5, chains=3, warmup=20, progress=False, checkpoint=tmp_path / "run")
    first = NUTS().sample(posterior, **options)
    posterior.value_and_grad = lambda z: pytest.fail("evaluated")
    second = NUTS().sample(posterior, **options)
    assert np.array_equal(first.z, second.z)


def test_a_shorter_run_in_an_interrupted_one_resumes_too(tmp_path):
    """Interrupted again and again, asked for more and fewer draws in turns."""
    posterior = LinearGaussian().posterior()
    evaluate, steps = posterior.log_likelihood, [0]

    def interrupting(z):
        steps[0] += 1
        if steps[0] % 60 == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(z)

    posterior.log_likelihood = interrupting
    options = dict(chains=3, warmup=10, progress=False)
    lengths, stopped = (80, 40), 0
    while True:
        length = lengths[stopped % 2]
        try:
            found = EllipticalSlice().sample(
                posterior, draws=length, checkpoint=tmp_path / "run", **options
            )
        except KeyboardInterrupt:
            stopped += 1
            assert stopped < 30  # every run goes on from the one before
        else:
            if length == 80:
                break
            stopped += 1
    assert stopped > 3
    fresh = EllipticalSlice().sample(LinearGaussian().posterior(), draws=80, **options)
    assert np.array_equal(found.z, fresh.z)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(seed=9), "seed"),
        (dict(warmup=7), "warmup"),
        (dict(chains=2), "chains"),
        (dict(initial="shift"), "initial"),
    ],
)
def test_checkpoints_of_other_settings_are_rejected(tmp_path, change, what):
    posterior = LinearGaussian().posterior()
    options = dict(draws=5, chains=3, warmup=1, progress=False, checkpoint=tmp_path / "run")
    EllipticalSlice().sample(posterior, **options)
    with pytest.raises(InputError, match=f"checkpoint: expected one made with the same {what}"):
        EllipticalSlice().sample(posterior, **options | change)


def test_checkpoints_of_another_posterior_are_rejected(tmp_path):
    options = dict(draws=5, chains=3, progress=False, checkpoint=tmp_path / "run")
    EllipticalSlice().sample(LinearGaussian().posterior(), **options)
    with pytest.raises(InputError, match="checkpoint: expected one made with the same posterior"):
        EllipticalSlice().sample(LinearGaussian(noise=0.6).posterior(), **options)


@pytest.mark.parametrize(
    "engine",
    [EllipticalSlice(), SliceSampling(), HMC(), NUTS(), MCLMC(), MAMS(), ParallelTempering(4)],
    ids=lambda engine: engine.name,
)
def test_checkpoints_of_a_density_whose_code_has_changed_are_rejected(tmp_path, engine):
    """Its fingerprint is the same: only its values tell."""
    options = dict(chains=2, warmup=4, progress=False, checkpoint=tmp_path / "run")
    density = Banana(2)
    first = engine.sample(density, draws=3, **options)
    longer = engine.sample(density, draws=5, **options)
    assert np.array_equal(longer.z[:, :3], first.z)
    density.likelihood = lambda z: (-100.0 - 9.0 * (z**2).sum(1), -18.0 * z)
    with pytest.raises(InputError) as error:
        engine.sample(density, draws=7, **options)
    assert error.value.argument == "checkpoint"


def test_signal_handlers_are_restored(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    EllipticalSlice().sample(
        LinearGaussian().posterior(), draws=5, chains=2, progress=False, checkpoint=tmp_path / "run"
    )
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
