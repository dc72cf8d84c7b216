"""Networks beside one another: each is made orthogonal to its own columns alone."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from subbayes import MLP, Sampling, SemiStructuredRegression, Training
from subbayes.semistructured.subspace import SemiStructuredSubspace

QUICK = {
    "training": Training(epochs=20, batch_size=None, validation=None, patience=None),
    "sampling": Sampling(draws=10, chains=1, progress=False, seed=4),
    "subspace": SemiStructuredSubspace(3),
    "inference": "smc",
}


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.normal(size=(40, 2)), columns=["x", "b"])
    image = (frame.x.to_numpy() + 0.5 * rng.normal(size=40)).astype(np.float32)[:, None]
    frame["y"] = frame.x + image[:, 0] + 0.3 * rng.normal(size=40)
    deep = {
        "image": MLP(1, (4,), 1, seed=1),
        "x": MLP(1, (3,), 1, seed=2),
        "b": MLP(1, (3,), 1, seed=3),
    }
    model = SemiStructuredRegression(
        "y ~ x + image(image) + x(x) + b(b)", networks=deep, effects="sample"
    )
    return frame, image, model.fit(frame, inputs={"image": image}, **QUICK)


def naive_outputs(model, inputs):
    """Outputs of each network for each draw, from modules with the weights of the draw."""
    state = model.state
    deep = state.model.deep
    named = list(deep.named_parameters())
    found = {name: [] for name in deep.places}
    for row in state.joint.networks_of(state.draws):
        parts = row.split([p.numel() for _, p in named])
        values = {n: v.reshape(p.shape).to(p) for (n, p), v in zip(named, parts, strict=True)}
        for name, into in found.items():
            one = torch.func.functional_call(
                _Only(deep, name), {f"deep.{n}": v for n, v in values.items()}, (inputs,)
            )
            into.append(one.double().detach().numpy())
    return {name: np.stack(rows) for name, rows in found.items()}


class _Only(nn.Module):
    def __init__(self, deep, name):
        super().__init__()
        self.deep, self.name = deep, name

    def forward(self, inputs):
        return self.deep.output(self.name, inputs)


def test_only_the_network_of_the_formulas_column_loses_its_projection(fitted):
    frame, image, model = fitted
    assert model.orthogonal_to == {"image": "nothing", "x": "effects", "b": "intercept"}
    outputs = naive_outputs(model, model.state.model.inputs)
    design = np.column_stack([np.ones(40), frame.x])
    x = outputs["x"] - outputs["x"] @ design @ np.linalg.pinv(design)
    b = outputs["b"] - outputs["b"].mean(1, keepdims=True)
    expected = outputs["image"] + x + b
    assert np.abs(expected - expected @ design @ np.linalg.pinv(design)).mean() > 0.05
    found = model.state.joint.contributions(model.state.joint.networks_of(model.draws))[..., 0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # the density that was sampled adds the same to the predictor
    z = model.draws.flat()
    structured = model.state.model.structured
    zeta = torch.from_numpy(model.state.joint.effects_of(model.draws))
    eta = structured(
        zeta,
        model.state.model.inputs["design"].double(),
        model.state.model.inputs["offset"].double(),
    )
    eta = eta + nn.functional.pad(torch.from_numpy(expected)[..., None], (0, eta.shape[-1] - 1))
    value = model.state.model.family.log_prob(eta, model.state.model.data.y).sum(-1)
    np.testing.assert_allclose(model.posterior.log_likelihood(z), value, rtol=1e-4)
    # and so do predictions and the parts of rows
    parts = model.contributions(frame, inputs={"image": image})
    np.testing.assert_allclose(parts["deep"]["mean"], expected.mean(0), atol=1e-4)


def test_the_report_says_it_for_each_network(fitted, tmp_path):
    frame, image, model = fitted
    text = model.report(tmp_path / "report.html", test=frame, inputs={"image": image}).read_text()
    for name, words in (
        ("image", "nothing"),
        ("x", "the columns of the formula"),
        ("b", "the level of the predictor alone"),
    ):
        assert words in text.partition(f"network {name} orthogonal to")[2][:200]
