"""Classes of another package take part in everything by their names.

The package stands in this folder with the metadata of an installed one.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from subbayes import InputError
from subbayes.comparison.registry import METHODS, SubspaceInference
from subbayes.inference.engine import ENGINES, Engine
from subbayes.utils.registry import Registry

HERE = Path(__file__).parent


def call(*words, cwd):
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )


def test_classes_of_another_package_fit_compare_save_load_and_report(tmp_path):
    done = call(HERE / "job.py", tmp_path, cwd=tmp_path)
    assert done.stdout.strip().endswith("done"), done.stderr


def test_a_family_a_term_and_a_prior_of_another_package_take_part_in_regressions(tmp_path):
    done = call(HERE / "regression.py", tmp_path, cwd=tmp_path)
    assert done.stdout.strip().endswith("done"), done.stderr


@pytest.mark.slow
def test_the_command_line_takes_their_names(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 2))
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": x[:, 0] + rng.standard_normal(60)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    run = ["-c", "import sys; from subbayes.cli import run; sys.exit(run(sys.argv[1:]))"]
    small = ["--hidden", "4", "--epochs", "3", "--draws", "20", "--chains", "2", "--quiet"]
    words = [
        "fit",
        "t.csv",
        "--target",
        "y",
        "--out",
        "m",
        "--subspace",
        "stripes",
        "--inference",
        "random-walk",
    ]
    done = call(*run, *words, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = call(*run, *["predict", "m", "t.csv", "--out", "p.csv", "--quiet"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(pd.read_csv(tmp_path / "p.csv")) == 60
    words = ["compare", "t.csv", "--target", "y", "--methods", "map,rounded,stripes"]
    done = call(*run, *words, *small[:-1], "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rounded weights" in done.stdout or "rounded" in done.stdout


def test_names_are_taken_once():
    with pytest.raises(InputError, match="'nuts', which is taken"):
        ENGINES.register("nuts")
    names = Registry("colour", {"blue": "subbayes.draws:Draws"})

    @names.register("red")
    class Red: ...

    assert dict(names) == {"blue": names["blue"], "red": Red}
    assert len(names) == 2
    with pytest.raises(KeyError):
        names["green"]


def test_methods_are_subspaces_with_an_engine_after_a_hyphen():
    assert METHODS["pca-nuts"] == SubspaceInference("pca", "nuts")
    assert METHODS["optimal-laplace"] == SubspaceInference("optimal", "laplace-linearised")
    assert METHODS["curve"] == SubspaceInference("curve")
    for name in ("pcanuts", "pca-", "-nuts", "pca-gibbs", "nuts"):
        assert name not in METHODS


def test_a_registered_engine_is_known_by_its_name():
    assert issubclass(ENGINES["nuts"], Engine)
    assert "random-walk" not in ENGINES  # which needs the folder of this test on the path
