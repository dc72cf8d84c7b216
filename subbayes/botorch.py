r"""A posterior as a model of BoTorch, on which its acquisition functions run unchanged.

The posterior is S functions $f_s$ drawn once: one draw is one function, jointly at all points and
the same in every call, so that acquisition functions are deterministic and smooth. Hypothetical
observations Y at X, which lookahead acquisition functions condition on, move each function by the
linear update of Gaussian processes with the draws' mean and covariance k (Matheron's rule),

$$ f_s(\cdot) + k(\cdot, X)\,(k(X, X) + V)^{-1} (Y - f_s(X) - \varepsilon_s),
   \qquad \varepsilon_s \sim N(0, V), $$

with the variances V of the noise: exact in the limit of many draws for linearised Laplace with
Gaussian noise, and the best linear approximation of the new mean otherwise. Observations without a
batch shape are real ones: the model is then updated by its own `update`.

Source: Balandat et al. (2020), BoTorch; Wilson et al. (2021), "Pathwise conditioning of Gaussian
processes".
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.diagnostics.predictor import Predictor
from subbayes.utils.checks import MissingPackageError, fail

try:
    from botorch.models.model import FantasizeMixin, Model
    from botorch.posteriors.ensemble import EnsemblePosterior
    from botorch.sampling.get_sampler import GetSampler
    from botorch.sampling.normal import SobolQMCNormalSampler
except ImportError as error:
    message = "subbayes.botorch needs the package botorch: pip install 'subbayes[botorch]'"
    raise MissingPackageError(message) from error

__all__ = ["BoTorchModel", "FunctionPosterior"]

_JITTER = 1e-8  # of covariances of observations, relative to their mean variance
_NOISE, _PERTURBATION = 0, 1  # seeds of observations, and of those that an update subtracts


class FunctionPosterior(EnsemblePosterior):
    """Functions at some points, of shape (batch) x S x q x m; see `BoTorchModel`.

    The base sample of a draw is one normal number, whose quantile chooses the function: the same
    in all batches, and evenly spaced ones of a Sobol sequence.
    """

    @property
    @override
    def base_sample_shape(self) -> torch.Size:
        return torch.Size([1] * (len(self.batch_shape) + 2))

    @property
    @override
    def batch_range(self) -> tuple[int, int]:
        return 0, -2

    @override
    def rsample_from_base_samples(self, sample_shape: torch.Size, base_samples: Tensor) -> Tensor:
        share = torch.special.ndtr(base_samples.reshape(sample_shape))
        index = (share * self.ensemble_size).long().clamp(max=self.ensemble_size - 1)
        return self.values.movedim(-3, 0)[index]

    @override
    def rsample(self, sample_shape: torch.Size | None = None) -> Tensor:
        shape = sample_shape or torch.Size([1])
        return self.rsample_from_base_samples(shape, torch.randn(shape).to(self.values))


@GetSampler.register(FunctionPosterior)
def _sampler(
    posterior: FunctionPosterior, sample_shape: torch.Size, *, seed: int | None = None
) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(sample_shape=sample_shape, seed=seed)


class BoTorchModel(Model, FantasizeMixin):
    """Functions drawn from the posterior of a fitted model, as a `botorch.models.model.Model`.

    Args:
        model: what `fit`, `linearised_laplace` or a baseline returns, or an estimator of tables of
            numbers; with numbers to predict. BoTorch maximises: fit to -y to minimise.
        inputs: some points, for a module whose number of inputs the model does not know.
        n_draws: number of functions: by default all draws, or 256 of linearised Laplace. The time
            of an acquisition function is proportional to it.

    Attributes:
        model: the model.
        functions: the draws; see `Predictor.functions`. They are computed in the dtype of the
            network: with `module.double()` optimisers of acquisition functions come nearest.

    Raises:
        InputError: a model of classes, or one whose predictions are no graph of tensors.

    Example:
        >>> from botorch.acquisition.logei import qLogExpectedImprovement
        >>> from botorch.optim import optimize_acqf
        >>> import subbayes
        >>> x = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
        >>> y = -(x[:, 0] - 0.6) ** 2
        >>> model = subbayes.fit(
        ...     subbayes.MLP(1, (10,), 1, "tanh", seed=0).double(), (x, y), subspace="full",
        ...     inference="laplace-linearised", training=subbayes.Training(epochs=300),
        ...     sampling=subbayes.Sampling(draws=50, progress=False))
        >>> acquisition = qLogExpectedImprovement(BoTorchModel(model), best_f=y.max())
        >>> bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        >>> candidate, _ = optimize_acqf(acquisition, bounds, q=2, num_restarts=2, raw_samples=16)
        >>> candidate.shape
        torch.Size([2, 1])
    """

    likelihood = None  # which `fantasize` asks for the noise of

    def __init__(
        self, model: Any, inputs: Tensor | None = None, *, n_draws: int | None = None
    ) -> None:
        super().__init__()
        self.model, self.n_draws = model, n_draws
        known = {} if inputs is None else {"inputs": inputs}
        self.functions = model.functions(n_draws=n_draws, **known)
        if self.functions.classes:
            fail("model", "a model of numbers to optimise", "one of classes")
        rows = self.functions.rows
        example: Tensor = rows["numbers"] if isinstance(rows, dict) else rows
        self._dtype = example.dtype
        with torch.no_grad():
            self._outputs = self._functions(example[:1])[0].shape[-1]
        # functions, values and variances of the noise at hypothetical observations
        self._observed: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    @override
    def num_outputs(self) -> int:
        return self._outputs

    @property
    @override
    def batch_shape(self) -> torch.Size:
        return torch.Size() if self._observed is None else self._observed[1].shape[:-2]

    def _functions(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Functions and variances of the noise, each (batch) x S x q x m."""
        found = self.functions.moments(X.reshape(-1, X.shape[-1]).to(self._dtype))
        shape = X.shape[:-1]
        f, variances = (v.reshape(len(v), *shape, v.shape[-1]).movedim(0, -3) for v in found)
        return f, variances

    def _moved(self, f: Float[Tensor, "*batch S q m"]) -> Float[Tensor, "*batches S q m"]:
        """Functions after hypothetical observations."""
        if self._observed is None:
            return f
        seen, Y, V = self._observed
        eps = _noise(seen, V, _PERTURBATION)
        gap = Y.unsqueeze(-3) - seen - (eps - eps.mean(-3, keepdim=True))
        # each output by itself: (batch) x m x S x points
        a, b = ((v - v.mean(-3, keepdim=True)).movedim(-1, -3) for v in (f, seen))
        b_T = b.transpose(-1, -2) / (b.shape[-2] - 1)
        K, V = b_T @ b, V.transpose(-1, -2)
        jitter = _JITTER * K.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        half = torch.linalg.solve(K + torch.diag_embed(V + jitter), b_T @ a)  # n x q
        return f + (gap.movedim(-1, -3) @ half).movedim(-3, -1)

    @override
    def posterior(  # type: ignore[override]
        self,
        X: Float[Tensor, "*batch q d"],
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The functions at points, with noise if wanted; variances of it may be given."""
        f, variances = self._functions(self.transform_inputs(X))
        values = self._moved(f)
        if observation_noise is not False:
            is_known = isinstance(observation_noise, Tensor)
            V: Any = observation_noise if is_known else variances.mean(-3)
            values = values + _noise(values, V, _NOISE)
        if output_indices is not None:
            values = values[..., output_indices]
        posterior = FunctionPosterior(values)
        return posterior if posterior_transform is None else posterior_transform(posterior, X=X)

    @override
    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **options: Any
    ) -> BoTorchModel:
        """A model after observations: real ones without batch shape, or hypothetical ones.

        Args:
            X: points, (batch) x n x d.
            Y: observations, (more batches) x (batch) x n x m.
            noise: variances of hypothetical ones, by default those of the likelihood.
            options: of `update`, such as `seed`.
        """
        if Y.ndim == 2 and self._observed is None:
            rows = X.to(self._dtype), (Y[:, 0] if self._outputs == 1 else Y).to(self._dtype)
            is_predictor = isinstance(self.model, Predictor)
            updated = self.model.update(*([rows] if is_predictor else rows), **options)
            inputs = rows[0] if is_predictor else None
            return BoTorchModel(updated, inputs, n_draws=self.n_draws)
        seen, variances = self._functions(X)
        V = variances.mean(-3) if noise is None else noise
        if self._observed is not None:
            batch = Y.shape[:-2]
            pairs = zip(self._observed, (seen, Y, V), strict=True)
            seen, Y, V = (
                torch.cat([v.expand(*batch, *v.shape[-k:]) for v in pair], -2)
                for k, pair in zip((3, 2, 2), pairs, strict=True)
            )
        conditioned = copy.copy(self)
        conditioned._observed = seen, Y, V
        return conditioned


def _noise(values: Tensor, variance: Tensor, seed: int) -> Tensor:
    """Noise of each function at each point: the same random numbers in all batches."""
    generator = torch.Generator().manual_seed(seed)
    eps = torch.randn(values.shape[-3:], generator=generator, dtype=torch.float64)
    return eps.to(values) * variance.unsqueeze(-3).sqrt()
