r"""The linearised Laplace approximation, of all weights or within a subspace.

The network is replaced by its linearisation at the maximum a posteriori,

$$ f_{\mathrm{lin}}(x; w) = f(x; \hat w) + J(x)(w - \hat w) , $$

whose posterior is Gaussian: $w \sim N(\hat w, \Psi)$ with $\Psi^{-1} = \sum_n J_n^\top
\Lambda_n J_n + \lambda I$, or $z \sim N(0, (P^\top \Psi^{-1} P)^{-1})$ for $w = \hat w + P z$.
Outputs at X are $N(f(X; \hat w), \Sigma_X)$. The network is neither changed nor retrained, and
nothing needs to be sampled.

Source: Immer, Korzepa and Bauer (2021), "Improving predictions of Bayesian neural nets via local
linearization"; Daxberger et al. (2021), "Laplace redux"; eq. (10) to (19) of the paper on optimal
subspaces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.arrays import Array, Arrays
from subbayes.artifacts.saving import KindFacts, artifact
from subbayes.artifacts.tensors import add_prefix, fingerprint, strip_prefix
from subbayes.curvature.jacobian import Jacobian, check_covariance_memory
from subbayes.curvature.layers import Layers
from subbayes.curvature.low_rank import LowRank
from subbayes.curvature.many_products import MANY_OUTPUTS
from subbayes.curvature.precision import Precision, cholesky, diagonal_blocks
from subbayes.curvature.precision_factory import check_options, precision, root
from subbayes.curvature.row_sums import Terms, first_rows, sum_over_rows
from subbayes.curvature.sampled import Sampled
from subbayes.curvature.subspace_precision import SubspacePrecision
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.distributed.divided_rows import exchanged
from subbayes.draws import Draws, Moments
from subbayes.inference.laplace.saving import (
    PrecisionFacts,
    jacobian_from,
    precision_facts,
    precision_from,
    precision_tensors,
)
from subbayes.likelihoods import Likelihood, as_likelihood, saved_likelihood
from subbayes.likelihoods.base import column, target_values
from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.networks.batched_module import LinearisedModule
from subbayes.networks.global_state import outside_inference_mode
from subbayes.networks.network import Network, check_network
from subbayes.networks.saving import (
    NETWORK_ARRAYS,
    NetworkFacts,
    known_outputs,
    network_facts,
    network_from,
    network_tensors,
)
from subbayes.networks.token_outputs import output_for
from subbayes.predictions.averaging import average, input_batches, with_noise
from subbayes.predictions.gaussian import (
    Method,
    covariance_root,
    default_method,
    gaussian_draws,
    predictive_of,
)
from subbayes.predictions.modules import Component, Linearised
from subbayes.predictions.predictive import Predictive, check_outputs
from subbayes.subspace import FullSubspace, Subspace, SubspaceFacts
from subbayes.utils.checks import (
    check_choice,
    check_count,
    check_positive,
    check_seed,
    fail,
    fail_type,
)
from subbayes.utils.memory import check_memory
from subbayes.utils.trees import to_device
from subbayes.utils.types import FORMS, Form, OutputFunction, Outputs, Weights
from subbayes.utils.warning import warn_user

_MOST_EXPORTED = 5000  # weights of a dense covariance in a graph
_DRAWS = 200  # of outputs, for predictions without a closed form


class LaplaceFacts(KindFacts):
    """A `LinearisedPosterior` but for its tensors and its data."""

    network: NetworkFacts
    likelihood: dict[str, Any]
    subspace: SubspaceFacts | None
    precision: PrecisionFacts
    has_step: bool

    def arrays(self) -> Arrays:
        """Network, weights, step, subspace and matrices."""
        arrays = {**NETWORK_ARRAYS, "weights": Array("D")}
        if self.has_step:
            arrays["step"] = Array("D")
        if self.subspace is None:
            return {**arrays, **self.precision.arrays(0)}
        return {**arrays, **self.subspace.arrays(), **self.precision.arrays(self.subspace.rank)}


METHODS = get_args(Method)


@outside_inference_mode
def linearised_laplace(
    network: Network,
    likelihood: str | Likelihood,
    data: Any,
    subspace: Subspace | None = None,
    *,
    covariance: Form = "exact",
    prior_precision: float = 1.0,
    memory_limit: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> LinearisedPosterior:
    r"""The Gaussian posterior of a network's linearisation.

    Args:
        network: f(x; w), at the maximum a posteriori.
        likelihood: p(y | f), with all its own parameters learned, or its name as for `fit`.
        data: (inputs, y), a DataLoader, a Dataset or `Data`.
        subspace: around the network's weights; None or a `FullSubspace` for all weights.
        covariance: form of $\Psi$ for all weights: "exact", "diagonal", "low-rank", "kfac",
            "sampled". Within a subspace the posterior is exact and needs none.
        prior_precision: $\lambda$ of the prior $w \sim N(\hat w, \lambda^{-1} I)$.
        memory_limit: bytes that matrices may take; by default 80 % of what is free.
        progress: show progress bars, of predictions too, with an estimate where they take minutes;
            None shows them on a terminal.
        options: of the form of the covariance.

    Returns:
        The posterior: `.predict(inputs)`, `.covariance(inputs)`, `.function_samples(inputs)`,
        `.log_marginal_likelihood()`.

    Raises:
        InputError: parts that do not fit together, or a subspace around other weights.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = Network(subbayes.MLP(2, (8,), 1, "tanh", seed=0).double())
        >>> x = torch.linspace(-1, 1, 100).double().reshape(50, 2)
        >>> posterior = linearised_laplace(net, Gaussian(0.1), (x, x[:, 0]))
        >>> near, far = posterior.predict(torch.tensor([[0.0, 0.0], [5.0, -5.0]]).double()).std
        >>> bool(near < 0.15 < far)
        True
    """
    check_network(network)
    likelihood, data = as_likelihood(likelihood), exchanged(data)
    if subspace is None or isinstance(subspace, FullSubspace):
        psi = precision(
            network,
            likelihood,
            data,
            covariance,
            prior_precision=prior_precision,
            memory_limit=memory_limit,
            progress=progress,
            **options,
        )
        return LinearisedPosterior(psi, _completed(network, likelihood, data), None)
    if not isinstance(subspace, Subspace):
        fail_type("subspace", "a Subspace or None", subspace, "Make one, e.g. with optimal(...)")
    check_choice("covariance", covariance, FORMS)
    check_options("the posterior in a subspace", options)
    space = fingerprint(subspace.tensors(), subspace.config())
    facts = {"subspace": space, "prior_precision": prior_precision}
    V = root(network, likelihood, data, memory_limit, progress, facts=facts)
    inside = SubspacePrecision(V, subspace, prior_precision)
    _check_centre(network, subspace)
    return LinearisedPosterior(inside, _completed(network, likelihood, data), subspace)


def _completed(network: Network, likelihood: Likelihood, data: Data) -> Likelihood:
    """The likelihood with what it finds in outputs, such as the number of classes."""
    rows, y = data.first()
    return likelihood.for_outputs(network.check(to_device(rows, network.device)), y)


def _check_centre(network: Network, subspace: Subspace) -> None:
    away = float((subspace.shift.to(network.weights) - network.weights).abs().max())
    if away > 1e-5 * max(1.0, float(network.weights.abs().max())):
        fail(
            "subspace",
            "a centre at the network's weights, where it is linearised",
            f"one that is up to {away:.2g} away",
            "Use network.with_weights(subspace.shift), or move the subspace",
        )


@dataclass(frozen=True)
class LinearisedPosterior(Predictor):
    """The Gaussian posterior of a linearised network.

    Attributes:
        precision: of all weights, or restricted to the subspace.
        likelihood: p(y | f).
        subspace: None for all weights.
        step: from the network's weights to the mean, see `with_step`; None for no step.
    """

    kind: ClassVar[str] = "linearised-laplace"

    precision: Precision
    likelihood: Likelihood
    subspace: Subspace | None
    step: Weights | None = None

    @property
    def network(self) -> Network:
        """The network, at the maximum a posteriori."""
        return self.precision.network

    @property
    def prior_precision(self) -> float:
        """Lambda."""
        return self.precision.prior_precision

    def __repr__(self) -> str:
        where = repr(self.subspace)
        if self.subspace is None:
            where = f"{self.network.size} weights, {self.precision.form}"
        return (
            f"LinearisedPosterior({where}, prior_precision={self.prior_precision:g}, "
            f"{self.likelihood!r})"
        )

    def with_prior_precision(self, prior_precision: float) -> LinearisedPosterior:
        """The same posterior under another prior precision, around the network's weights."""
        return self.with_prior_and_noise(prior_precision)

    def with_step(self, data: Any) -> LinearisedPosterior:
        r"""The posterior around the weights after one Gauss-Newton step.

        Under the prior $N(\hat w, \lambda^{-1} I)$ the posterior of the linearised network has the
        mean $\hat w + \Psi \sum_n J_n^\top \nabla_f \log p(y_n \mid f_n)$ for Gaussian noise;
        for other likelihoods it is the first step towards it. It is 0 at a mode of the likelihood.

        Args:
            data: the training data.

        Raises:
            InputError: a posterior within a subspace.

        Example:
            >>> import subbayes
            >>> from subbayes.likelihoods import Gaussian
            >>> x = torch.linspace(-1, 1, 60).double()[:, None]
            >>> net = subbayes.Network(torch.nn.Linear(1, 1, dtype=torch.float64))
            >>> posterior = linearised_laplace(net, Gaussian(0.5), (x, 3 * x[:, 0]),
            ...                                prior_precision=1e-6).with_step((x, 3 * x[:, 0]))
            >>> (net.weights + posterior.step).round(decimals=3).tolist()
            [3.0, 0.0]
        """
        if self.subspace is not None:
            fail("subspace", "None, all weights", repr(self.subspace))
        likelihood = self.precision.V.likelihood or self.likelihood
        total = self.network.weights.new_zeros(1, self.network.size, dtype=torch.float64)
        for inputs, y in Data.of(data).batches():
            X = self.precision.jacobian(to_device(inputs, self.network.device))
            outputs = X.outputs().double()
            X.pull(likelihood.score(outputs, to_device(y, outputs.device)).reshape(1, -1), total)
        return replace(self, step=self.precision.solve(total)[0])

    def _mean(self, X: Jacobian) -> Outputs:
        """Mean outputs in float64, on the CPU."""
        outputs = X.outputs().double()
        if self.step is not None:
            outputs = outputs + X.push(self.step[None]).reshape(outputs.shape)
        return outputs.cpu()

    @property
    @override
    def label(self) -> str:
        return "linearised Laplace"

    @property
    def predicts_together(self) -> bool:
        """In the low-rank form of rows that are divided among processes."""
        return isinstance(self.precision, LowRank) and self.precision.solves_together

    @property
    def default_draws(self) -> int:
        """Number of draws of predictions without a closed form."""
        return self.precision.samples if isinstance(self.precision, Sampled) else _DRAWS

    def describe(self) -> dict[str, str]:
        """Descriptions of network, likelihood, method and covariance."""
        return super().describe() | {"covariance": self.precision.describe()}

    @override
    def components(self, inputs: Any, n_draws: int | None = None) -> list[Component]:
        if self.subspace is None and self.network.size > _MOST_EXPORTED:
            fail(
                "model",
                f"a subspace, or at most {_MOST_EXPORTED} weights, such as those of the last layer",
                f"{self.network.size} weights",
                "Pass Network(module, parameters='last-layer'), or use a subspace",
            )
        if isinstance(self.precision, SubspacePrecision):
            half = covariance_root(self.precision.z_covariance)
            basis = self.precision.subspace.basis()
            directions = half.T.to(basis) @ basis
        else:
            unit = torch.eye(self.network.size, dtype=torch.float64).to(self.network.device)
            directions = covariance_root(self.precision.solve(unit)).T
        step = [] if self.step is None else [self.step[None].to(directions)]
        outputs = LinearisedModule(self.network, torch.cat([*step, directions]), inputs)
        width = self.network.check(inputs)
        return [Linearised(outputs, self.likelihood, width, self.step is not None)]

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """The network with its weights, the subspace and the fitted matrices."""
        found: dict[str, Tensor | np.ndarray] = {**network_tensors(self.network)}
        found |= {"weights": self.network.weights, **precision_tensors(self.precision)}
        if self.subspace is not None:
            found |= add_prefix("subspace", self.subspace.tensors())
        if self.step is not None:
            found["step"] = self.step
        return found

    def facts(self) -> LaplaceFacts:
        """Everything but the tensors; the training data are not saved."""
        subspace: Any = None if self.subspace is None else self.subspace.config()
        return LaplaceFacts(
            network=network_facts(self.network),
            likelihood=self.likelihood.to_config(),
            subspace=subspace,
            precision=precision_facts(self.precision),
            has_step=self.step is not None,
        )

    @outside_inference_mode
    def predict(
        self,
        inputs: Any,
        *,
        method: Method = "auto",
        joint: bool = False,
        n_draws: int | None = None,
        seed: int = 0,
        noise: Any = None,
    ) -> Predictive:
        r"""The predictive distribution at new inputs.

        The Jacobian is computed for a few inputs at a time: apart from the result, memory does not
        grow with the number of inputs, unless `joint`.

        Args:
            inputs: in the form the module takes, or a loader of them.
            method: "gaussian", in closed form for Gaussian noise around the outputs; "probit",
                "extended-probit" or "laplace-bridge", in closed form for classes whose
                probabilities are the softmax of the outputs, or the sigmoid of one;
                "monte-carlo", draws of the outputs, for any likelihood, in the time of as many
                products with the Jacobian where there are more outputs than draws; "network",
                draws of the weights passed through the network itself, for comparison (often worse,
                since the posterior is that of the linearisation). "auto" takes "gaussian",
                "extended-probit" or "monte-carlo", depending on the likelihood.
            joint: keep the covariance of all inputs, (N C)^2 numbers, with "gaussian".
            n_draws: number of draws, for methods that draw; by default 200, and all draws of the
                sampled form, which holds no more.
            seed: seed of the draws.
            noise: noise scale per new row, for `Gaussian(noise="per-observation")`.

        Returns:
            A `Predictive`; its `kind` is "gaussian" where it is in closed form, else "mixture".

        Raises:
            InputError: a method that does not fit the likelihood, inputs that the module does not
                take, or a joint covariance that does not fit into memory.
        """
        check_choice("method", method, METHODS)
        n_draws = check_count("n_draws", self.default_draws if n_draws is None else n_draws)
        if method == "network":
            return self._through_network(inputs, n_draws, seed, noise)
        X = self.precision.jacobian(inputs)
        if method == "auto" and self.likelihood.per_position:
            method = "monte-carlo"
        sampled = isinstance(self.precision, Sampled)
        many = sampled and method == "auto" and X.roots > MANY_OUTPUTS
        few = method == "monte-carlo" and (sampled or n_draws < X.roots)
        if (many or few) and not joint:
            return self._from_draws(X, n_draws, seed, noise)
        likelihood = with_noise(self.likelihood, noise, X.n)
        rows = None if joint else self.precision.blocks(X).cpu()
        mean, full = self._mean(X), None  # after the blocks, whose passes have them
        method = default_method(likelihood, mean) if method == "auto" else method
        if rows is None:
            if method != "gaussian":
                fail("joint", "False for classes and draws", True, "Use covariance(inputs)")
            check_covariance_memory(X.rows)
            full = self.precision.covariance(X).cpu()
            rows = diagonal_blocks(full, X.roots)
        return predictive_of(mean, rows, likelihood, method, n_draws, seed, full)

    def _from_draws(self, X: Jacobian, count: int, seed: int, noise: Any) -> Predictive:
        """Draws of the outputs, without C x C matrices."""
        likelihood = with_noise(self.likelihood, noise, X.n)
        outputs = self._output_draws(X, count, seed)
        check_outputs(outputs, likelihood)
        return Predictive(outputs, likelihood)

    def _output_draws(self, X: Jacobian, count: int, seed: int) -> Outputs:
        check_memory(
            "inputs",
            f"{count} draws of {X.rows} outputs",
            16 * count * X.rows,
            "Pass fewer inputs at once, or lower n_draws",
        )
        generator = torch.Generator().manual_seed(check_seed(seed))
        mean, found = self.precision.output_draws(X, count, generator)
        centre = mean.double() if self.step is None else self._mean(X).to(found)
        return (centre + found.reshape(len(found), *mean.shape)).cpu()

    def _through_network(self, inputs: Any, count: int, seed: int, noise: Any) -> Predictive:
        generator = torch.Generator().manual_seed(check_seed(seed))
        centre = self.network.weights if self.step is None else self.network.weights + self.step
        weights = centre + self.precision.sample(count, generator)
        return average(self.network, self.likelihood, weights, inputs, noise=noise)

    @outside_inference_mode
    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        r"""Joint epistemic covariance of all outputs, $\Sigma_X$ or $\Sigma_{P,X}$."""
        X = self.precision.jacobian(inputs)
        check_covariance_memory(X.rows)
        return self.precision.covariance(X)

    @outside_inference_mode
    def function_samples(
        self, inputs: Any, n: int = 1, seed: int = 0
    ) -> Float[np.ndarray, "S N C"]:
        """Draws of the linearised network as a function: outputs at all inputs jointly."""
        X: Jacobian = self.precision.jacobian(inputs)
        if isinstance(self.precision, Sampled | SubspacePrecision):
            return self._output_draws(X, check_count("n", n), seed).numpy()
        check_covariance_memory(X.rows)
        generator = torch.Generator().manual_seed(check_seed(seed))
        mean = self._mean(X)
        found = gaussian_draws(
            torch.zeros(X.rows).double(),
            self.precision.covariance(X).cpu(),
            check_count("n", n),
            generator,
        )
        return (mean + found.reshape(n, *mean.shape)).numpy()

    def draws(self, draws: int = 1000, chains: int = 4, seed: int = 0) -> Draws:
        """Draws of the coordinates, as engines return them.

        Raises:
            InputError: a posterior over all weights, which has no coordinates.
        """
        if not isinstance(self.precision, SubspacePrecision):
            fail(
                "subspace",
                "a subspace to draw coordinates in",
                "all weights",
                "Use predict(..., method='network'), or a subspace",
            )
        generator = torch.Generator().manual_seed(check_seed(seed))
        count = check_count("draws", draws) * check_count("chains", chains)
        z = self.precision.coordinates(count, generator).cpu().numpy()
        return Draws(
            z.reshape(chains, draws, -1),
            meta={"seed": seed, "prior_precision": self.prior_precision},
            engine="laplace-linearised",
            validity="approximation",
            independent=True,
            prediction="linearised",
            moments=Moments.of(
                np.zeros(z.shape[1]), torch.cholesky_inverse(self.precision.factor).cpu().numpy()
            ),
        )

    def log_marginal_likelihood(self) -> float:
        """Laplace's approximation of the log evidence, of all weights or within the subspace."""
        return Evidence.of(self).log_marginal_likelihood(self.prior_precision)

    def with_prior_and_noise(
        self, prior_precision: float, noise_factor: float = 1.0
    ) -> LinearisedPosterior:
        """The same posterior under another prior precision, with the noise scale multiplied.

        It is around the network's weights.
        """
        likelihood, V = self.likelihood, self.precision.V
        if noise_factor != 1:
            likelihood = likelihood.scale_noise(noise_factor)
            V = V.with_likelihood(likelihood)
        precision = self.precision.rescaled(V, prior_precision, noise_factor**-2)
        return replace(self, likelihood=likelihood, precision=precision, step=None)


@outside_inference_mode
def posterior_of_draws(
    network: Network, likelihood: Likelihood, subspace: Subspace, draws: Draws, inputs: Any
) -> LinearisedPosterior:
    """The posterior with the moments of draws of `LinearisedLaplace`, for predictions.

    Args:
        network: f(x; w), which is linearised at the centre of the subspace.
        likelihood: p(y | f).
        subspace: of the draws.
        draws: with their moments.
        inputs: that are predicted, whose Jacobian is `precision.V`; a loader of them is read once.

    Raises:
        InputError: inputs that the module does not take.
    """
    network = network.with_weights(subspace.shift)
    batches = list(input_batches(inputs, network))
    first = to_device(batches[0], network.device)
    network.check(first)
    X = Jacobian.of_batches(Layers(network, first), batches)
    assert draws.moments is not None
    mean, covariance = map(torch.from_numpy, (draws.moments.mean, draws.moments.covariance))
    inverse = torch.cholesky_inverse(cholesky(covariance, "subspace")).to(network.device)
    psi = SubspacePrecision(X, subspace, 1.0, (torch.zeros_like(inverse), inverse))
    step = subspace.push(mean[None].to(network.weights))[0] if bool(mean.any()) else None
    return LinearisedPosterior(psi, likelihood, subspace, step)


def predict_linearised(
    network: Network,
    likelihood: Likelihood,
    subspace: Subspace,
    draws: Draws,
    inputs: Any,
    *,
    noise: Any = None,
    n_draws: int | None = None,
) -> Predictive:
    """Predictions of the linearised network from the moments of `LinearisedLaplace`."""
    posterior = posterior_of_draws(network, likelihood, subspace, draws, inputs)
    return posterior.predict(posterior.precision.V, noise=noise, n_draws=n_draws)


@artifact("linearised-laplace", LaplaceFacts)
def rebuild(
    tensors: dict[str, Tensor],
    facts: LaplaceFacts,
    module: nn.Module | None = None,
    *,
    data: Any = None,
    likelihood: Likelihood | None = None,
    output: OutputFunction | None = None,
) -> LinearisedPosterior:
    """Rebuild linearised Laplace from the tensors and facts of its artifact; see `subbayes.load`.

    The dual and low-rank forms require the training data, other forms only for the evidence.
    """
    likelihood = saved_likelihood(
        facts.likelihood, likelihood, known_outputs(facts.network, output)
    )
    output = output_for(likelihood, output)
    network = network_from(tensors, facts.network, tensors["weights"], module, output)
    subspace = None
    if facts.subspace is not None:
        subspace = facts.subspace.build(strip_prefix("subspace", tensors))
        _check_centre(network, subspace)
    V = jacobian_from(tensors, facts.precision, network, likelihood, data)
    precision = precision_from(tensors, facts.precision, V, subspace)
    return LinearisedPosterior(precision, likelihood, subspace, tensors.get("step"))


_COMPARED = 200  # training rows
_LEAST_SHARE = 0.8  # of the network's probability of their labels
_RANGE = 20.0  # of the logarithm of the prior precision, on either side of 0
_NOISE_RANGE = -7.0, 7.0  # of the logarithm of the factor of the noise
_LEVEL = 1e-3  # nats by which the evidence at an end of the range is no smaller than elsewhere
_MOST_UPDATES, _STATIONARY = 50, 5e-3  # of MacKay's updates, and the change at which they end


@dataclass(frozen=True)
class Evidence:
    """The log evidence as a function of prior precision and noise.

    Attributes:
        log_likelihood: at the maximum a posteriori.
        squares: sum of squared residuals in units of the noise; NaN without a noise scale.
        targets: number of observed numbers, each of which counts as often as the weight of its row.
        norm: squared norm of the random weights.
        eigenvalues: of V'V, shape (r,).
        multiplicities: how often each of them occurs, shape (r,).
    """

    log_likelihood: float
    squares: float
    targets: float
    norm: float
    eigenvalues: Float[np.ndarray, "r"]
    multiplicities: Float[np.ndarray, "r"]

    @classmethod
    def of(cls, posterior: LinearisedPosterior) -> Evidence:
        """Compute it from one pass over the data and the posterior's eigenvalues."""
        psi = posterior.precision
        total, squares, targets = cls.fit_of(posterior)
        values, counts = psi.spectrum()
        norm = random_norm(psi)
        return cls(total, squares, targets, norm, values.cpu().numpy(), counts.cpu().numpy())

    @staticmethod
    def fit_of(posterior: LinearisedPosterior) -> tuple[float, float, float]:
        """Log-likelihood, sum of squared residuals and number of observed numbers, in one pass."""
        V, likelihood = posterior.precision.V, posterior.likelihood

        def fit(rows: Jacobian) -> Terms:
            return (_fit_of(rows, likelihood),)

        (sums,) = sum_over_rows(V, fit) if V.is_divided else fit(V)
        total, squares, targets = sums.tolist()
        return total, squares if targets else float("nan"), targets

    def log_marginal_likelihood(self, prior_precision: float, noise_factor: float = 1.0) -> float:
        """Log evidence at a prior precision and a factor of the likelihood's noise scale."""
        check_positive("prior_precision", prior_precision)
        fit = self.log_likelihood
        if noise_factor != 1:
            fit += 0.5 * self.squares * (1 - noise_factor**-2) - (
                self.targets * np.log(noise_factor)
            )
        occam = self.multiplicities @ np.log1p(
            self.eigenvalues / (noise_factor**2 * prior_precision)
        )
        return float(fit - 0.5 * prior_precision * self.norm - 0.5 * occam)

    def maximum(self, noise: bool = True) -> tuple[float, float]:
        """The prior precision and noise factor of the largest evidence.

        Args:
            noise: vary the noise of a Gaussian likelihood too.
        """
        from scipy.optimize import minimize

        free = noise and self.targets > 0

        def negative(at: np.ndarray) -> float:
            factor = float(np.exp(at[1])) if free else 1.0
            return -self.log_marginal_likelihood(float(np.exp(at[0])), factor)

        box = [(-_RANGE, _RANGE), _NOISE_RANGE][: 1 + free]
        found = min(
            (
                minimize(negative, [start, 0.0][: 1 + free], method="L-BFGS-B", bounds=box)
                for start in (-6.0, 0.0, 6.0)
            ),
            key=lambda result: float(result.fun),
        )
        for end in box[0]:
            if negative(np.array([end, *found.x[1:]])) <= found.fun + _LEVEL:
                _warn_of_end(end)
        return float(np.exp(found.x[0])), float(np.exp(found.x[1])) if free else 1.0


def _fit_of(rows: Jacobian, likelihood: Likelihood) -> Float[torch.Tensor, "3"]:
    """Log-likelihood, sum of squared residuals and number of observed numbers, of some rows."""
    network, found = rows.network, torch.zeros(3, dtype=torch.float64)
    for _, inputs, y in rows.batches():
        with torch.no_grad():
            f = network(network.weights, inputs).double()
            assert y is not None
            found[0] += likelihood.log_prob(f, y).sum().cpu()
            if likelihood.has_noise_scale:
                mean, std = likelihood.mean(f), likelihood.variance(f).sqrt()
                parts = split_targets(y, has_weights(likelihood, y))
                squares = ((column(parts.values, f) - mean) / std).square().sum(-1)
                counts = torch.from_numpy(parts.counts)
                found[1] += counts @ squares.cpu()
                found[2] += counts.sum() * mean.shape[-1]
    return found


def random_norm(psi: Any) -> float:
    """Squared norm of the weights, or of their projection on the span of a subspace."""
    weights = psi.network.weights.double()
    if not isinstance(psi, SubspacePrecision):
        return float(weights.square().sum())
    z = psi.subspace.project(torch.zeros_like(psi.network.weights)).double()
    return float(psi.subspace.push(z.to(psi.network.weights)).double().square().sum())


def tune_prior(posterior: LinearisedPosterior, *, noise: bool = True) -> LinearisedPosterior:
    """The posterior under the prior precision (and Gaussian noise) of the largest evidence.

    Args:
        posterior: of all weights or within a subspace.
        noise: tune the scale of Gaussian noise too.

    Warns:
        UserWarning: a prior precision at an end of the range from exp(-20) to exp(20); class
            probabilities at the result that are underconfident on training rows, of likelihoods
            with one label for each row.

    Example:
        >>> import subbayes
        >>> from subbayes.inference import linearised_laplace
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1).double())
        >>> x = torch.linspace(-1, 1, 60).double()[:, None]
        >>> posterior = linearised_laplace(net, Gaussian(0.5), (x, 3 * x[:, 0]))
        >>> tuned = tune_prior(posterior, noise=False)
        >>> tuned.log_marginal_likelihood() >= posterior.log_marginal_likelihood()
        True
    """
    if not hasattr(posterior, "with_prior_and_noise"):
        remedy = "Pass what linearised_laplace returns"
        fail_type("posterior", "a LinearisedPosterior", posterior, remedy)
    if isinstance(posterior.precision, Sampled):
        tuned = _update_until_stationary(posterior, noise)
    else:
        prior_precision, factor = Evidence.of(posterior).maximum(noise)
        tuned = posterior.with_prior_and_noise(prior_precision, factor)
    if tuned.likelihood.kind == "classification" and not tuned.likelihood.per_position:
        _warn_if_underconfident(tuned)
    return tuned


def _update_until_stationary(posterior: LinearisedPosterior, noise: bool) -> LinearisedPosterior:
    r"""MacKay's updates, with the effective dimension $\gamma$ from the draws.

    They are $\lambda \leftarrow \gamma / \lVert \hat w \rVert^2$, and for the noise $c^2 \leftarrow
    \text{squares} / (\text{targets} - \gamma)$; their fixed point is a stationary point of the
    evidence. Each posterior is solved from the last.
    """
    _, squares, targets = Evidence.fit_of(posterior)
    norm, factor, found = random_norm(posterior.precision), 1.0, posterior
    for _ in range(_MOST_UPDATES):
        assert isinstance(found.precision, Sampled)
        gamma = found.precision.effective_dimension
        new, step = _within_range(gamma, norm), 1.0
        if noise and targets:
            noise_factor = math.sqrt(squares / max(targets - gamma, 1e-3 * targets))
            step = float(np.clip(noise_factor, *np.exp(_NOISE_RANGE))) / factor
        change = max(abs(math.log(new / found.prior_precision)), abs(math.log(step)))
        if change < _STATIONARY:
            if abs(math.log(new)) >= _RANGE - _STATIONARY:
                _warn_of_end(math.log(new))
            return found
        found, factor = found.with_prior_and_noise(new, step), factor * step
    warn_user(
        f"prior: the prior precision still changes by {100 * change:.2g} % after {_MOST_UPDATES} "
        "updates; call tune_prior on the result again"
    )
    return found


def _within_range(gamma: float, norm: float) -> float:
    """gamma / norm, within the range of prior precisions; weights of 0 have the largest."""
    if gamma >= norm * math.exp(_RANGE):
        return math.exp(_RANGE)
    return max(gamma / norm, math.exp(-_RANGE))


def _warn_of_end(at: float) -> None:
    warn_user(
        f"prior: the evidence is largest at {math.exp(at):.2g}, an end of the range of prior "
        "precisions: the weights are near 0, or the data determine none of them; choose the prior "
        "precision by hand"
    )


def _warn_if_underconfident(posterior: LinearisedPosterior) -> None:
    """Compare the probabilities of training labels by the posterior and by the network."""
    psi = posterior.precision
    inputs, y = first_rows(psi.V, _COMPARED)
    assert y is not None
    X = psi.jacobian(inputs).silent()
    covariance = psi.blocks(X).cpu()
    mean, labels = X.outputs().double().cpu(), target_values(y).reshape(-1, 1).long().cpu().numpy()
    likelihood = posterior.likelihood.unweighted
    method = default_method(likelihood, mean)
    sure, doubtful = (
        float(np.take_along_axis(found.probabilities, labels, 1).mean())
        for found in (
            predictive_of(mean, part, likelihood, method, _DRAWS, 0)
            for part in (torch.zeros_like(covariance), covariance)
        )
    )
    other = "" if method == "monte-carlo" else ", or predict with method='laplace-bridge'"
    if doubtful < _LEAST_SHARE * sure:
        warn_user(
            f"prior: at the precision {posterior.prior_precision:.3g} of the largest evidence, "
            f"labels of training rows have a mean probability of {doubtful:.2f}, and "
            f"{sure:.2f} by the network: predictions are underconfident. Choose the prior on "
            f"held-out rows (choose_prior){other}"
        )
