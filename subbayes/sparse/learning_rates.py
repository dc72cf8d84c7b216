"""Learning rates of sparse training, and which parameter has which."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from subbayes.sparse.convert import sparse_layers
from subbayes.utils.checks import check_count, check_positive

__all__ = ["LearningRates", "by_rate"]

_LOGITS = 20.0
_FASTEST, _FASTEST_LOGITS = 1e-2, 0.2  # rates of weights, and of inclusion


@dataclass(frozen=True)
class LearningRates:
    """Learning rates of Adam, by what they move.

    Those of the paper's table 1 throw every weight out with the exact ELBO, before the network has
    learned anything: its published code minimises another quantity, with one nat added for each
    weight that is out. The defaults learn weights faster and inclusion at one pace throughout. The
    slab hardly moves, as in the paper: learned faster, it narrows until all weights may as well be
    in.

    Attributes:
        weights: means and deviations of weights, scales of the horseshoe, and parameters that are
            points.
        early_inclusion: logits of inclusion probabilities while hyper-parameters are learned.
        inclusion: the same afterwards.
        early_covariance: of the logits of "mvn" and "low-rank", at first.
        covariance: the same afterwards.
        inclusion_prior: hyper-parameters of the inclusion prior.
        slab: hyper-parameters of the slab.
        likelihood: parameters of the likelihood.
    """

    weights: float = 1e-3
    early_inclusion: float = 1e-2
    inclusion: float = 1e-2
    early_covariance: float = 1e-2
    covariance: float = 1e-3
    inclusion_prior: float = 1e-2
    slab: float = 1e-5
    likelihood: float = 1e-3

    @classmethod
    def uniform(cls, rate: float, steps: int) -> LearningRates:
        """One rate for all, but for the slab, and for inclusion where steps are few.

        Args:
            rate: of all.
            steps: of the whole training; in them logits of inclusion probabilities can go 20 at
                the least, so that weights that are in can be out at the end.

        Example:
            >>> LearningRates.uniform(0.01, 100).inclusion
            0.2
        """
        pace = max(check_positive("rate", rate), _LOGITS / check_count("steps", steps))
        return cls(
            **dict.fromkeys(asdict(cls()), rate)
            | {"slab": cls.slab, "inclusion": pace, "early_inclusion": pace}
        )

    @classmethod
    def for_steps(cls, steps: int) -> LearningRates:
        """The defaults, and faster ones where steps are few.

        Inclusion probabilities fall whatever the data say; where weights have not learned anything
        by then, all are thrown out.

        Args:
            steps: of the whole training.

        Example:
            >>> LearningRates.for_steps(100_000) == LearningRates()
            True
            >>> LearningRates.for_steps(1000).weights
            0.01
        """
        usual, pace = cls(), _LOGITS / check_count("steps", steps)
        rate = min(_FASTEST, max(usual.weights, pace))
        inclusion = min(_FASTEST_LOGITS, max(usual.inclusion, pace))
        return replace(
            usual,
            weights=rate,
            covariance=rate,
            likelihood=rate,
            inclusion=inclusion,
            early_inclusion=inclusion,
        )

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_positive(name, value)

    def of(self, group: str, early: bool = False) -> float:
        """The rate of a group of `by_rate`, in the first epochs or afterwards.

        Example:
            >>> LearningRates().of("covariance"), LearningRates().of("covariance", early=True)
            (0.001, 0.01)
        """
        known = asdict(self)
        name = "weights" if group == "scales" else group
        return float(known.get(f"early_{name}", known[name]) if early else known[name])

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Parameters of a converted module with their rates, for an optimiser of one's own.

        Args:
            module: what `convert` returned. Where rates of the first epochs are others, they have
                these.

        Example:
            >>> import torch
            >>> from subbayes import sparse
            >>> net = sparse.convert(nn.Linear(3, 1))
            >>> optimizer = torch.optim.Adam(LearningRates(weights=0.01).groups(net))
            >>> [group["lr"] for group in optimizer.param_groups]
            [0.01, 0.01, 0.01, 1e-05]
        """
        return [
            {"params": params, "lr": self.of(name, early=True)}
            for name, params in by_rate(module).items()
        ]


def by_rate(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Parameters by what they are: the name of their rate, or "scales" (of the horseshoe)."""
    groups: dict[str, list[nn.Parameter]] = {
        name: []
        for name in ("weights", "inclusion", "covariance", "scales", "inclusion_prior", "slab")
    }
    for layer in sparse_layers(module).values():
        for name, parameter in layer.logits.named_parameters():
            groups["inclusion" if name == "mean" else "covariance"].append(parameter)
        groups["inclusion_prior"] += layer.inclusion.parameters()
        groups["slab"] += layer.slab.parameters()
        groups["scales"] += [getattr(layer, name) for name in layer.scales]
    known = {id(p) for group in groups.values() for p in group}
    groups["weights"] = [p for p in module.parameters() if id(p) not in known and p.requires_grad]
    return {name: params for name, params in groups.items() if params}
