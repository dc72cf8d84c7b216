"""Fitted semi-structured models as artifacts: tensors and JSON, no pickle.

An artifact holds what was asked for, the columns and inputs of the training rows that the model
reads, the networks' weights and buffers, and the draws. Loading reads the rows as fitting did, so
that knots, levels, centres and scales are those of fitting.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from subbayes.draws import Draws
from subbayes.models.fitted import part
from subbayes.networks.mlp import MLP
from subbayes.networks.network import architecture_of
from subbayes.priors import Normal
from subbayes.semistructured.design_data import AuxiliaryColumns
from subbayes.semistructured.effect_priors import prior_config, prior_from
from subbayes.semistructured.families import FAMILIES, Family
from subbayes.semistructured.joint_posterior import FittedState, JointPosterior
from subbayes.semistructured.predictors import Deep
from subbayes.semistructured.specification import Specification
from subbayes.semistructured.subspace import JointSpace
from subbayes.subspace import from_config as subspace_from_config
from subbayes.subspaces.curve import WeightCurve
from subbayes.utils import artifact
from subbayes.utils.checks import fail, fail_type

__all__ = ["KIND", "load", "save"]

KIND = "semi-structured-model"


def save(state: FittedState, path: str | Path, overwrite: bool) -> Path:
    """Write a fitted model; see `SemiStructuredRegression.save`."""
    rows, space, draws = state.model, state.space, state.draws
    said = rows.specification
    tensors = {f"space.{k}": v for k, v in space.subspace.tensors().items()}
    arrays, facts_of_draws = draws.state()
    tensors |= {name: torch.from_numpy(values) for name, values in arrays.items()}
    tensors["starts"] = torch.from_numpy(space.start_points)
    if space.curve is not None:
        tensors["curve"] = space.curve.points
    read = dict.fromkeys(
        [*rows.response.variables(rows.frame), *rows.encoder.columns, *said.auxiliary.columns]
    )
    columns = []
    for i, name in enumerate(read):
        values, facts = _column(rows.frame[name])
        tensors[f"rows.{i}"] = torch.from_numpy(values)
        columns.append({"name": name} | facts)
    networks = {}
    for i, (name, network) in enumerate(said.deep.items()):
        module = network.module
        tensors |= {f"network{i}.{k}": v for k, v in module.state_dict().items()}
        if network.columns is None:
            tensors[f"inputs.{name}"] = rows.inputs[f"deep {name}"]
        networks[name] = {
            "architecture": architecture_of(module),
            "parameter": network.parameter,
            "columns": None if network.columns is None else list(network.columns),
            "module": module.settings if isinstance(module, MLP) else None,
            "learned": [n for n, p in module.named_parameters() if p.requires_grad],
        }
    known = type(said.family) in FAMILIES.values()
    auxiliary = said.auxiliary
    artifact.write(
        path,
        KIND,
        tensors,
        {
            "formula": said.formula if isinstance(said.formula, str) else dict(said.formula),
            "family": said.family.to_config() if known else {"own": repr(said.family)},
            "priors": {name: prior_config(prior) for name, prior in said.priors.items()},
            "auxiliary": [auxiliary.weights, auxiliary.offset, auxiliary.exposure],
            "missing": said.missing,
            "orthogonal": said.orthogonal,
            "seed": state.joint.seed,
            "mode": state.joint.mode,
            "columns": columns,
            "dropped": rows.dropped,
            "networks": networks,
            "space": {
                "config": space.subspace.config(),
                "prior": space.prior.to_config(),
                "rank": space.rank,
                "kind": space.kind,
                "history": space.history,
                "projected": space.projected,
                "curve": None if space.curve is None else space.curve.kind,
            },
            "draws": facts_of_draws,
        },
        overwrite=overwrite,
    )
    return Path(path)


def load(
    path: str | Path,
    deep: Mapping[str, nn.Module] | None,
    family: Family | None,
    priors: Mapping[str, Any] | None,
) -> FittedState:
    """Read a fitted model; see `SemiStructuredRegression.load`.

    Args:
        path: the folder.
        deep: modules of networks that are not an `MLP`, by name.
        family: a family of the user.
        priors: priors of classes of the user.

    Raises:
        InputError: no such artifact, or one that needs a module, family or prior.
    """
    tensors, meta = artifact.read(path, KIND)
    given = dict(deep or {})
    unknown = [name for name in given if name not in meta["networks"]]
    if unknown:
        fail(
            "deep",
            "names of networks: " + (", ".join(meta["networks"]) or "there are none"),
            ", ".join(unknown),
        )
    networks = {
        name: _network(name, facts, part(tensors, f"network{i}"), given.get(name))
        for i, (name, facts) in enumerate(meta["networks"].items())
    }
    own = dict(priors or {})
    specification = Specification(
        meta["formula"],
        _family(meta["family"], family),
        networks,
        {
            name: own[name] if name in own else prior_from(name, config)
            for name, config in meta["priors"].items()
        },
        AuxiliaryColumns(*meta["auxiliary"]),
        meta["orthogonal"],
        meta["missing"],
    )
    frame = pd.DataFrame(
        {
            facts["name"]: _values(tensors[f"rows.{i}"], facts)
            for i, facts in enumerate(meta["columns"])
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say of the rows was said in fitting
        rows = specification.prepare(frame, part(tensors, "inputs"))
    facts = meta["space"]
    curve = WeightCurve(tensors["curve"], facts["curve"]) if facts["curve"] else None
    space = JointSpace(
        subspace_from_config(facts["config"], part(tensors, "space")),
        Normal.from_config(facts["prior"]),
        tensors["starts"].numpy(),
        facts["rank"],
        facts["kind"],
        curve,
        facts["history"],
        facts["projected"],
    )
    joint = JointPosterior(
        replace(rows, dropped=meta["dropped"]), space, meta["seed"], meta["mode"]
    )
    draws = Draws.from_state({k: v.numpy() for k, v in tensors.items()}, meta["draws"])
    return FittedState(joint, draws)


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
    """A network as it was, in a module of its own."""
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
        parameter.requires_grad_(key in facts["learned"])
    return Deep(module, facts["columns"], facts["parameter"])


# --- columns of data frames ---------------------------------------------------------------------


def _column(values: pd.Series) -> tuple[np.ndarray, dict[str, Any]]:
    """A column without missing values as an array, and what makes it again."""
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return values.cat.codes.to_numpy(np.int64), {
            "levels": _levels(values.name, list(dtype.categories)),
            "ordered": bool(dtype.ordered),
        }
    if pd.api.types.is_numeric_dtype(dtype):
        plain = getattr(dtype, "numpy_dtype", dtype)
        return values.to_numpy(dtype=plain, copy=True), {"dtype": str(dtype)}
    codes, levels = pd.factorize(values)
    return codes.astype(np.int64), {
        "levels": _levels(values.name, list(levels)),
        "dtype": str(dtype),
    }


def _levels(name: Any, levels: list[Any]) -> list[Any]:
    odd = [v for v in levels if not isinstance(v, (str, bool, int, float, np.number, np.bool_))]
    if odd:
        fail_type(
            str(name),
            "a column of numbers or text to save",
            odd[0],
            "Turn it into text before fitting",
        )
    return levels


def _values(stored: Tensor, facts: dict[str, Any]) -> pd.Series:
    values = stored.numpy()
    if "levels" not in facts:
        return pd.Series(values).astype(facts["dtype"])
    if "ordered" in facts:
        return pd.Series(pd.Categorical.from_codes(values, facts["levels"], facts["ordered"]))
    levels = np.empty(len(facts["levels"]), dtype=object)
    levels[:] = facts["levels"]
    return pd.Series(levels[values]).astype(facts["dtype"])
