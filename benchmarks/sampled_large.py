"""Linearised Laplace by draws where neither N C nor D squared numbers fit.

- A ResNet-18 of 11.2 million weights and 100 outputs on 32 x 32 random images: draws, variances of
  the outputs of other images with their standard errors, and one step of the prior's EM.
- A segmentation network with 64 x 64 x 10 outputs per row: draws and predictions, with the memory
  that they take above the model.
- A language model with adapters and a vocabulary of 8000, in bfloat16: draws of all adapter
  weights, and the exact posterior within a random subspace, with the memory above the model.

Each case is a process of its own; seconds are those of the processor, on one thread, and the rows
and draws are what half an hour allows. `--quick` takes a few rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.adapters import Size, made, plain
from benchmarks.harness import bar, own_peak
from benchmarks.laplace import resnet18
from benchmarks.sampled import alone
from subbayes import Network
from subbayes.curvature.sampled import Sampled
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical, CategoricalTokens
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.subspace import SparseRandomSubspace

__all__ = ["language", "residual", "run", "segmentation"]


def _facts(psi: Sampled) -> dict[str, Any]:
    """Sizes of the draws, and how they were solved."""
    return {
        "weights": psi.size,
        "rows": psi.V.n,
        "outputs": psi.V.rows,
        "draws": psi.samples,
        "iterations": psi.draws.iterations,
        "error_of_solutions": psi.draws.error,
    }


def residual(rows: int, new: int, draws: int, tolerance: float) -> dict[str, Any]:
    """Draws of all weights of a ResNet-18 with 100 outputs, and variances at other images."""
    torch.manual_seed(0)
    network = Network(resnet18(100).eval())
    x, labels = torch.randn(rows + new, 3, 32, 32), torch.arange(rows) % 100
    start = time.process_time()
    posterior = linearised_laplace(
        network,
        Categorical(),
        (x[:rows], labels),
        covariance="sampled",
        samples=draws,
        tolerance=tolerance,
        progress=False,
    )
    psi = posterior.precision
    assert isinstance(psi, Sampled)
    solved = time.process_time() - start
    start = time.process_time()
    mean, found = psi.output_draws(x[rows:], draws, torch.Generator().manual_seed(0))
    variances = found.square().mean(0)
    dimension = psi.effective_dimension
    return _facts(psi) | {
        "passes": psi.products.passes,
        "seconds_draws": solved,
        "seconds_predictions": time.process_time() - start,
        "mean_variance": float(variances.mean()),
        "outputs_predicted": mean.numel(),
        "effective_dimension": dimension,
        "effective_dimension_standard_error": float(psi.draws.fitted.std()) / draws**0.5,
        "next_prior_precision": dimension / float(network.weights.double().square().sum()),
        "mib": own_peak(),
    }


def network_of_places(classes: int = 10) -> nn.Module:
    """A convolutional network with one output for each class and pixel."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2),
        nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, classes, 1),
    )  # fmt: skip


def segmentation(rows: int, new: int, draws: int, tolerance: float) -> dict[str, Any]:
    """Draws and predictions with 40,960 outputs for each row."""
    torch.manual_seed(0)
    network = Network(network_of_places(), output=lambda out: out.flatten(2).mT.flatten(1))
    x = torch.randn(rows + new, 3, 64, 64)
    labels = torch.randint(10, (rows, 64 * 64))
    with torch.no_grad():
        network(network.weights, x[:1])
    start, before = time.process_time(), own_peak()
    posterior = linearised_laplace(
        network,
        CategoricalTokens(10),
        (x[:rows], labels),
        covariance="sampled",
        samples=draws,
        tolerance=tolerance,
        progress=False,
    )
    psi = posterior.precision
    assert isinstance(psi, Sampled)
    solved = time.process_time() - start
    start = time.process_time()
    predictive = posterior.predict(x[rows:])
    return _facts(psi) | {
        "seconds_draws": solved,
        "seconds_predictions": time.process_time() - start,
        "predicted": list(predictive.mean.shape),
        "epistemic": float(predictive.epistemic.mean()),
        "mib_above_model": own_peak() - before,
    }


def language(rows: int, draws: int, tolerance: float, coordinates: int) -> dict[str, Any]:
    """Draws of adapters, and a subspace of them, for texts of 32 tokens and 8000 words."""
    model, batch = made(Size(128, 352, 4, 8000, rows, 32))
    network = Network(model, "adapters", TokenOutputs())
    likelihood, labels = CategoricalTokens(8000, shift=True), batch.pop("labels")
    plain(model, batch)
    start, before = time.process_time(), own_peak()
    options: dict[str, Any] = dict(tolerance=tolerance, progress=False)
    posterior = linearised_laplace(
        network, likelihood, (batch, labels), covariance="sampled", samples=draws, **options
    )
    psi = posterior.precision
    assert isinstance(psi, Sampled)
    solved = time.process_time() - start
    start = time.process_time()
    some = {name: tensor[:1] for name, tensor in batch.items()}
    predictive = posterior.predict(some)
    found = _facts(psi) | {
        "seconds_draws": solved,
        "seconds_predictions": time.process_time() - start,
        "epistemic": float(predictive.epistemic.mean()),
        "mib_above_model": own_peak() - before,
    }
    start = time.process_time()
    space = SparseRandomSubspace(network.weights, coordinates, seed=0)
    inside = linearised_laplace(network, likelihood, (batch, labels), space, progress=False)
    found |= {"coordinates": coordinates, "seconds_subspace": time.process_time() - start}
    start = time.process_time()
    inside.predict(some, n_draws=draws)
    return found | {
        "seconds_subspace_predictions": time.process_time() - start,
        "mib_above_model_in_all": own_peak() - before,
    }


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure; see the module's text."""
    places = alone("segmentation", *((2, 1, 4, 0.1) if quick else (8, 2, 8, 0.1)),
                   module="sampled_large")  # fmt: skip
    say(_line("segmentation", places) + f", {places['mib_above_model']:.0f} MiB above the model")
    large = alone("residual", *((4, 2, 2, 0.5) if quick else (2000, 16, 8, 0.1)),
                  module="sampled_large")  # fmt: skip
    say(_line("ResNet-18", large) + f", {large['mib']:.0f} MiB")
    texts = alone("language", *((2, 2, 0.5, 4) if quick else (16, 8, 0.1, 20)),
                  module="sampled_large")  # fmt: skip
    say(_line("language model", texts) + f", {texts['mib_above_model']:.0f} MiB above the model; "
        f"{texts['coordinates']} coordinates in {texts['seconds_subspace']:.0f} s")  # fmt: skip
    return {"segmentation": places, "residual": large, "language": texts}, [
        bar("segmentation: MiB above the model", places["mib_above_model"], 2048.0, "lower"),
        bar("ResNet-18: peak MiB", large["mib"], 24 * 1024.0, "lower"),
    ]


def _line(name: str, found: dict[str, Any]) -> str:
    return (
        f"{name}: {found['weights']} weights, {found['rows']} rows, {found['outputs']} outputs, "
        f"{found['draws']} draws in {found['seconds_draws']:.0f} s ({found['iterations']} "
        f"iterations, error {found['error_of_solutions']:.2g}), predictions in "
        f"{found['seconds_predictions']:.1f} s"
    )
