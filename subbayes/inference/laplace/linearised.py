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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.curvature.jacobian import Jacobian, check_covariance_memory
from subbayes.curvature.low_rank import LowRank
from subbayes.curvature.many_products import MANY_OUTPUTS
from subbayes.curvature.precision import Precision
from subbayes.curvature.precision_factory import FORMS, Form, check_options, precision, root
from subbayes.curvature.sampled import Sampled
from subbayes.curvature.subspace_precision import SubspacePrecision
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.distributed.divided_rows import exchanged
from subbayes.draws import Draws, Moments
from subbayes.inference.laplace.evidence import Evidence
from subbayes.inference.laplace.saving import (
    jacobian_from,
    precision_facts,
    precision_from,
    precision_tensors,
)
from subbayes.likelihoods import Likelihood, as_likelihood, saved_likelihood
from subbayes.networks.global_state import outside_inference_mode
from subbayes.networks.network import Network, check_network
from subbayes.networks.saving import known_outputs, network_facts, network_from, network_tensors
from subbayes.networks.token_outputs import output_for
from subbayes.predictions.averaging import average, with_noise
from subbayes.predictions.gaussian import Method, default_method, draws, predictive_of
from subbayes.predictions.predictive import Predictive, check_outputs
from subbayes.subspace import FullSubspace, Subspace
from subbayes.subspace import from_config as subspace_from_config
from subbayes.utils.artifact import fingerprint
from subbayes.utils.checks import check_choice, check_count, check_seed, fail, fail_type
from subbayes.utils.memory import check_memory
from subbayes.utils.tensor_file import add_prefix, strip_prefix
from subbayes.utils.trees import to_device

__all__ = ["LinearisedPosterior", "Method", "diagonal_blocks", "linearised_laplace", "rebuild"]

_DRAWS = 200  # of outputs, for predictions without a closed form

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
    """

    kind: ClassVar[str] = "linearised-laplace"

    precision: Precision
    likelihood: Likelihood
    subspace: Subspace | None

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
        """The same posterior under another prior precision."""
        return replace(self, precision=self.precision.with_prior_precision(prior_precision))

    @property
    def label(self) -> str:
        """The name of the method in tables."""
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

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """The network with its weights, the subspace and the fitted matrices."""
        found: dict[str, Tensor | np.ndarray] = {**network_tensors(self.network)}
        found |= {"weights": self.network.weights, **precision_tensors(self.precision)}
        if self.subspace is not None:
            found |= add_prefix("subspace", self.subspace.tensors())
        return found

    def facts(self) -> dict[str, Any]:
        """Everything but the tensors; the training data are not saved."""
        return {
            "network": network_facts(self.network),
            "likelihood": self.likelihood.to_config(),
            "subspace": None if self.subspace is None else self.subspace.config(),
            **precision_facts(self.precision),
        }

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
        mean, full = X.outputs().double().cpu(), None  # after the blocks, whose passes have them
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

    def _output_draws(self, X: Jacobian, count: int, seed: int) -> Float[Tensor, "S N C"]:
        check_memory(
            "inputs",
            f"{count} draws of {X.rows} outputs",
            16 * count * X.rows,
            "Pass fewer inputs at once, or lower n_draws",
        )
        generator = torch.Generator().manual_seed(check_seed(seed))
        mean, found = self.precision.output_draws(X, count, generator)
        return (mean.double() + found.reshape(len(found), *mean.shape)).cpu()

    def _through_network(self, inputs: Any, count: int, seed: int, noise: Any) -> Predictive:
        generator = torch.Generator().manual_seed(check_seed(seed))
        weights = self.network.weights + self.precision.sample(count, generator)
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
        mean = X.outputs().double().cpu()
        found = draws(
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
        """The same posterior under another prior precision, with the noise scale multiplied."""
        if noise_factor == 1:
            return self.with_prior_precision(prior_precision)
        likelihood = self.likelihood.scale_noise(noise_factor)
        wider = self.precision.V.with_likelihood(likelihood)
        return replace(
            self,
            likelihood=likelihood,
            precision=self.precision.rescaled(wider, prior_precision, noise_factor**-2),
        )


def rebuild(
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    module: nn.Module | None = None,
    *,
    data: Any = None,
    likelihood: Likelihood | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> LinearisedPosterior:
    """Rebuild linearised Laplace from the tensors and facts of its artifact; see `subbayes.load`.

    The dual and low-rank forms require the training data, other forms only for the evidence.
    """
    likelihood = saved_likelihood(
        facts["likelihood"], likelihood, known_outputs(facts["network"], output)
    )
    output = output_for(likelihood, output)
    network = network_from(tensors, facts["network"], tensors["weights"], module, output)
    subspace = None
    if facts["subspace"] is not None:
        subspace = subspace_from_config(facts["subspace"], strip_prefix("subspace", tensors))
        _check_centre(network, subspace)
    V = jacobian_from(tensors, facts, network, likelihood, data)
    precision = precision_from(tensors, facts, V, subspace)
    return LinearisedPosterior(precision, likelihood, subspace)


def diagonal_blocks(full: Float[Tensor, "m m"], size: int) -> Float[Tensor, "n C C"]:
    """The diagonal blocks of a square matrix."""
    n = len(full) // size
    return full.reshape(n, size, n, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
