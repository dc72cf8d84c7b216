"""A sparse network: which inputs matter, and the small network that is exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from examples.demo.methods import Rows
from examples.demo.section import Figure, Section, with_error
from subbayes import plots
from subbayes.diagnostics import metrics
from subbayes.diagnostics.standard_errors import standard_errors
from subbayes.likelihoods import Gaussian
from subbayes.networks.mlp import MLP
from subbayes.predictions.predictive import Predictive
from subbayes.reports.rendering import Table
from subbayes.sparse.configuration import SparseTraining
from subbayes.sparse.convert import convert
from subbayes.sparse.training import fit

HIDDEN = (50, 50)


def small_network(
    rows: Rows, seed: int, epochs: int, folder: Path, progress: bool | None = None
) -> Section:
    """Fit a sparse network to the table of the methods, and export it to a folder.

    Args:
        rows: the table.
        seed: of the network and its training.
        epochs: of training.
        folder: where to write `small.safetensors`.
        progress: show a bar.
    """
    (x, y), (x_test, y_test) = rows.encoded(rows.train), rows.encoded(rows.test)
    shift, scale = y.mean(), y.std()
    inputs, test = torch.from_numpy(x), torch.from_numpy(x_test)
    dense = MLP(x.shape[1], HIDDEN, 1, activation="tanh", seed=seed)
    result = fit(
        convert(dense, seed=seed),
        Gaussian(),
        (inputs, torch.from_numpy((y - shift) / scale).float()),
        SparseTraining(epochs=epochs),
        seed=seed,
        progress=progress,
    )
    small = result.small_network(inputs)
    small.to_safetensors(folder / "small.safetensors", overwrite=True)
    with torch.no_grad():
        outputs = small.module(test)[None].double()
    predictives = {
        "draws of the posterior": result.predict(test),
        "the small network": Predictive(outputs, result.likelihood),
    }
    counted = {"draws of the posterior": _count(dense), "the small network": _count(small.module)}
    table, facts = [], {}
    target = (y_test - shift) / scale
    for name, predictive in predictives.items():
        rmse, error = metrics.rmse(predictive, target), standard_errors(predictive, target)["rmse"]
        table.append([name, f"{counted[name]}", with_error(scale * rmse, scale * error)])
        facts[name] = {"numbers": counted[name], "rmse": [scale * rmse, scale * error]}
    size, whole = (folder / "small.safetensors").stat().st_size, _dense_bytes(dense)
    probabilities = np.asarray(result.feature_inclusion())
    names = rows.encoder.get_feature_names_out()
    included = [str(name) for name, p in zip(names, probabilities, strict=True) if p > 0.5]
    return Section(
        "sparse",
        "The network that is left",
        (
            "A sparse network for the same table: each weight of a network with two hidden layers "
            f"of {HIDDEN[0]} units is included or excluded with a probability, and the small "
            "network keeps those with a probability above one half. Five of the ten inputs matter.",
        ),
        Table(
            ["prediction by", "weights", "RMSE"],
            table,
            "± one standard error over test rows. The draws are of a network with all weights.",
        ),
        (
            f"Inputs with a probability above one half: {', '.join(included)}.",
            f"small.safetensors takes {size} bytes with its description, the weights of the whole "
            f"network {whole}.",
        ),
        {
            "inclusion": Figure(
                lambda: plots.feature_inclusion(
                    pd.Series(probabilities, index=[str(name) for name in names])
                ),
                "Probability that an input is connected to the output.",
            )
        },
        facts | {"bytes": size, "dense_bytes": whole, "inclusion": probabilities.tolist()},
    )


def _count(module: torch.nn.Module) -> int:
    """Number of weights, those of a sparse layout included."""
    return sum(
        tensor.values().numel() if tensor.layout == torch.sparse_csr else tensor.numel()
        for tensor in module.state_dict().values()
    )


def _dense_bytes(module: torch.nn.Module) -> int:
    """Bytes of the weights of a network in float32."""
    return 4 * _count(module)
