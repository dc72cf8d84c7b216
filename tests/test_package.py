"""The package as a whole: light to import, complete without extras, honest about its versions."""

import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import subbayes

ROOT = Path(__file__).parent.parent
OPTIONAL = [
    "arviz",
    "pyarrow",
    "lightning",
    "pytorch_lightning",
    "beartype",
    "hypothesis",
    "blackjax",
    "jax",
    "dynesty",
    "emcee",
    "nutpie",
    "botorch",
    "gpytorch",
]
HEAVY = [
    *("sklearn", "pandas", "matplotlib", "scipy.stats", "scoringrules", "typer", "rich"),
    *("torch._dynamo", "torchvision"),
    *OPTIONAL,
]


def run(code):
    """Run code in a fresh interpreter, without the tests' import hook."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_nothing_heavy_and_a_regression_no_compiler_of_torch():
    code = f"""
import sys
import torch
before = set(sys.modules)
import subbayes
print([m for m in {HEAVY} if m in sys.modules and m not in before])
import numpy as np
import pandas as pd
from subbayes.regression import Regression
from subbayes import Sampling, SemiStructuredRegression

frame = pd.DataFrame({{"x": np.arange(30.0)}}).assign(y=lambda rows: np.sin(rows.x))
few = Sampling(draws=50, chains=2, progress=False)
Regression("y ~ x").fit(frame, sampling=few)
groups = pd.DataFrame({{"y": np.sin(np.arange(80.0)), "g": np.arange(80) % 20}})
model = Regression("y ~ (1 | g)").fit(groups, sampling=few).state.model
for _ in range(200):
    model.effects_likelihood.value(torch.zeros(1, model.structured.size).double())
print("torch._dynamo" in sys.modules)
"""
    assert run(code).splitlines() == ["[]", "False"]


def test_every_module_imports_without_the_extras_and_leaves_global_state_alone():
    walked = pkgutil.walk_packages(subbayes.__path__, "subbayes.")
    modules = [m.name for m in walked if m.name != "subbayes.botorch"]  # which is an extra
    code = f"""
import importlib, signal, sys
import numpy as np
import torch
for name in {OPTIONAL}:
    sys.modules[name] = None
def state():
    return (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(),
            torch.is_grad_enabled(), torch.distributions.Distribution._validate_args,
            str(np.random.get_state()[1][:3]), np.geterr(),
            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
before = state()
for module in {modules}:
    importlib.import_module(module)
print(state() == before)
try:
    import subbayes.botorch
except ImportError as error:
    print(error)
"""
    lines = run(code).splitlines()
    assert lines[0] == "True"
    assert lines[1].endswith("pip install 'subbayes[botorch]'")


@pytest.mark.parametrize("name", subbayes.__all__)
def test_public_names_exist_and_are_documented(name):
    value = getattr(subbayes, name)
    assert name == "__version__" or value.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'subbayes' has no attribute 'nothing'"):
        subbayes.nothing


def test_version_is_said_once():
    assert version("subbayes") == subbayes.__version__


def test_type_information_is_shipped():
    assert (Path(subbayes.__file__).parent / "py.typed").exists()


def test_oldest_versions_are_the_declared_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = ("arviz", "parquet", "adapters", "experiments")
    declared = [*project["dependencies"], *(line for name in tested for line in extras[name])]
    lower = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups() for line in declared)
    torch_oldest = re.search(r"^TORCH_OLDEST \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line) | {"torch": torch_oldest}
    assert {k: _release(v) for k, v in pinned.items()} == {k: _release(v) for k, v in lower.items()}


def _release(text):
    """A version without trailing zeros: 2.2.0 and 2.2 are the same."""
    return re.sub(r"(\.0)+$", "", text)


def test_modules_import_downwards():
    """No room imports the rooms above it."""
    for low, high in [
        ("networks", "posterior"),
        ("likelihoods", "networks"),
        ("posterior", "models"),
    ]:
        module = importlib.import_module(f"subbayes.{low}")
        folder = Path(module.__file__)
        files = folder.parent.rglob("*.py") if folder.name == "__init__.py" else [folder]
        for file in files:
            imports = re.findall(r"^(?:from|import) subbayes\.?(\w+)", file.read_text(), re.M)
            assert high not in imports
