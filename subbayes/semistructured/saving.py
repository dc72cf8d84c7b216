"""The artifact of a semi-structured model: that of a regression, and its networks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.arrays import ANY, Array, Arrays
from subbayes.artifacts.facts import Facts, Name, Size
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.draws import Draws
from subbayes.networks.identity.architecture import architecture_of
from subbayes.networks.identity.attributes import attribute_tensors, set_attributes
from subbayes.networks.mlp import MLP, MLPSettings
from subbayes.networks.tracing.private_torch import uncompiled
from subbayes.priors import Normal
from subbayes.regression.given_objects import check_log_likelihood
from subbayes.regression.saving import (
    RegressionFacts,
    SpaceFacts,
    common_facts,
    damaged,
    mode_of,
    prepared_rows,
    specification_settings,
)
from subbayes.regression.saving import tensors_of as tensors_of_regression
from subbayes.semistructured.joint_posterior import JointPosterior, JointState
from subbayes.semistructured.network_inputs import check_network_names
from subbayes.semistructured.network_terms import network_terms
from subbayes.semistructured.specification import JointModel, JointSpecification
from subbayes.semistructured.subspace import SUBSPACES, JointSpace
from subbayes.subspace import JointSubspace
from subbayes.training.weight_curve import WeightCurve
from subbayes.utils.checks import fail


class DeepFacts(Facts):
    """A network but for its tensors."""

    architecture: str
    module: MLPSettings | None
    trained: list[str]


class JointSpaceFacts(SpaceFacts, kw_only=True):
    """The coordinates of effects and weights, but for tensors."""

    rank: Size
    kind: Literal["curve", "full", "last-layer", "own"]
    history: dict[Name, list[float]]
    curve: Literal["bezier", "polygon"] | None


class SemiStructuredFacts(RegressionFacts, kw_only=True):
    """A fitted semi-structured model but for its tensors."""

    orthogonal: bool | Literal["auto"]
    effects: Literal["population", "sample"]
    networks: dict[Name, DeepFacts]
    space: JointSpaceFacts

    @override
    def arrays(self) -> Arrays:
        """Draws, subspace, start points, rows, networks and their inputs."""
        arrays = {**super().arrays(), "inputs.*": ANY}
        if self.space.curve is not None:
            arrays["curve"] = Array("points", "curve size")
        networks = range(len(self.networks))
        return arrays | {f"{of}{i}.*": ANY for of in ("network", "attribute") for i in networks}


def tensors_of(state: JointState) -> dict[str, Tensor | np.ndarray]:
    """The tensors to save: those of a regression, and networks with their inputs."""
    tensors = tensors_of_regression(state)
    if state.space.curve is not None:
        tensors["curve"] = state.space.curve.points
    for i, (name, network) in enumerate(state.model.specification.deep.items()):
        tensors |= add_prefix(f"network{i}", network.module.state_dict())
        tensors |= add_prefix(f"attribute{i}", attribute_tensors(network.module))
        if network.columns is None:
            tensors[f"inputs.{network.reads[0]}"] = state.model.inputs[f"deep {name}"]
    return tensors


def facts_of(state: JointState) -> SemiStructuredFacts:
    """The facts to save: those of a regression, networks, and the space of their weights."""
    space, specification = state.space, state.model.specification
    subspace: Any = space.subspace.config()
    kind: Any = space.kind if space.kind in SUBSPACES else "own"
    curve: Any = None if space.curve is None else space.curve.kind
    orthogonal: Any = specification.orthogonal
    effects: Any = specification.effects
    return SemiStructuredFacts(
        **common_facts(state),
        orthogonal=orthogonal,
        effects=effects,
        networks={name: _network_facts(term.module) for name, term in specification.deep.items()},
        space=JointSpaceFacts(
            subspace=subspace,
            prior=space.prior.to_config(),
            rank=space.rank,
            kind=kind,
            history=space.history,
            curve=curve,
        ),
    )


def state_from(
    tensors: dict[str, Tensor],
    facts: SemiStructuredFacts,
    networks: Mapping[str, nn.Module] | None = None,
    family: Any = None,
    priors: Mapping[str, Any] | None = None,
) -> JointState:
    """Rebuild a fitted model; see `SemiStructuredRegression.load` for the arguments.

    Raises:
        InputError: a module, family or prior that the artifact cannot hold is not given.
    """
    given = dict(networks or {})
    check_network_names("networks", given, facts.networks)
    settings = specification_settings(facts, family, priors or {})
    modules = {
        name: _network(name, network, f"{i}", tensors, given.get(name))
        for i, (name, network) in enumerate(facts.networks.items())
    }
    inputs = strip_prefix("inputs", tensors)
    specification = JointSpecification(
        **settings,
        deep=network_terms(facts.formula, modules, settings["family"]),
        orthogonal=facts.orthogonal,
        effects=facts.effects,
    )
    saved = facts.space
    space = JointSpace(
        saved.subspace.build(strip_prefix("space", tensors)),
        Normal.from_config(saved.prior),
        tensors["starts"].numpy(),
        saved.rank,
        saved.kind,
        WeightCurve(tensors["curve"], saved.curve) if saved.curve else None,
        saved.history,
    )
    rows = prepared_rows(tensors, facts, specification, inputs, space)
    _check_sizes(space, rows)
    joint = JointPosterior(rows, space, facts.seed, mode_of(facts))
    state = JointState(joint, Draws.from_state(tensors, facts.draws))
    check_log_likelihood(
        joint, state.draws, {"networks": given, "family": family, "priors": priors}
    )
    return state


def _network_facts(module: nn.Module) -> DeepFacts:
    return DeepFacts(
        architecture=architecture_of(module),
        module=MLPSettings(**module.settings) if isinstance(module, MLP) else None,
        trained=[n for n, p in module.named_parameters() if p.requires_grad],
    )


def _check_sizes(space: JointSpace, rows: JointModel) -> None:
    """Raise for a space that is not one of the model's effects and weights."""
    subspace, curve = space.subspace, space.curve
    effects, weights = rows.structured.size, rows.deep.n_weights
    sizes = [subspace.size, space.rank, space.rank > 0]
    expected = [effects + weights, subspace.rank - effects, weights > 0]
    if space.projected:
        expected[1] = subspace.rank
    if isinstance(subspace, JointSubspace):
        sizes.append(subspace.effects)
        expected.append(effects)
    if curve is not None:
        sizes.append(curve.points.shape[1])
        expected.append(effects + weights if space.projected else weights)
    if sizes != expected:
        damaged("facts['space']", f"of {effects} effects and {weights} weights", repr(space))


def _network(
    name: str, facts: DeepFacts, number: str, tensors: dict[str, Tensor], module: nn.Module | None
) -> nn.Module:
    """A saved network, in a copy of the module that the user passes or in a new `MLP`."""
    state = strip_prefix(f"network{number}", tensors)
    if module is not None:
        module = copy.deepcopy(uncompiled(module))
    elif facts.module is not None:
        dtype = next((t.dtype for t in state.values() if t.is_floating_point()), None)
        module = facts.module.build(state).to(dtype)
    else:
        fail(
            f"networks[{name!r}]",
            f"a module of the saved architecture {facts.architecture}",
            "none",
            f"Pass load(path, networks={{{name!r}: module}}): code is not saved, only weights",
        )
    if architecture_of(module) != facts.architecture:
        fail(
            f"networks[{name!r}]",
            f"the saved architecture {facts.architecture}",
            architecture_of(module),
            "Build it with the same layers and sizes",
        )
    module.load_state_dict(state)
    set_attributes(module, strip_prefix(f"attribute{number}", tensors))
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(key in facts.trained)
    return module
