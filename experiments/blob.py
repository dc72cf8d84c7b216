r"""BLoB: mean-field inference of some weights while the others are trained (Wang et al. 2024).

$$ \max_{m, s, \theta}\; E_{w \sim N(m, \mathrm{diag}(s^2))}
     \Bigl[\sum_n \log p(y_n \mid f(x_n; w, \theta))\Bigr]
   - \lambda\, \mathrm{KL}\bigl(N(m, \mathrm{diag}(s^2)) \,\|\, N(0, \sigma^2 I)\bigr) $$

In BLoB w are the matrices A of low-rank adapters B A, and $\theta$ the matrices B and the head.
With all weights in w it is Bayes by Backprop (Blundell et al. 2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.baselines.ensemble import WeightSamples
from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.networks.token_outputs import output_for
from subbayes.training.configuration import Training
from subbayes.training.loop import History, run
from subbayes.training.minibatches import Minibatches, split_validation
from subbayes.training.optimizer import make_optimizer
from subbayes.training.trainable import TrainableNetwork
from subbayes.training.unfinished import has_converged, losses_up_to, warn_of_unfinished
from subbayes.utils.checks import check_count, check_positive, check_seed, is_finite
from subbayes.utils.seeding import fork_rng
from subbayes.utils.types import Inputs, Targets

_DRAWS_OF_NOISE = 10  # of the weights, with which the learned noise is compared


@dataclass(frozen=True)
class MeanFieldSettings:
    r"""The prior of random weights, where their deviations start, and the weight of the KL term.

    Attributes:
        prior_scale: $\sigma$ of the prior; 0.2 in the paper.
        initial_scale: initial standard deviation of all weights.
        kl_weight: $\lambda$; 1 is the evidence lower bound, less a posterior below temperature 1.

    Raises:
        InputError: a number that is not above 0.
    """

    prior_scale: float = 0.2
    initial_scale: float = 0.01
    kl_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prior_scale", "initial_scale", "kl_weight"):
            check_positive(name, getattr(self, name))

    def kl(self, mean: Float[Tensor, " D"], log_sd: Float[Tensor, " D"]) -> Tensor:
        """KL divergence of the weights from their prior, in nats."""
        log_ratio = log_sd - math.log(self.prior_scale)
        squares = (mean / self.prior_scale) ** 2 + (2 * log_ratio).exp()
        return 0.5 * (squares - 1).sum() - log_ratio.sum()


@dataclass(frozen=True, repr=False)
class MeanFieldWeights:
    """Independent Gaussian weights of a network whose other parameters are trained with them.

    Attributes:
        network: the network at the means, with the trained values of the other parameters.
        likelihood: the likelihood with its parameters learned.
        sd: standard deviations of the weights, shape (D,).
        history: one number per epoch, as of `TrainingResult`, and "kl" in nats.
    """

    network: Network
    likelihood: Likelihood
    sd: Float[Tensor, " D"]
    history: History

    @property
    def mean(self) -> Float[Tensor, " D"]:
        """Means of the weights."""
        return self.network.weights

    def sample(self, n_draws: int, seed: int = 0) -> Float[Tensor, "S D"]:
        """Independent weight vectors."""
        generator = torch.Generator().manual_seed(check_seed(seed))
        shape = check_count("n_draws", n_draws), len(self.sd)
        eps = torch.randn(shape, generator=generator, dtype=torch.float64)
        return self.mean + self.sd * eps.to(self.mean)

    def __repr__(self) -> str:
        return f"MeanFieldWeights({self.network!r}, {self.likelihood!r})"


def blob(
    module: nn.Module,
    likelihood: str | Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    random: Selection = "*lora_A*",
    settings: MeanFieldSettings = MeanFieldSettings(),
    n_draws: int = 30,
    seed: int = 0,
    validation: Any = None,
    output: Callable[[Any], Tensor] | None = None,
    progress: bool | None = None,
) -> WeightSamples:
    r"""Fine-tune a module with Gaussian matrices A of its adapters, and draw weights.

    See `train_mean_field` for the arguments and the errors; `n_draws` is the number of weight
    vectors, 10 in the paper.

    Example:
        >>> from collections import OrderedDict
        >>> layers = OrderedDict(lora_A=nn.Linear(2, 1, bias=False), lora_B=nn.Linear(1, 3))
        >>> data = torch.randn(20, 2), torch.arange(20) % 3
        >>> found = blob(nn.Sequential(layers), "categorical", data, Training(epochs=2), n_draws=10)
        >>> found.network, found.predict(data[0]).n_draws
        (Network(Sequential, 2 weights in 1 parameters), 10)
    """
    check_count("n_draws", n_draws)
    found = train_mean_field(
        module,
        likelihood,
        data,
        training,
        random=random,
        settings=settings,
        seed=seed,
        validation=validation,
        output=output,
        progress=progress,
    )
    return WeightSamples(found.network, found.sample(n_draws, seed), found.likelihood, "BLoB")


def train_mean_field(
    module: nn.Module,
    likelihood: str | Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    random: Selection = "all",
    settings: MeanFieldSettings = MeanFieldSettings(),
    seed: int = 0,
    validation: Any = None,
    output: Callable[[Any], Tensor] | None = None,
    progress: bool | None = None,
) -> MeanFieldWeights:
    r"""Train means and standard deviations of some weights, and the other parameters, by the ELBO.

    Each step draws the random weights once, $w = m + s \epsilon$ (Kingma and Welling 2014), for all
    rows of its minibatch, and follows the gradient of

    $$ -\frac1B \sum_{n \in \mathrm{batch}} \log p(y_n \mid f(x_n; w, \theta))
       + \frac{\lambda}{N} \mathrm{KL}, \qquad
       \mathrm{KL} = \sum_i \frac{m_i^2 + s_i^2}{2 \sigma^2} - \log\frac{s_i}{\sigma} - \frac12 . $$

    Departures from the paper: its flipout draws, which differ between the rows of a minibatch, are
    left out; $\log s$ is optimised instead of $\sqrt s$; and the weight of the KL term is constant.
    Held-out data are scored at the means.

    Args:
        module: the module, whose weights are the initial means; it is not changed.
        likelihood: p(y | f), or its name as for `fit`; its parameters that are "learned" are
            trained as $\theta$ is.
        data: as for `train`.
        training: settings of the first phase; `prior_scale` or `weight_decay` is that of $\theta$.
        random: which parameters are random, as `parameters` of `Network`; the other trainable ones
            are $\theta$.
        settings: of the random weights.
        seed: of the order of the data and of the draws.
        validation: held-out data, as for `train`.
        output: picks the tensor out of what the module returns, as for `Network`.
        progress: show a progress bar; None shows it on a terminal.

    Raises:
        InputError: what `train` raises.

    Warns:
        sklearn.exceptions.ConvergenceWarning: learned parameters of the likelihood that have not
            converged.

    Source:
        Wang, Shi, Han, Metaxas and Wang (2024), "BLoB: Bayesian low-rank adaptation by
        backpropagation for large language models", NeurIPS, eq. (5) to (9).

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> found = train_mean_field(nn.Linear(1, 1), Gaussian(0.5), (x, 3 * x[:, 0]),
        ...                          Training(epochs=50, learning_rate=0.05, batch_size=None))
        >>> found.sd.shape, bool(found.mean[0] > 1.0)
        (torch.Size([2]), True)
    """
    check_count("epochs", training.epochs)
    output = output_for(likelihood, output)
    network = Network(module, random, output, copy_frozen=False)
    with fork_rng(seed, network.device), torch.enable_grad():
        data, held_out = split_validation(data, training, validation, seed)
        minibatches = Minibatches(data, likelihood, network, training.batch_size, seed)
        task = _MeanField(minibatches, training, held_out, settings)
        histories, epochs = run(
            task,
            training.epochs,
            patience=training.patience,
            time_limit=training.time_limit,
            progress=progress,
        )
    trained = Network(task.module.eval(), random, output, copy_frozen=False)
    trained.fixed_norms = network.fixed_norms
    found = MeanFieldWeights(
        trained, task.learned_likelihood(), task.log_sd.detach().exp(), histories[0]
    )

    def draw_outputs(inputs: Inputs) -> Float[Tensor, "S N C"]:
        weights = found.sample(_DRAWS_OF_NOISE, seed)
        return torch.stack([trained(w, inputs) for w in weights])

    learned, losses = task.unconstrained.detach(), losses_up_to(histories[0], epochs[0])
    warn_of_unfinished([has_converged(trained, minibatches, learned, losses, draw_outputs)])
    return found


class _MeanField(TrainableNetwork):
    """A module of which some weights are drawn anew in each step; its own values are the means."""

    def __init__(
        self,
        minibatches: Minibatches,
        training: Training,
        held_out: Data | None,
        settings: MeanFieldSettings,
    ) -> None:
        super().__init__(minibatches, training, held_out)
        self.settings = settings
        start = math.log(settings.initial_scale)
        self.log_sd = nn.Parameter(torch.full_like(self.network.weights, start))
        self.others.append(self.log_sd)
        means = {n: self.copies.by_name[n] for n in self.network.names}
        others = {n: p for n, p in self.copies.by_name.items() if n not in means}
        none = nn.Parameter(self.unconstrained.new_zeros(0))
        # the KL term takes the place of a decay of the means
        self.optimizers = [make_optimizer(means | {"log_sd": self.log_sd}, none, training, 0.0)]
        if others or self.unconstrained.numel():
            decay = training.weight_decay_for(minibatches.n)
            self.optimizers.append(make_optimizer(others, self.unconstrained, training, decay))

    def mean(self) -> Float[Tensor, " D"]:
        """The means, differentiable."""
        masks = self.network.masks
        parts = [(self.copies.by_name[n], masks.get(n)) for n in self.network.names]
        flat = [p.reshape(-1) if mask is None else p[mask] for p, mask in parts]
        return torch.cat(flat).to(self.log_sd)

    def step(self, inputs: Inputs, y: Targets) -> Tensor:
        """Make one step; returns the negative log-likelihood of the draw."""
        mean = self.mean()
        eps = torch.randn(mean.shape, dtype=mean.dtype).to(mean)
        weights = mean + self.log_sd.exp() * eps
        loss = self.loss(self.network.call(self.module, inputs, weights), y)
        kl = self.settings.kl(mean, self.log_sd)
        self.clear_gradients()
        (loss + self.settings.kl_weight / self.minibatches.n * kl).backward()
        self.update()
        return loss.detach()

    def end_epoch(self, number: int, losses: list[Any], rows: list[int]) -> list[dict[str, float]]:
        """The metrics of an epoch, with the KL divergence from the prior."""
        with torch.no_grad():
            kl = float(self.settings.kl(self.mean(), self.log_sd))
        return [one | {"kl": kl} for one in super().end_epoch(number, losses, rows)]

    def are_finite(self) -> list[bool]:
        """Whether the trained weights and their standard deviations are finite."""
        return [super().are_finite()[0] and is_finite(self.log_sd)]

    def state(self, member: int = 0) -> dict[str, Any]:
        """A copy of everything that training changes."""
        return super().state() | {"log_sd": self.log_sd.detach().clone()}

    @override
    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        super().restore(states)
        self.log_sd.data.copy_(states[0]["log_sd"])
