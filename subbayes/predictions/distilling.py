r"""One small network in place of a predictive distribution (Hinton, Vinyals and Dean 2015).

A student learns from the predictions of a teacher alone, at rows and at perturbed ones: points
between two rows, with noise. Of classes it minimises
$\mathrm{KL}(p_\mathrm{teacher} \,\|\, p_\mathrm{student})$, of numbers the same between the
normal distributions with the means and variances of the two, with squared errors of the logarithm
of the epistemic variance and of the quantiles. No labels are needed.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.predictions.modules import PredictiveModule
from subbayes.utils.checks import fail
from subbayes.utils.seeding import fork_rng, give_way
from subbayes.utils.warning import warn_user

_HIDDEN = 64
_PERTURBED, _NOISE = 16384, 0.5  # rows, and their noise in standard deviations of a column
_STEPS, _BATCH, _RATE = 3000, 256, 3e-3
_AT_ONCE = 256  # rows for which the teacher predicts in one call
_MINIMUM, _HELD_OUT = 20, 5  # rows, and the share of them to measure the distance, one in 5
_FAR = 0.02  # nats
_WEIGHT = 0.1  # of the squared errors
_SMALL = 1e-9  # share of the variance that counts as none


class Student(nn.Module):
    """A network with the outputs of a `PredictiveModule`.

    Args:
        inputs: rows, which set the scale of the inputs.
        teacher: predictions at these rows, which set the scale of the outputs.
        facts: of the teacher.

    Attributes:
        distance: mean divergence from the teacher at rows held out of training, in nats.
        facts: of the teacher, with this distance.
    """

    def __init__(
        self, inputs: Float[Tensor, "N D"], teacher: dict[str, Tensor], facts: dict[str, Any]
    ) -> None:
        super().__init__()
        self.facts, self.distance = facts, float("nan")
        self.classes = "probabilities" in teacher
        if self.classes:
            count = teacher["probabilities"].shape[-1] + 1
            shift = torch.zeros(count).double()
            scale = torch.ones(count).double()
        else:
            self.single = teacher["mean"].ndim == 1
            targets = _coordinates(teacher, self.single)
            self.shape = targets.shape[1:]
            shift = targets.flatten(1).mean(0)
            scale = targets.flatten(1).std(0)
        self.network = nn.Sequential(
            nn.Linear(inputs.shape[1], _HIDDEN),
            nn.SiLU(),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.SiLU(),
            nn.Linear(_HIDDEN, len(shift)),
        ).double()
        self.units = inputs.mean(0), inputs.std(0).clamp_min(1e-12), shift, scale

    def forward(self, inputs: Float[Tensor, "N D"]) -> dict[str, Tensor]:
        """Numbers of each row, by name, in float64; see `PredictiveModule`."""
        return self.outputs(self.network(inputs.double()))

    def standardised(self, inputs: Float[Tensor, "N D"]) -> dict[str, Tensor]:
        """The outputs before the units are those of the network; see `with_units`."""
        center, width, shift, scale = self.units
        return self.outputs(self.network((inputs - center) / width) * scale + shift)

    def with_units(self) -> Student:
        """Put the units of inputs and outputs into the weights, in place."""
        center, width, shift, scale = self.units
        first: Any = self.network[0]
        last: Any = self.network[-1]
        with torch.no_grad():
            first.weight /= width
            first.bias -= first.weight @ center
            last.weight *= scale[:, None]
            last.bias.mul_(scale).add_(shift)
        return self.requires_grad_(False)

    def outputs(self, found: Float[Tensor, "N P"]) -> dict[str, Tensor]:
        """What the numbers of the network stand for."""
        if self.classes:
            p = found[:, :-1].softmax(-1)
            entropy = torch.special.entr(p).sum(-1)
            information = found[:, -1].sigmoid() * entropy
            return {"probabilities": p, "entropy": entropy, "mutual_information": information}
        found = found.unflatten(-1, self.shape)
        mean, aleatoric, epistemic = found[..., 0], found[..., 1].exp(), found[..., 2].exp()
        outputs = {"mean": mean, "aleatoric": aleatoric, "epistemic": epistemic}
        if found.shape[-1] > 3:
            steps = torch.cat([found[..., 3:4], found[..., 4:].exp()], -1).cumsum(-1)
            deviation = (aleatoric + epistemic).sqrt()
            outputs["quantiles"] = mean[..., None] + deviation[..., None] * steps
        return {name: v[:, 0] for name, v in outputs.items()} if self.single else outputs


def _coordinates(teacher: dict[str, Tensor], single: bool) -> Float[Tensor, "N T P"]:
    """Mean, log variances, and the first quantile and log increments, in standard deviations."""
    values = {name: v[:, None] for name, v in teacher.items()} if single else teacher
    mean = values["mean"]
    total = values["aleatoric"] + values["epistemic"]
    logs = [(values[k] + _SMALL * total).log() for k in ("aleatoric", "epistemic")]
    found = [torch.stack([mean, *logs], -1)]
    if "quantiles" in values:
        scaled = (values["quantiles"] - mean[..., None]) / total.sqrt()[..., None]
        found += [scaled[..., :1], scaled.diff(dim=-1).clamp_min(_SMALL).log()]
    return torch.cat(found, -1)


def divergence(teacher: dict[str, Tensor], student: dict[str, Tensor]) -> Float[Tensor, "N"]:
    """KL(teacher || student) of each row in nats: of classes, or of normals with both moments.

    Example:
        >>> one = {"mean": torch.zeros(1), "aleatoric": torch.ones(1), "epistemic": torch.zeros(1)}
        >>> divergence(one, one | {"mean": torch.ones(1)})
        tensor([0.5000])
    """
    if "probabilities" in teacher:
        p, q = (one["probabilities"].clamp_min(1e-30) for one in (teacher, student))
        return (p * (p / q).log()).sum(-1)
    v, w = (one["aleatoric"] + one["epistemic"] for one in (teacher, student))
    each = ((w / v).log() + (v + (teacher["mean"] - student["mean"]).square()) / w - 1) / 2
    return each.flatten(1).sum(-1) if each.ndim > 1 else each


def _loss(teacher: dict[str, Tensor], student: dict[str, Tensor]) -> Tensor:
    loss = divergence(teacher, student).mean()
    if "probabilities" in teacher:
        name = "mutual_information"
        return loss + (teacher[name] - student[name]).square().mean()
    total = teacher["aleatoric"] + teacher["epistemic"]
    logs = [(one["epistemic"] + _SMALL * total).log() for one in (teacher, student)]
    errors = [logs[0] - logs[1]]
    if "quantiles" in teacher:
        errors += [(teacher["quantiles"] - student["quantiles"]) / total.sqrt()[..., None]]
    return loss + _WEIGHT * sum(error.square().mean() for error in errors)


def _perturbed(inputs: Float[Tensor, "N D"]) -> Float[Tensor, "M D"]:
    first, second = torch.randint(len(inputs), (2, _PERTURBED))
    share = torch.rand(_PERTURBED, 1).to(inputs)
    noise = torch.randn(_PERTURBED, inputs.shape[1]).to(inputs)
    return torch.lerp(inputs[first], inputs[second], share) + _NOISE * inputs.std(0) * noise


def _predictions(module: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        each = [module(rows) for rows in inputs.split(_AT_ONCE)]
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}


def distilled(teacher: PredictiveModule, inputs: Any, seed: int = 0) -> Student:
    """Train a network on the predictions of a module.

    Args:
        teacher: the predictive distribution.
        inputs: rows like those to predict, shape (N, D), at least 20; a fifth of them measures the
            distance.
        seed: of rows held out, perturbations, weights and batches.

    Raises:
        InputError: inputs that are no matrix of numbers, or too few of them.

    Warns:
        UserWarning: a distance above 0.02 nats.
    """
    matrix = isinstance(inputs, Tensor) and inputs.ndim == 2 and inputs.is_floating_point()
    if not matrix or len(inputs) < _MINIMUM:
        got = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs)
        fail("inputs", f"at least {_MINIMUM} rows of numbers, shape (N, D), to distil at", got)
    teacher = teacher.cpu().eval()
    with fork_rng(seed), torch.enable_grad():
        order = torch.randperm(len(inputs))
        shuffled = inputs.detach().cpu()[order]
        held_out, rows = shuffled.tensor_split([len(shuffled) // _HELD_OUT])
        rows = torch.cat([rows, _perturbed(rows)])
        known = _predictions(teacher, rows)
        student = Student(rows.double(), known, teacher.facts)
        optimizer = torch.optim.Adam(student.parameters(), _RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        for _ in range(_STEPS):
            batch = torch.randint(len(rows), (_BATCH,))
            targets = {name: values[batch] for name, values in known.items()}
            optimizer.zero_grad()
            _loss(targets, student.standardised(rows[batch])).backward()
            optimizer.step()
            schedule.step()
            give_way()
    student.with_units()
    found = divergence(_predictions(teacher, held_out), _predictions(student, held_out))
    student.distance = float(found.mean())
    student.facts = teacher.facts | {"distilled": True, "distance": student.distance}
    if not student.distance <= _FAR:
        warn_user(
            f"the distilled network is {student.distance:.2g} nats from the model, above {_FAR}: "
            "pass more rows like those to predict, or export without distil=True"
        )
    return student
