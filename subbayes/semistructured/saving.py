"""The artifact of a fitted semi-structured model.

It holds the arguments of the model, the columns and inputs of the training rows that the model
reads, the networks' weights and buffers, and the draws. Loading reads the rows as fitting did, so
that knots, levels, centres and scales are those of fitting.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from subbayes.draws import Draws
from subbayes.networks.mlp import MLP
from subbayes.networks.network import architecture_of
from subbayes.priors import Normal
from subbayes.semistructured.design_data import AuxiliaryColumns, check_network_names
from subbayes.semistructured.effect_priors import prior_config, prior_from
from subbayes.semistructured.families import FAMILIES, Family
from subbayes.semistructured.joint_posterior import FittedState, JointPosterior
from subbayes.semistructured.predictors import Deep
from subbayes.semistructured.specification import Specification
from subbayes.semistructured.subspace import JointSpace
from subbayes.subspace import from_config as subspace_from_config
from subbayes.subspaces.curve import WeightCurve
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.tensor_file import add_prefix, strip_prefix

__all__ = ["facts_of", "state_from", "tensors_of"]


def tensors_of(state: FittedState) -> dict[str, Tensor | np.ndarray]:
    """The tensors to save: subspace, draws, training rows, and networks with their inputs."""
    rows, space = state.model, state.space
    found = add_prefix("space", space.subspace.tensors()) | state.draws.state()[0]
    found["starts"] = space.start_points
    if space.curve is not None:
        found["curve"] = space.curve.points
    for i, name in enumerate(_columns_of(state)):
        found[f"rows.{i}"] = _store(rows.frame[name])[0]
    for i, (name, network) in enumerate(rows.specification.deep.items()):
        found |= add_prefix(f"network{i}", network.module.state_dict())
        if network.columns is None:
            found[f"inputs.{name}"] = rows.inputs[f"deep {name}"]
    return found


def facts_of(state: FittedState) -> dict[str, Any]:
    """The facts to save: arguments of the model, types of its columns, and facts of the draws."""
    rows, space, specification = state.model, state.space, state.model.specification
    family = specification.family
    known = type(family) in FAMILIES.values()
    formula = specification.formula
    return {
        "formula": formula if isinstance(formula, str) else dict(formula),
        "family": family.to_config() if known else {"own": repr(family)},
        "priors": {name: prior_config(prior) for name, prior in specification.priors.items()},
        **vars(specification.auxiliary),
        "missing": specification.missing,
        "orthogonal": specification.orthogonal,
        "seed": state.joint.seed,
        "mode": state.joint.mode,
        "columns": [{"name": name} | _store(rows.frame[name])[1] for name in _columns_of(state)],
        "dropped": rows.dropped,
        "networks": {name: _network_facts(network) for name, network in specification.deep.items()},
        "space": {
            "subspace": space.subspace.config(),
            "prior": space.prior.to_config(),
            "rank": space.rank,
            "kind": space.kind,
            "history": space.history,
            "projected": space.projected,
            "curve": None if space.curve is None else space.curve.kind,
        },
        "draws": state.draws.state()[1],
    }


def state_from(
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    deep: Mapping[str, nn.Module] | None = None,
    family: Family | None = None,
    priors: Mapping[str, Any] | None = None,
) -> FittedState:
    """Rebuild a fitted model; see `SemiStructuredRegression.load` for the arguments.

    Raises:
        InputError: a module, family or prior that the artifact cannot hold is not given.
    """
    given, own = dict(deep or {}), dict(priors or {})
    check_network_names("deep", given, facts["networks"])
    specification = Specification(
        facts["formula"],
        _family(facts["family"], family),
        {
            name: _network(name, network, strip_prefix(f"network{i}", tensors), given.get(name))
            for i, (name, network) in enumerate(facts["networks"].items())
        },
        {
            name: own[name] if name in own else prior_from(name, config)
            for name, config in facts["priors"].items()
        },
        AuxiliaryColumns(facts["weights"], facts["offset"], facts["exposure"]),
        facts["orthogonal"],
        facts["missing"],
    )
    columns = facts["columns"]
    frame = pd.DataFrame(
        {column["name"]: _restore(tensors[f"rows.{i}"], column) for i, column in enumerate(columns)}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `fit` has given the warnings about these rows
        rows = specification.prepare(frame, strip_prefix("inputs", tensors))
    of_space = facts["space"]
    space = JointSpace(
        subspace_from_config(of_space["subspace"], strip_prefix("space", tensors)),
        Normal.from_config(of_space["prior"]),
        tensors["starts"].numpy(),
        of_space["rank"],
        of_space["kind"],
        WeightCurve(tensors["curve"], of_space["curve"]) if of_space["curve"] else None,
        of_space["history"],
        of_space["projected"],
    )
    joint = JointPosterior(
        replace(rows, dropped=facts["dropped"]), space, facts["seed"], facts["mode"]
    )
    arrays = {
        name: tensor.numpy()
        for name, tensor in tensors.items()
        if name == "z" or name.startswith(("stats.", "moments."))
    }
    return FittedState(joint, Draws.from_state(arrays, facts["draws"]))


def _columns_of(state: FittedState) -> list[str]:
    """Columns of the training rows that the model reads."""
    rows = state.model
    names = [
        *rows.response.variables(rows.frame),
        *rows.encoder.columns,
        *rows.specification.auxiliary.columns,
    ]
    return list(dict.fromkeys(names))


def _network_facts(network: Deep) -> dict[str, Any]:
    module = network.module
    return {
        "architecture": architecture_of(module),
        "parameter": network.parameter,
        "columns": None if network.columns is None else list(network.columns),
        "module": module.settings if isinstance(module, MLP) else None,
        "trained": [n for n, p in module.named_parameters() if p.requires_grad],
    }


def _family(config: dict[str, Any], own: Family | None) -> Family:
    if own is not None:
        return own
    if "own" in config:
        fail(
            "family",
            f"the family {config['own']}",
            "none",
            "Pass load(path, family=...): code is not saved",
        )
    if "links" in config:
        return FAMILIES[config["name"]](tuple(config["links"]))
    return FAMILIES[config["name"]](n_classes=config["n_classes"])  # type: ignore[call-arg]


def _network(
    name: str, facts: dict[str, Any], state: dict[str, Tensor], module: nn.Module | None
) -> Deep:
    """A saved network, in a copy of the module that the user passes or in a new `MLP`."""
    if module is None and facts["module"] is None:
        fail(
            f"deep[{name!r}]",
            f"a module of the saved architecture {facts['architecture']}",
            "none",
            f"Pass load(path, deep={{{name!r}: module}}): code is not saved, only weights",
        )
    module = MLP(**facts["module"]) if module is None else copy.deepcopy(module)
    if not isinstance(module, nn.Module):
        fail_type(f"deep[{name!r}]", "a module", module)
    if architecture_of(module) != facts["architecture"]:
        fail(
            f"deep[{name!r}]",
            f"the saved architecture {facts['architecture']}",
            architecture_of(module),
            "Build it with the same layers and sizes",
        )
    module.load_state_dict(state)
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(key in facts["trained"])
    return Deep(module, facts["columns"], facts["parameter"])


# --- columns of data frames ---------------------------------------------------------------------


def _store(values: pd.Series) -> tuple[np.ndarray, dict[str, Any]]:
    """A column without missing values as an array, with the facts that `_restore` needs."""
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        codes, levels = values.cat.codes, list(dtype.categories)
        facts: dict[str, Any] = {"levels": levels, "ordered": bool(dtype.ordered)}
    elif pd.api.types.is_numeric_dtype(dtype):
        plain = getattr(dtype, "numpy_dtype", dtype)
        return values.to_numpy(dtype=plain, copy=True), {"dtype": str(dtype)}
    else:
        codes, uniques = pd.factorize(values)
        levels = list(uniques)
        facts = {"levels": levels, "dtype": str(dtype)}
    odd = [v for v in levels if not isinstance(v, (str, bool, int, float, np.number, np.bool_))]
    if odd:
        remedy = "Convert it to text before fitting"
        fail_type(str(values.name), "a column of numbers or text to save", odd[0], remedy)
    return np.asarray(codes, dtype=np.int64), facts


def _restore(stored: Tensor, facts: dict[str, Any]) -> pd.Series:
    values = stored.numpy()
    if "levels" not in facts:
        return pd.Series(values).astype(facts["dtype"])
    if "ordered" in facts:
        return pd.Series(pd.Categorical.from_codes(values, facts["levels"], facts["ordered"]))
    levels = np.empty(len(facts["levels"]), dtype=object)
    levels[:] = facts["levels"]
    return pd.Series(levels[values]).astype(facts["dtype"])
