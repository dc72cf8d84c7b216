"""The fitted model that `fit` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict

import numpy as np
import torch
from jaxtyping import Float
from msgspec import Meta
from torch import nn
from typing_extensions import override

from subbayes.artifacts.arrays import LARGEST, Array, Arrays
from subbayes.artifacts.facts import Line, Name, Numbers, Positive, check_known
from subbayes.artifacts.saving import KindFacts, artifact, save
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.diagnostics.surprise import Update
from subbayes.distributed.divided_rows import exchanged
from subbayes.draws import Draws, DrawsFacts
from subbayes.inference.engine import ENGINES
from subbayes.inference.tempering import TemperatureChoice
from subbayes.likelihoods import Likelihood, Weighted, saved_likelihood
from subbayes.likelihoods.target_parts import split_targets
from subbayes.networks.batched_module import BatchedModule
from subbayes.networks.description import describe_likelihood, describe_network
from subbayes.networks.network import Network
from subbayes.networks.saving import (
    NETWORK_ARRAYS,
    NetworkFacts,
    known_outputs,
    network_facts,
    network_from,
    network_tensors,
)
from subbayes.networks.token_outputs import output_for
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import average
from subbayes.predictions.modules import Component, Sampled
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace, Subspace, SubspaceFacts
from subbayes.subspaces.registry import SUBSPACES
from subbayes.training.configuration import Training
from subbayes.utils.checks import check_device, fail
from subbayes.utils.modes import Mode
from subbayes.utils.text_table import printable
from subbayes.utils.trees import take
from subbayes.utils.types import OutputFunction
from subbayes.utils.warning import warn_user

if TYPE_CHECKING:
    from subbayes.diagnostics.function_space import ChainPredictions
    from subbayes.diagnostics.monte_carlo import MonteCarloError


_COMPARED_ROWS, _COMPARED_DRAWS = 200, 250  # of training data and chains, for their predictions


class _Ensemble(TypedDict):
    members: Annotated[int, Meta(ge=2, le=10**6)]


class _Settings(TypedDict, total=False):
    """The settings that descriptions, figures and reports read."""

    temperatures: TemperatureChoice | None
    training: Training | None
    subspace: Line
    inference: Line
    ensemble: _Ensemble
    updates: list[Update]


class FittedFacts(KindFacts):
    """What an artifact holds of a `FittedModel` beside its tensors."""

    network: NetworkFacts
    likelihood: dict[str, Any]
    subspace: SubspaceFacts
    prior: dict[str, Any]
    temperature: Positive
    draws: DrawsFacts | None
    history: dict[Name, Numbers]
    settings: dict[str, Any]
    output_temperature: Positive = 1.0

    def __post_init__(self) -> None:
        check_known(self.settings, _Settings)

    def arrays(self) -> Arrays:
        """Network, subspace, draws, and start points of an ensemble."""
        rank = self.subspace.rank
        draws = {} if self.draws is None else self.draws.arrays(rank)
        starts = Array("starts", rank, dtype="float64", below=LARGEST)
        return {**NETWORK_ARRAYS, **self.subspace.arrays(), **draws, "starts?": starts}


@dataclass(frozen=True)
class FittedModel(Predictor):
    """The result of `fit`: a network, a posterior over a subspace of its weights, and draws.

    Attributes:
        network: the network at the subspace's shift, with BatchNorm statistics of a likely point of
            the subspace.
        likelihood: p(y | f), with learned parameters.
        subspace: the map from coordinates z to weights.
        prior: p(z).
        temperature: T of the posterior; the likelihood has the power 1 / T.
        draws: draws of z, or None before sampling.
        posterior: the density; None for a model loaded without its data.
        history: losses and other numbers of each epoch, by phase of training.
        settings: the arguments of `fit`, as values that JSON can represent.
        starts: coordinates of the members of an ensemble that the chains start at, shape
            (chains, k), or None.
        output_temperature: what the logits of classes are divided by in predictions.
    """

    kind: ClassVar[str] = "fitted-model"

    network: Network
    likelihood: Likelihood
    subspace: Subspace
    prior: Normal
    temperature: float = 1.0
    draws: Draws | None = None
    posterior: Posterior | None = None
    history: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    starts: Float[np.ndarray, "chains k"] | None = None
    output_temperature: float = 1.0

    def predict(
        self,
        inputs: Any,
        *,
        noise: Any = None,
        n_draws: int | None = None,
        refresh_batchnorm: bool = False,
        progress: bool | None = False,
    ) -> Predictive:
        """Average predictions over the draws; linearised Laplace predicts in closed form.

        Args:
            inputs: new inputs in the form the module takes, or a loader of them.
            noise: standard deviation of the noise of each row, shape (N,), for
                `Gaussian(noise="per-observation")`.
            n_draws: use this many evenly spaced draws instead of all; all if there are fewer.
            refresh_batchnorm: re-estimate BatchNorm statistics on the training inputs for each
                draw, at the cost of one pass over them per draw, instead of those of one likely
                point of the subspace for all draws.
            progress: show a progress bar; None shows it on a terminal.

        Raises:
            InputError: inputs the module does not take; `refresh_batchnorm` for predictions in
                closed form, or for a model that was loaded without its data.
        """
        draws = self.sampled
        refresh = self._data_of_statistics() if refresh_batchnorm else None
        if draws.prediction != "network":
            from subbayes.inference.laplace.linearised import predict_linearised

            self.network.warn_if_changed()
            linearised = predict_linearised(
                self.network,
                self.likelihood,
                self.subspace,
                draws,
                inputs,
                noise=noise,
                n_draws=n_draws,
            )
            return self._scaled(linearised)
        z = torch.from_numpy(draws.flat(n_draws).copy()).to(self.network.device)
        averaged = average(
            self.network,
            self.likelihood,
            lambda rows: self.subspace.weights(z[rows]),
            inputs,
            count=len(z),
            noise=noise,
            refresh_batchnorm=refresh,
            progress=progress,
        )
        return self._scaled(averaged)

    def _scaled(self, predictive: Predictive) -> Predictive:
        tau = self.output_temperature
        return predictive if tau == 1 else predictive.scaled(1 / tau)

    @override
    def components(self, inputs: Any, n_draws: int | None = None) -> list[Component]:
        draws = self.sampled
        if draws.prediction != "network":
            from subbayes.inference.laplace.linearised import posterior_of_draws

            posterior = posterior_of_draws(
                self.network, self.likelihood, self.subspace, draws, inputs
            )
            parts = posterior.components(inputs)
            return [part.scaled(1 / self.output_temperature, part.likelihood) for part in parts]
        z = torch.from_numpy(draws.flat(n_draws).copy()).to(self.network.device)
        outputs = BatchedModule(self.network, self.subspace.weights(z))
        return [Sampled(outputs, self.likelihood, len(z), 1 / self.output_temperature)]

    @override
    def _some_rows(self) -> Any:
        if self.posterior is None:
            return super()._some_rows()
        return take(self.posterior.data.first()[0], slice(3))

    def _data_of_statistics(self) -> Data | None:
        """The rows on which BatchNorm statistics are re-estimated; None without BatchNorm."""
        if self.sampled.prediction != "network":
            expected = "False for predictions in closed form, around the weights of the network"
            fail("refresh_batchnorm", expected, True, "Use a sampler, such as 'elliptical-slice'")
        if self.posterior is None:
            expected = "a model with its training data"
            got = "one that was loaded without them"
            fail("refresh_batchnorm", expected, got, "Call with_data(data) before")
        return self.posterior.data if self.network.has_batchnorm else None

    def monte_carlo_error(
        self, inputs: Any, y: Any = None, *, noise: Any = None, **tolerances: Any
    ) -> MonteCarloError:
        """The error of predictions due to the number of draws, and how many are enough.

        Args:
            inputs: inputs of typical rows, such as those of validation.
            y: their targets, for the error of the log density.
            noise: as for `predict`.
            tolerances: `tolerance` and `log_density_tolerance` of `diagnostics.monte_carlo_error`.

        Raises:
            InputError: as `diagnostics.monte_carlo_error`.
        """
        from subbayes.diagnostics.monte_carlo import monte_carlo_error

        batches = self.predict_batches(inputs, noise=noise)
        draws = self.sampled
        options: dict[str, Any] = {"chains": draws.n_chains, "independent": draws.independent}
        return monte_carlo_error(batches, y, **options, **tolerances)

    def chain_predictions(self, inputs: Any, *, noise: Any = None) -> ChainPredictions:
        """Compare the chains by their predictions; see `diagnostics.chain_predictions`.

        Args:
            inputs: inputs of typical rows, such as those of validation.
            noise: as for `predict`.
        """
        from subbayes.diagnostics.function_space import chain_predictions

        batches = self.predict_batches(inputs, noise=noise)
        return chain_predictions(batches, chains=self.sampled.n_chains)

    def to(self, device: torch.device | str) -> FittedModel:
        """The model on another device: network, subspace, and the posterior with data in memory.

        Dtypes do not change. Draws stay NumPy arrays, whose weights are made on the device; inputs
        of predictions are moved there, and predictions are on the CPU.

        Args:
            device: such as "cpu" or "cuda".

        Raises:
            InputError: not a device, or one that is not there.

        Example:
            >>> import subbayes
            >>> x, y = torch.randn(20, 2), torch.randn(20)
            >>> model = subbayes.fit(subbayes.MLP(2, (3,), 1), (x, y), subspace="random",
            ...                      training=subbayes.Training(epochs=2),
            ...                      sampling=subbayes.Sampling(draws=8, progress=False))
            >>> model.to("cpu").network.device
            device(type='cpu')
        """
        device = check_device(device)
        if self.posterior is None:
            network, subspace = self.network.to(device), self.subspace.to(device)
            return replace(self, network=network, subspace=subspace)
        posterior = self.posterior.to(device)
        network = posterior.network
        if self.network is not self.posterior.network:
            network = self.network.to(device)
        return replace(self, network=network, subspace=posterior.subspace, posterior=posterior)

    def with_data(self, data: Any) -> FittedModel:
        """The model with the density of its training data, such as one loaded without them.

        Args:
            data: (inputs, y), a DataLoader, a Dataset or `Data`, with the weights of the rows if
                there are any; it may be sharded.

        Raises:
            InputError: data that do not fit the network or the likelihood.

        Example:
            >>> import subbayes
            >>> data = torch.randn(20, 2), torch.randn(20)
            >>> model = subbayes.fit(subbayes.MLP(2, (3,), 1), data, subspace="random",
            ...                      training=subbayes.Training(epochs=2),
            ...                      sampling=subbayes.Sampling(draws=8, progress=False))
            >>> model.with_data(data).posterior.n
            20
        """
        return replace(self, posterior=self._density(data))

    def _density(self, data: Any, mode: Mode = "trace") -> Posterior:
        rows = exchanged(data)
        likelihood = Weighted(self.likelihood) if rows.has_weights else self.likelihood
        parts = self.network, likelihood, rows, self.subspace, self.prior, self.temperature
        return Posterior(*parts, mode=mode)

    @override
    def update(self, new_rows: Any, *, forgetting: float = 1.0, seed: int = 0) -> FittedModel:
        """The model after new rows, for which its posterior is the prior; it does not change.

        The rows that it was fitted to are not needed. Linearised Laplace is updated as its linear
        model, which is exact for Gaussian noise; draws by importance weights, or by sequential
        Monte Carlo where these are unreliable; see `subbayes.models.updating`. Subspace, noise,
        BatchNorm statistics and temperature remain those of the fit.

        Args:
            new_rows: (inputs, y), a DataLoader, a Dataset or `Data`, as for `fit`; rows may have
                weights.
            forgetting: power of the likelihood of all earlier rows, above 0 and at most 1: 0.9
                takes rows of ten updates ago with a weight of 0.35.
            seed: of resampling and draws.

        Returns:
            The updated model, without `posterior`. `updates` has the method, how probable the rows
            were, and Pareto k.

        Raises:
            InputError: rows that do not fit the model; sharded rows or weights; rows that draws
                of separate chains, or fewer than four of each coordinate, cannot be updated by.

        Warns:
            UserWarning: rows that are far less probable than the model expects.

        Example:
            >>> import subbayes
            >>> x = torch.linspace(-1, 1, 60)[:, None]
            >>> model = subbayes.fit(subbayes.MLP(1, (5,), 1, seed=0), (x[::2], x[::2, 0]),
            ...                      subspace="random", inference="laplace-linearised",
            ...                      training=subbayes.Training(epochs=2),
            ...                      sampling=subbayes.Sampling(draws=20, progress=False))
            >>> updated = model.update((x[1::2], x[1::2, 0]))
            >>> updated.updates[0].rows, updated.updates[0].method
            (30, 'linear model')
        """
        from subbayes.models.updating import updated_draws

        draws, update = updated_draws(
            self._density(new_rows, "eager"),
            self.sampled,
            forgetting=forgetting,
            seed=seed,
            separate=self.has_separate_chains,
            warnings=self.warnings(),
        )
        updates = [*self.settings.get("updates", ()), asdict(update)]
        settings = self.settings | {"updates": updates}
        return replace(self, draws=draws, posterior=None, settings=settings)

    @property
    @override
    def updates(self) -> list[Update]:
        return [Update(**facts) for facts in self.settings.get("updates", ())]

    def thin(self, n_draws: int) -> FittedModel:
        """The model with about `n_draws` draws, evenly spaced in each chain; see `Draws.thin`.

        `monte_carlo_error` estimates how many are enough. Warns if the model has fewer.
        """
        draws = self.sampled.thin(n_draws)
        if "warnings" in draws.meta:
            draws = replace(draws, meta=draws.meta | {"warnings": self.warnings()})
        kept = replace(self, draws=draws)
        if n_draws > self.default_draws:
            warn_user(
                f"n_draws: {n_draws} is more than the {self.default_draws} draws of the model, of "
                "which all are kept; to have more, fit with sampling=Sampling(draws=...)"
            )
        return kept

    def save(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        scores: Mapping[str, float] | None = None,
        n_draws: int | None = None,
    ) -> Path:
        """Save as a folder of safetensors and JSON, without pickle; `subbayes.load` opens it.

        In the folder of an adapter of peft it is saved in the subfolder `subbayes`, with a model
        card in `README.md`, or `MODEL_CARD.md` if that exists; other files are left alone.

        Args:
            path: the folder.
            overwrite: replace an existing artifact.
            scores: of `evaluate`, for the model card.
            n_draws: save about this many draws, see `thin`; by default all.

        Raises:
            InputError: the path is taken (pass `overwrite=True`), or cannot be written; sharded
                weights.
        """
        kept = self if n_draws is None else self.thin(n_draws)
        if self.network.is_sharded:
            remedy = "Fit with Sampling(checkpoint=...): the same call has its draws again"
            fail("model", "weights in one process", "weights sharded by fully_shard", remedy)
        return save(kept, path, overwrite=overwrite, card=lambda: kept.card(scores))

    @property
    def sampled(self) -> Draws:
        """The draws.

        Raises:
            InputError: the model was not sampled.
        """
        if self.draws is None:
            fail("model", "a model with draws to predict from", "one that was not sampled")
        return self.draws

    @property
    def label(self) -> str:
        """The name of the method in tables, such as "PCA + NUTS"."""
        engine = self.settings.get("inference", "elliptical-slice")
        return method_label(self.settings.get("subspace", "posterior"), engine)

    @property
    def default_draws(self) -> int:
        """Number of draws, over all chains."""
        return 1 if self.draws is None else self.draws.n_chains * self.draws.n_draws

    def describe(self) -> dict[str, str]:
        """Describe the model, with one sentence for each part."""
        return describe(self)

    def fit_summary(self) -> dict[str, Any]:
        """Subspace, temperature, draws and their diagnostics."""
        draws = self.sampled
        known = {} if np.isnan(draws.pareto_k) else {"pareto_k": draws.pareto_k}
        if (agreement := self.training_agreement) is not None:
            known |= {
                "predictions_rhat": float(np.nanmedian(agreement.rhat)),
                "predictions_ess_bulk": float(np.nanmedian(agreement.ess)),
            }
        return known | {
            "independent": draws.independent,
            "method": self.settings.get("subspace", "posterior"),
            "rank": self.subspace.rank,
            "temperature": self.temperature,
            "chains": draws.n_chains,
            "draws": draws.n_draws,
            "rhat": float(draws.rhat().max()),
            "ess_bulk": float(draws.ess_bulk().min()),
            **({"updates": len(self.updates)} if self.updates else {}),
        }

    @property
    def has_separate_chains(self) -> bool:
        """Whether each chain samples all weights around a network of its own.

        Such chains are compared by their predictions, since their weights differ without meaning.
        """
        return self.starts is not None and isinstance(self.subspace, FullSubspace)

    @cached_property
    def training_agreement(self) -> ChainPredictions | None:
        """Separate chains compared by their predictions of at most 200 training rows.

        At most 250 evenly spaced draws of each chain predict. None if the model has no data in
        memory, as after loading, or too few draws.
        """
        draws, posterior = self.draws, self.posterior
        if draws is None or posterior is None or not posterior.data.in_memory:
            return None
        if not self.has_separate_chains or draws.n_chains < 2 or draws.n_draws < 4:
            return None
        rows = torch.arange(0, posterior.n, -(-posterior.n // _COMPARED_ROWS))
        assert posterior.data.y is not None
        noise = split_targets(posterior.data.y, posterior.data.has_weights).noise
        few = self
        if draws.n_draws > _COMPARED_DRAWS:
            few = replace(self, draws=draws.thin(_COMPARED_DRAWS * draws.n_chains))
        return few.chain_predictions(
            take(posterior.data.inputs, rows), noise=None if noise is None else noise[rows]
        )

    @override
    def warnings(self) -> list[str]:
        if self.draws is None:
            return []
        problems = self.draws.warnings(separate=self.has_separate_chains)
        known = "thinned_from" in self.draws.meta  # with the warnings of all draws
        if not known and (agreement := self.training_agreement) is not None:
            problems = agreement.warnings() + problems
        return problems

    def tensors(self) -> dict[str, Any]:
        """Network, subspace, draws, and start points of an ensemble."""
        tensors: dict[str, Any] = {**network_tensors(self.network)}
        tensors |= add_prefix("subspace", self.subspace.tensors())
        if self.starts is not None:
            tensors["starts"] = self.starts
        if self.draws is not None:
            tensors |= self.draws.state()[0]
        return tensors

    def facts(self) -> FittedFacts:
        """Everything but the tensors; the posterior and its data are not saved."""
        subspace: Any = self.subspace.config()  # a dict, which is checked when it is saved
        return FittedFacts(
            network=network_facts(self.network),
            likelihood=self.likelihood.to_config(),
            subspace=subspace,
            prior=self.prior.to_config(),
            temperature=self.temperature,
            draws=None if self.draws is None else self.draws.state()[1],
            history=self.history,
            settings=self.settings,
            output_temperature=self.output_temperature,
        )

    def __repr__(self) -> str:
        return (
            f"FittedModel({self.network!r}, {self.subspace!r}, "
            f"temperature={self.temperature:g}, {self.draws!r})"
        )


@artifact("fitted-model", FittedFacts)
def rebuild(
    tensors: dict[str, Any],
    facts: FittedFacts,
    module: nn.Module | None = None,
    *,
    data: Any = None,
    likelihood: Likelihood | None = None,
    output: OutputFunction | None = None,
) -> FittedModel:
    """Rebuild a fitted model from its artifact; see `subbayes.load`.

    Args:
        tensors: as saved.
        facts: as saved.
        module: a module of the same architecture, unless it is an `MLP`.
        data: the training data, to rebuild `posterior`.
        likelihood: a custom likelihood.
        output: picks the tensor out of what the module returns, as for `fit`.
    """
    likelihood = saved_likelihood(
        facts.likelihood, likelihood, known_outputs(facts.network, output)
    )
    output = output_for(likelihood, output)
    subspace = facts.subspace.build(strip_prefix("subspace", tensors))
    network = network_from(tensors, facts.network, subspace.shift, module, output)
    prior, temperature = Normal.from_config(facts.prior), facts.temperature
    prior.check_rank(subspace.rank)
    draws = None if facts.draws is None else Draws.from_state(tensors, facts.draws)
    model = FittedModel(
        network,
        likelihood,
        subspace,
        prior,
        temperature,
        draws,
        None,
        facts.history,
        facts.settings,
        tensors["starts"].cpu().numpy() if "starts" in tensors else None,
        facts.output_temperature,
    )
    return model if data is None else model.with_data(data)


def describe(model: FittedModel) -> dict[str, str]:
    """Describe a fitted model, with one sentence for each part.

    Args:
        model: the model.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.MLP(2, (5,), 1, seed=0)
        >>> model = subbayes.fit(net, (torch.randn(30, 2), torch.randn(30)),
        ...                      subspace=subbayes.subspaces.PCA(rank=2),
        ...                      training=subbayes.Training(epochs=2, swa_epochs=5),
        ...                      sampling=subbayes.Sampling(draws=20))
        >>> describe(model)["subspace"]
        'the 2 leading principal components of the SGD trajectory, centred at its mean'
    """
    sentences = {
        "network": describe_network(model.network),
        "likelihood": describe_likelihood(model.likelihood),
        "training": _training(model),
        "subspace": _subspace(model),
        "prior": _prior(model),
        "temperature": _temperature(model),
        "inference": _inference(model),
        **_updates(model),
    }
    return {name: printable(text) for name, text in sentences.items()}  # names may be from a file


_FIRST = ("epochs", "optimizer", "learning_rate")
_BOTH = ("batch_size", "prior_scale", "weight_decay")
_AVERAGED = ("swa_epochs", "swa_learning_rate")


def _has_trajectory(model: FittedModel) -> bool:
    """Whether a phase of SGD followed training; members of an ensemble have none."""
    alone = "ensemble" in model.history and not model.history.get("swa", {}).get("train_loss")
    return bool(model.settings["training"]["swa_epochs"]) and not alone


def _training(model: FittedModel) -> str:
    training = model.settings.get("training")
    if not training:
        return ""
    first = _FIRST if training["epochs"] else ()
    averaged = _AVERAGED if _has_trajectory(model) else ()
    names = [*first, *_BOTH, *averaged] if first or averaged else []
    words = [f"{name.replace('_', ' ')} {training[name]}" for name in names if training.get(name)]
    return ", ".join(words if first else ["a network trained before", *words])


def _subspace(model: FittedModel) -> str:
    k, name = model.subspace.rank, str(model.settings.get("subspace"))
    centre = "centred at the mean of the SGD trajectory"
    if model.settings.get("training") and not _has_trajectory(model):
        centre = "centred at the weights of the network"
    settings = model.settings.get("subspace_settings")
    if isinstance(settings, Mapping) and settings.get("centre") == "zero":
        centre = "centred at zero"
    description = SUBSPACES[name].description if name in SUBSPACES else ""
    return description.format(k=k, centre=centre) or repr(model.subspace)


def _prior(model: FittedModel) -> str:
    prior = model.prior
    plain = prior.factor is None and prior.scale.size == 1 and not np.any(prior.mean)
    if plain:
        return f"N(0, {float(prior.scale.reshape(-1)[0]):g}²) on each coordinate z"
    return f"{prior!r} on the coordinates z"


def _temperature(model: FittedModel) -> str:
    chosen, text = model.settings.get("temperatures"), f"T = {model.temperature:g}"
    if not chosen:
        return text
    by = "leave-one-out scores" if chosen["by"] == "loo" else "the validation rows"
    choice = TemperatureChoice.of(chosen)
    if not choice.best:
        text = "no posterior"
    text += f", chosen by {by} among {', '.join(f'{t:g}' for t in choice.temperatures)}"
    if choice.best_output_temperature != 1:
        text += f"; logits are divided by {choice.best_output_temperature:.3g}"
    if bad := choice.n_bad_of_best:
        text += f" (unreliable: Pareto k is too large at {bad} rows)"
    return text


def _inference(model: FittedModel) -> str:
    draws = model.draws
    if draws is None:
        return "not sampled"
    engine = draws.engine.replace("-", " ")
    how = "sampling" if draws.validity == "exact" else draws.validity
    clauses = [f"{engine} {how}, {draws.n_chains} chains of {draws.n_draws} draws".lstrip()]
    if model.starts is not None:
        clauses.append("each from a network of its own")
    if "warmup" in draws.meta:
        clauses.append(f"{draws.meta['warmup']} warm-up steps each")
    if "evaluations" in draws.stats:
        of = "draw" if draws.meta.get("thin", 1) == 1 else "step"
        clauses.append(f"{draws.stats['evaluations'].mean():.1f} density evaluations per {of}")
    if "seconds" in draws.meta:
        clauses.append(f"{draws.meta['seconds']:.1f} s")
    return ", ".join(clauses)


def _updates(model: FittedModel) -> dict[str, str]:
    if not (updates := model.updates):
        return {}
    rows, methods = sum(u.rows for u in updates), sorted({u.method for u in updates})
    return {"updates": f"{len(updates)} by {rows} new rows: {', '.join(methods)}"}


def method_label(subspace: str, engine: str) -> str:
    """The name of a method in tables.

    Example:
        >>> method_label("pca", "elliptical-slice")
        'PCA + ESS'
    """
    how = SUBSPACES[subspace].label if subspace in SUBSPACES else ""
    sampled = ENGINES[engine].label if engine in ENGINES else ""
    return printable(f"{how or subspace} + {sampled or engine}")
