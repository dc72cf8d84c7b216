"""From a module and data to calibrated predictions in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from subbayes import likelihoods
from subbayes.curvature.precision_factory import form_for
from subbayes.data.data import Data
from subbayes.distributed.divided_rows import every_row, exchanged
from subbayes.distributed.processes import join, on_first
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine, engine_of
from subbayes.inference.tempering import choose_temperature, no_posterior
from subbayes.likelihoods import Likelihood
from subbayes.models.checkpoint import FitCheckpoint, check_checkpoint
from subbayes.models.defaults import default_posterior, learns_prior, with_evidence_prior
from subbayes.models.ensemble_start import EnsembleStart, ensemble_settings, starts_at_ensemble
from subbayes.models.fitted import FittedModel
from subbayes.models.processes import (
    check_agreement,
    check_same_division,
    is_divided,
    restored,
    trained_once,
    training_of,
)
from subbayes.models.settings import check_settings
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.networks.sharded.network import network_of
from subbayes.networks.token_outputs import output_for
from subbayes.networks.validation import check_divided_fit
from subbayes.posterior import Posterior
from subbayes.priors import EvidencePrior, Normal, check_normal
from subbayes.subspace import Subspace
from subbayes.subspaces.base import FixedSubspace, SubspaceMethod
from subbayes.subspaces.optimal import check_size
from subbayes.subspaces.registry import SubspaceChoice, subspace_method
from subbayes.training.configuration import Training
from subbayes.training.loop import LEAST_SNAPSHOTS
from subbayes.training.pipeline import Trained, likely_network, train_trajectory, without_training
from subbayes.utils.checks import check_choice, check_positive, closest, fail
from subbayes.utils.types import Form, ModuleFactory, OutputFunction
from subbayes.utils.warning import warn_user, warnings_once

Prior = Normal | EvidencePrior | float
_T = TypeVar("_T")


@warnings_once()
def fit(
    model: nn.Module,
    data: Any,
    *,
    likelihood: str | Likelihood = "gaussian",
    subspace: SubspaceChoice | None = None,
    inference: str | Engine | Callable[[Any, Sampling], Draws] | None = None,
    prior: Normal | EvidencePrior | float | str | None = None,
    temperature: float | str = 1.0,
    validation: Any = None,
    training: Training | None = None,
    sampling: Sampling | None = None,
    parameters: Selection = "all",
    output: OutputFunction | None = None,
    factory: ModuleFactory | None = None,
) -> FittedModel:
    r"""Train a network, build a subspace around it and sample the posterior there.

    Without subspace, inference and prior it is linearised Laplace of all weights with the prior of
    the largest evidence, for numbers and counts and up to 2000 weights; else the subspace "pca"
    ("random" for sharded weights), elliptical slice sampling, and N(0, I). Any of the three chooses
    from the latter for the others.

    Args:
        model: any module; its parameters and its mode are not changed.
        data: (inputs, y), a `Dataset` or a `DataLoader`; `Data.of(data).weighted(weights)` for
            weights of rows or classes.
        likelihood: "gaussian" (one learned noise), "heteroscedastic", "categorical",
            "bernoulli", "poisson", "causal-lm" (the next token of a language model), "tokens" (a
            label for each token), or a likelihood object.
        subspace: a name of `SUBSPACES` or a method of `subbayes.subspaces`: `PCA` (of the SGD
            trajectory), `Random`, `Curve` (of low loss to a second solution), `Optimal` (keeps
            most of the predictive covariance), `Subnetwork` (the weights that keep most of the
            predictive variance) or `Full` (all weights); a `Subspace` (then nothing is trained);
            or a function of the `Trained` result. BatchNorm statistics are those
            of the network if it lies in the subspace, otherwise of the centre or of the point
            nearest to the network, whichever is likelier.
        inference: a name of `ENGINES` or an engine of `subbayes.inference`, such as
            `NUTS(target_acceptance=0.9)`; or a function (posterior, sampling) -> `Draws`.
        prior: p(z): a standard deviation or a `Normal`, N(0, I) by default. For `Optimal`, it is
            that of the weights, $w \sim N(\hat w, s^2 I)$ within the subspace. "evidence", for
            `Optimal`, `Subnetwork` and `Full`, chooses the scale that maximises the evidence of
            linearised Laplace over all weights, and the noise of a `Gaussian` likelihood; see
            `EvidencePrior`.
        temperature: T > 0, which raises the likelihood to the power 1 / T; or "loo" or
            "validation" to choose it by leave-one-out or by held-out data. These also choose the
            temperature of the logits of classes, and whether there is a posterior at all, or only
            the centre of the subspace.
        validation: held-out data for `temperature="validation"`.
        training: how to train; `Training(epochs=0)` for a module that is trained already, with
            `swa_epochs=0` to keep its weights (not for `PCA`). None is `Training()` under a prior
            of the weights that the evidence chooses, in two or three trainings. The prior of a
            `Training` of your own is flat unless it says otherwise, and intervals may be too
            narrow.
        sampling: number of draws and chains, seed of all steps, checkpoint, progress bars. An
            interrupted call with a checkpoint resumes there and returns the same draws. With
            `initial="ensemble"` each chain starts at a network of its own, trained as those of
            `deep_ensemble` with the same seed; with `subspace="full"` no other network is trained.
        parameters: which parameters are weights, as for `Network`; e.g. "last-layer", or
            "adapters" for those of a fine-tuned model.
        output: picks the tensor out of what the module returns, as for `Network`.
        factory: makes a module with fresh weights from torch's global generator, which is seeded
            for it, for each member of `initial="ensemble"` and the second solution of `Curve`;
            needed there if a layer has no `reset_parameters`. Frozen parameters are those of
            `model`.

    Returns:
        A `FittedModel`: `.predict(inputs)`, `.evaluate(inputs, y)`, `.draws`, `.save(path)`.

    Raises:
        InputError: arguments that do not fit together, with the name of the argument.
        Diverged: a training that diverged.

    Warns:
        UserWarning: a class without rows, in data in memory, for which the network has an output.
        sklearn.exceptions.ConvergenceWarning: each problem of the run, with a remedy, as in
            `FittedModel.warnings`.

    Example:
        >>> import torch
        >>> from subbayes.subspaces import PCA
        >>> x = torch.linspace(-2, 2, 60)[:, None]
        >>> y = torch.sin(3 * x[:, 0])
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
        >>> model = fit(net, (x, y), subspace=PCA(rank=3), training=Training(epochs=20),
        ...             sampling=Sampling(draws=50, progress=False))
        >>> model.predict(x[:5]).std.shape
        (5,)
    """
    join(required=False)
    check_same_division(model, data)
    data = exchanged(data)
    likelihood = likelihoods.as_likelihood(likelihood)
    if data.has_weights:
        likelihood = likelihoods.Weighted(likelihood)
    output = output_for(likelihood, output)
    network = network_of(model, parameters, output)
    outputs = check_divided_fit(network, likelihood, data)
    likelihood = likelihood.for_outputs(outputs, data.first()[1])

    # Check every argument before training, which may take hours.
    sampling = check_settings("sampling", sampling, Sampling) or Sampling()
    on_first(partial(check_checkpoint, sampling.checkpoint))
    wants_other = starts_at_ensemble(sampling) or temperature == "loo"
    if subspace is None and inference is None and prior is None and not wants_other:
        subspace, inference, prior = default_posterior(network, likelihood, data)
    engine = engine_of("elliptical-slice" if inference is None else inference)
    prior = as_prior(1.0 if prior is None else prior)
    if subspace is None:
        subspace = "random" if network.is_sharded else "pca"
    method = subspace_method(subspace).with_factory(factory)
    method = method.for_ensemble(starts_at_ensemble(sampling))
    training = check_settings("training", training, Training)
    learns = training is None and learns_prior(network, likelihood, data)
    learns &= not starts_at_ensemble(sampling)
    training = training_of(training, network, data, method, engine, prior)
    check_temperature(temperature, validation)
    if validation is not None and temperature != "validation":
        fail(
            "validation",
            f"None, since temperature={temperature!r} uses no held-out data",
            f"a {type(validation).__name__}",
            "Leave it out, or pass temperature='validation'; for early stopping use "
            "training=Training(validation=0.2, patience=20)",
        )
    start = EnsembleStart(model, network, likelihood, data, training, sampling, method, factory)
    start.check(engine, prior)
    method.check(network, data, training)
    check_prior(prior, method, network, data, outputs)
    engine.check(method.expected_rank(network))
    if not isinstance(method, FixedSubspace) and not learns:
        _warn_of_flat_prior(network, likelihood, data, training)
    settings = fit_settings(likelihood, method, prior, training, sampling.seed)
    settings |= ensemble_settings(sampling) | ({"learns_prior": True} if learns else {})
    check_agreement(network, data, settings, sampling, engine, method)

    # Train, and build the subspace around the trained network, or resume after that.
    is_tuned = isinstance(prior, EvidencePrior) and likelihood.has_noise_scale
    known = likelihood if likelihood.is_complete and not is_tuned else None  # cannot be saved
    restore = partial(
        restored, module=model, output=output, likelihood=known, device=network.device
    )
    checkpoint = prepared = None
    if sampling.checkpoint is not None and not network.is_sharded:
        checkpoint = FitCheckpoint.of(sampling.checkpoint, network, data, method, settings)
        prepared = checkpoint.load(restore, method)
    if prepared is None:
        train = partial(_train, start, prior, learns)
        make = partial(build, method=method, prior=prior, settings=settings)
        prepare = partial(start.fit, train, make)
        divided = is_divided(network, data)
        prepared = prepare() if divided else trained_once(prepare, restore)
        if checkpoint is not None:
            checkpoint.save(prepared)

    # Sample the posterior in the subspace.
    if prepared.starts is not None:
        sampling = dataclasses.replace(sampling, initial=prepared.starts)
    fitted = sample(prepared, data, engine, sampling, temperature, validation, checkpoint, outputs)
    for problem in fitted.warnings():
        from sklearn.exceptions import ConvergenceWarning

        warn_user(problem, ConvergenceWarning)
    return fitted


def _train(start: EnsembleStart, prior: Prior, learns_prior: bool) -> Trained:
    """Train the network of a posterior; an existing subspace is taken as it is."""
    network, likelihood, data, method = start.network, start.likelihood, start.data, start.method
    training, seed = start.training, start.sampling.seed
    if not isinstance(method, FixedSubspace):
        if learns_prior:
            options: Any = {"seed": seed, "progress": start.sampling.progress}
            network, training = with_evidence_prior(network, likelihood, data, training, **options)
        return train_trajectory(
            network,
            likelihood,
            data,
            training,
            seed=seed,
            progress=start.sampling.progress,
            least_snapshots=max(LEAST_SNAPSHOTS, method.least_snapshots),
        )
    space = method.subspace.to(network.device)
    if network.has_batchnorm and not network.lies_in(space):
        warn_user(
            "subspace: the module's own weights are not in it, so the BatchNorm statistics are "
            "re-estimated on the training data, at its centre or the point nearest to the weights"
        )
    coordinates = _prior_of(prior, method, space, _prior_scale(prior, method, network))
    network = likely_network(network, likelihood, space, coordinates, data)
    return without_training(network, likelihood, data, training, seed)


def _prior_scale(prior: Prior, method: SubspaceMethod, network: Network) -> float:
    return method.prior_scale(1.0 if isinstance(prior, EvidencePrior) else prior, network)


def _prior_of(prior: Prior, method: SubspaceMethod, space: Subspace, scale: float) -> Normal:
    return prior if isinstance(prior, Normal) else method.prior(space, scale)


def _warn_of_flat_prior(
    network: Network, likelihood: Likelihood, data: Data, training: Training
) -> None:
    """Warn of noise that is learned from residuals of a network that can fit the noise itself."""
    learns_noise = likelihood.has_noise_scale and not likelihood.is_complete
    is_flat = training.prior_scale is None and not training.weight_decay
    n = every_row(data)
    can_overfit = network.size > n > 1 and training.validation is None and training.epochs > 0
    if learns_noise and is_flat and can_overfit:
        warn_user(
            f"training: {network.size} weights with a flat prior on {n} rows; the noise "
            "learned from their residuals may be too small, and intervals too narrow. Pass "
            "training=Training(prior_scale=0.5), or subspace='full', "
            "inference='laplace-linearised', prior='evidence'"
        )


def build(
    trained: Trained, method: SubspaceMethod, prior: Prior, settings: dict[str, Any]
) -> FittedModel:
    """Build the subspace and its prior around a trained network.

    Args:
        trained: the result of `train_trajectory`.
        method: how the subspace is chosen.
        prior: as for `fit`.
        settings: the settings to store in the model, see `fit_settings`.

    Returns:
        A model without draws.
    """
    scale = _prior_scale(prior, method, trained.network)
    if isinstance(prior, EvidencePrior):
        likelihood, evidence_scale = _maximise_evidence(trained, _covariance(prior, method))
        trained = dataclasses.replace(trained, likelihood=likelihood)
        scale *= evidence_scale
    space = method.build(trained, scale)
    if space.shift.device != trained.network.device:  # as of a trajectory, recorded on the CPU
        space = space.to(trained.network.device)
    coordinates = _prior_of(prior, method, space, scale)
    network = trained.network
    settings = settings | {"training": dataclasses.asdict(trained.training)}
    if not network.lies_in(space):
        network = likely_network(network, trained.likelihood, space, coordinates, trained.data)
    return FittedModel(
        network.with_weights(space.shift),
        trained.likelihood,
        space,
        coordinates,
        history=trained.history,
        settings=settings,
    )


def sample(
    prepared: FittedModel,
    data: Data,
    engine: Engine,
    sampling: Sampling,
    temperature: float | str = 1.0,
    validation: Any = None,
    checkpoint: FitCheckpoint | None = None,
    outputs: int | None = None,
) -> FittedModel:
    """Choose the temperature and sample the posterior of a model without draws.

    Args:
        prepared: the result of `build`.
        data: training data.
        engine: how to sample.
        sampling: number of draws and chains, seed and progress bars.
        temperature: as for `fit`.
        validation: as for `fit`.
        checkpoint: where to save and resume the run.
        outputs: number of outputs, if the network has been checked with these data.
    """
    posterior = Posterior(
        prepared.network,
        prepared.likelihood,
        data,
        prepared.subspace,
        prepared.prior,
        mode=sampling.mode,
        outputs=outputs,
    )
    chosen = None
    output_temperature = 1.0
    if isinstance(temperature, str):
        choose = choose_temperature if checkpoint is None else checkpoint.temperature
        how: Any = {"inference": engine} if temperature == "validation" else {}
        choice = choose(
            posterior,
            by=temperature,
            validation=validation,
            **how,
            seed=sampling.seed,
            progress=sampling.progress,
        )
        temperature, chosen = choice.best, dataclasses.asdict(choice)
        output_temperature = choice.best_output_temperature
    posterior = posterior.with_temperature(temperature or 1.0)
    if checkpoint is not None:
        sampling = dataclasses.replace(sampling, checkpoint=checkpoint.sampling)
    draws = engine.run(posterior, sampling) if temperature else no_posterior(posterior.rank)
    return dataclasses.replace(
        prepared,
        likelihood=prepared.likelihood.unweighted,
        temperature=posterior.temperature,
        output_temperature=output_temperature,
        draws=draws,
        posterior=posterior,
        settings=prepared.settings
        | {"inference": engine.name if temperature else draws.engine, "temperatures": chosen},
    )


# --- arguments ------------------------------------------------------------------------------------


def as_prior(prior: Normal | EvidencePrior | float | str) -> Prior:
    """Convert the argument `prior` of `fit`: "evidence" becomes an `EvidencePrior`.

    Raises:
        InputError: a scale that is not above 0, or another string.

    Example:
        >>> as_prior("evidence")
        EvidencePrior(covariance=None)
    """
    if isinstance(prior, str):
        if prior != "evidence":
            expected = "a number above 0, a Normal or 'evidence'"
            fail("prior", expected, repr(prior), closest(prior, ["evidence"]))
        return EvidencePrior()
    if isinstance(prior, Normal):
        check_normal("prior", prior)
    if isinstance(prior, (Normal, EvidencePrior)):
        return prior
    return check_positive("prior", prior)


def check_prior(
    prior: Prior, method: SubspaceMethod, network: Network, data: Data, outputs: int
) -> None:
    """Check before training that a prior suits a subspace, and that its evidence fits into memory.

    Args:
        prior: of the coordinates.
        method: how the subspace is chosen.
        network: before training.
        data: training data.
        outputs: number of outputs C.

    Raises:
        InputError: "evidence" for coordinates that are not weights, or a matrix that does not fit.
    """
    if not isinstance(prior, EvidencePrior):
        method.prior_scale(prior, network)
        return
    if not method.spans_weights:
        fail(
            "prior",
            "subspace='optimal', 'subnetwork' or 'full' with 'evidence', the evidence "
            "of a prior of the weights",
            repr(method.name),
            "Pass the scale as a number",
        )
    form = form_for(_covariance(prior, method), data)
    check_size(network.size, every_row(data), outputs, form)


def check_temperature(temperature: float | str, validation: Any) -> None:
    """Check the arguments `temperature` and `validation` of `fit`.

    Raises:
        InputError: a temperature that is not above 0, or no data to choose it with.
    """
    if not isinstance(temperature, str):
        check_positive("temperature", temperature)
    else:
        check_choice("temperature", temperature, ("loo", "validation"))
    if temperature == "validation" and validation is None:
        fail(
            "validation",
            "held-out data for temperature='validation'",
            None,
            "Pass data, or use temperature='loo'",
        )


def fit_settings(
    likelihood: Likelihood, method: SubspaceMethod, prior: Prior, training: Training, seed: int
) -> dict[str, Any]:
    """The settings that determine a trained subspace, as values that JSON can represent."""
    if isinstance(prior, EvidencePrior):
        facts: Any = {"evidence": _covariance(prior, method)}
    else:
        facts = prior.to_config() if isinstance(prior, Normal) else prior
    return {
        "likelihood": likelihood.to_config(),
        "subspace": method.name,
        "subspace_settings": method.config(),
        "prior": facts,
        "training": dataclasses.asdict(training),
        "seed": seed,
    }


# --- evidence -------------------------------------------------------------------------------------


def _covariance(prior: EvidencePrior, method: SubspaceMethod) -> Form:
    if prior.covariance is not None:
        return prior.covariance
    return method.covariance_form


def _maximise_evidence(trained: Trained, covariance: Form) -> tuple[Likelihood, float]:
    """The likelihood with its Gaussian noise, and the prior scale, that maximise the evidence."""
    from subbayes.inference.laplace.linearised import linearised_laplace, tune_prior

    laplace = linearised_laplace(
        trained.network, trained.likelihood, trained.data, covariance=covariance
    )
    tuned = tune_prior(laplace)
    return tuned.likelihood, float(tuned.prior_precision) ** -0.5
