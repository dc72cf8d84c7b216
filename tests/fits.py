"""`fit` and `compare_methods` from flat settings, for tests that vary them one at a time."""

import dataclasses

import pandas as pd

from subbayes.comparison.comparison import compare_methods
from subbayes.comparison.registry import named_methods
from subbayes.inference.configuration import Sampling
from subbayes.priors import EvidencePrior
from subbayes.subspaces.registry import SUBSPACES

SAMPLING = {field.name for field in dataclasses.fields(Sampling)}
SUBSPACE = {"rank", "inputs", "covariance", "scale_prior"}


def fit_options(**flat):
    """Gather fields of `Sampling` and of the subspace in their objects."""
    options = {k: v for k, v in flat.items() if k not in SAMPLING | SUBSPACE}
    sampling = {k: v for k, v in flat.items() if k in SAMPLING}
    subspace = {k: v for k, v in flat.items() if k in SUBSPACE}
    if options.get("prior") == "evidence" and flat.get("subspace") != "optimal":
        options["prior"] = EvidencePrior(subspace.pop("covariance", None))
    kind = flat.get("subspace", "pca")
    if isinstance(kind, str) and kind in SUBSPACES and kind != "full":
        options["subspace"] = SUBSPACES[kind](**subspace)
    return options | {"sampling": Sampling(**sampling)}


NAMED = {"rank", "inputs", "covariance", "prior", "temperature", "draws", "members", "most_draws"}
DEFAULT = ("map", "swa", "swag", "ensemble", "pca", "random")


def compare(module, likelihood, data, test, methods=DEFAULT, *, n_draws=30, **flat):
    """`compare_methods` from flat settings; `n_draws` are the draws of baselines."""
    named = {k: v for k, v in flat.items() if k in NAMED - {"draws"}}
    sampling = {k: v for k, v in flat.items() if k in SAMPLING}
    rest = {k: v for k, v in flat.items() if k not in NAMED | SAMPLING}
    return compare_methods(
        module,
        likelihood,
        data,
        test,
        named_methods(methods, draws=n_draws, **named),
        sampling=Sampling(**sampling),
        **rest,
    )


def small_fit_command(folder, x, y):
    """Arguments of a quick `subbayes fit` of three columns to the folder "run"."""
    table, out = folder / "rows.csv", folder / "run"
    pd.DataFrame(x, columns=list("abc")).assign(y=y).to_csv(table, index=False)
    options = "--hidden 6 --epochs 3 --swa-epochs 2 --draws 10 --chains 2 --rank 5 --quiet"
    words = f"--target y --likelihood gaussian {options}".split()
    return ["fit", str(table), "--out", str(out), *words]


def with_network(formula, term, parameter=None):
    """A formula with the term of a network, in the formula of a parameter or of the location."""
    if parameter in (None, "mu"):
        if isinstance(formula, str):
            return f"{formula} + {term}"
        return formula | {"mu": f"{formula['mu']} + {term}"}
    parts = {"mu": formula} if isinstance(formula, str) else formula
    return parts | {
        parameter: f"{parts[parameter]} + {term}" if parameter in parts else f"~ {term}"
    }
