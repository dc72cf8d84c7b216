"""Copies of columns are found by their correlation, not by their names."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.cross_decomposition import CCA
from torch import nn

from subbayes import MLP, InputError, Sampling, SemiStructuredRegression, Training
from subbayes.regression.effects_posterior import EffectsModule
from subbayes.regression.questions.new_groups import rows_without_groups
from subbayes.semistructured.contributions import Contributions
from subbayes.semistructured.orthogonal_columns import OrthogonalColumns, orthogonal_networks
from subbayes.semistructured.overlap import overlap
from subbayes.semistructured.predictors import Predictors

GROUPS = [f"Intercept | g[{level}]" for level in "012"]


def table(n=120):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.normal(size=(n, 4)), columns=list("xuvw"))
    frame["z"] = 3 - 0.1 * frame.x  # a copy of x in other units
    frame["close"] = frame.x + 0.3 * rng.normal(size=n)
    frame["g"] = rng.integers(0, 3, n).astype(str)
    frame["y"] = frame.x + rng.normal(size=n)
    return frame


def prepared(formula, *reads, inputs=None, **options):
    frame = table()
    networks = {f"n{i}": MLP(len(c), (3,), 1) for i, c in enumerate(reads)}
    terms = [f"n{i}({', '.join(c)})" for i, c in enumerate(reads)]
    if inputs is not None:
        networks["tensor"] = nn.Linear(inputs.shape[1], 1)
        terms.append("tensor(tensor)")
    model = SemiStructuredRegression(" + ".join([formula, *terms]), networks=networks, **options)
    return model.specification.prepare(frame, {} if inputs is None else {"tensor": inputs})


def made_orthogonal(model):
    return sorted(name for columns in by_network(model).values() for name in columns)


def by_network(model):
    return {
        name: [model.design.names[i] for i in part.columns.columns]
        for part in orthogonal_networks(model)
        for name in part.names
    }


def test_the_canonical_correlation_is_that_of_another_library():
    model = prepared("y ~ x + w", ["close", "u", "v"])
    found = overlap(model, "n0", model.design.terms)
    frame = table()
    a, b = CCA(1, scale=True, max_iter=5000, tol=1e-12).fit_transform(
        frame[["close", "u", "v"]], frame[["x", "w"]]
    )
    assert found == pytest.approx(abs(np.corrcoef(a[:, 0], b[:, 0])[0, 1]), abs=1e-6)
    assert 0.9 < found < 0.99


def test_a_copy_in_other_units_is_made_orthogonal():
    model = prepared("y ~ x", ["u"], ["z", "v"])
    assert by_network(model) == {"n0": ["Intercept"], "n1": ["Intercept", "x"]}
    # a sum of inputs that none of them is
    frame = table()
    both = np.column_stack([frame.x + 2 * frame.u, frame.u]).astype(np.float32)
    model = prepared("y ~ x", inputs=both)
    assert made_orthogonal(model) == ["Intercept", "x"]


def test_other_networks_are_centred():
    model = prepared("y ~ x", ["close"])
    assert made_orthogonal(model) == ["Intercept"]
    for formula, reads in (("y ~ x", ["u", "v"]), ("y ~ 1", ["z"])):
        model = prepared(formula, reads)
        assert made_orthogonal(model) == ["Intercept"]
        model = prepared("y ~ x", inputs=np.ones((120, 2), dtype=np.float32))
    assert overlap(model, "tensor", model.design.terms) == 0


def test_each_network_is_decided_for_itself():
    tensor = np.random.default_rng(3).normal(size=(120, 2)).astype(np.float32)
    model = prepared("y ~ x + (1 | g)", ["x"], ["u"], ["g", "v"], inputs=tensor)
    assert by_network(model) == {
        "n0": ["Intercept", "x"],
        "n1": ["Intercept"],
        "n2": ["Intercept", *GROUPS],
    }
    model = prepared("y ~ x", ["z"], ["close"], ["x"], ["u"])
    groups = [part.names for part in orthogonal_networks(model)]
    assert groups == [("n0", "n2"), ("n1", "n3")]  # with the same columns they are one projection


@pytest.mark.parametrize("orthogonal", [True, False])
def test_a_choice_of_the_user_is_kept(orthogonal):
    model = prepared("y ~ x", ["z"], orthogonal=orthogonal)
    assert made_orthogonal(model) == (["Intercept", "x"] if orthogonal else [])


def test_columns_of_the_formula_are_found_by_name():
    model = prepared("y ~ x", ["x", "u"])
    assert made_orthogonal(model) == ["Intercept", "x"]


def test_as_many_inputs_as_rows_are_no_copies_by_chance():
    rng = np.random.default_rng(2)
    many = rng.normal(size=(120, 150)).astype(np.float32)
    model = prepared("y ~ x", inputs=many)
    assert overlap(model, "tensor", model.design.terms) < 0.5
    images = rng.normal(size=(120, 1, 4, 4)).astype(np.float32)
    model = SemiStructuredRegression(
        "y ~ x + image(image)", networks={"image": nn.Sequential(nn.Flatten(), nn.Linear(16, 1))}
    ).specification.prepare(table(), {"image": images})
    assert overlap(model, "image", model.design.terms) == 0


def test_smooths_and_factors_are_compared_and_random_effects_are_not():
    assert made_orthogonal(prepared("y ~ s(x)", ["z"]))[:1] == ["Intercept"]
    assert len(made_orthogonal(prepared("y ~ s(x)", ["z"]))) > 5
    frame_networks = prepared("y ~ x + re(g)", ["u"])
    assert 0 < overlap(frame_networks, "n0", frame_networks.design.terms) < 0.5


@pytest.mark.parametrize(
    ("formula", "reads", "expected"),
    [
        ("y ~ x + (1 | g)", ["g", "u"], ["Intercept", *GROUPS]),
        ("y ~ x + (1 | g)", ["g", "x"], ["Intercept", *GROUPS, "x"]),
        ("y ~ x + re(g)", ["g"], ["Intercept", *(f"Intercept | g[{level}]" for level in "012")]),
        ("y ~ x + (1 | g)", ["u"], ["Intercept"]),
        ("y ~ 1 + (0 + x | g)", ["x"], ["Intercept"]),
        ("y ~ 1 + (0 + x | g)", ["g"], ["Intercept", *(f"x | g[{level}]" for level in "012")]),
        ("y ~ 0 + (1 | g)", ["g"], GROUPS),
    ],
)
def test_random_effects_are_among_the_columns_if_a_network_reads_their_groups(
    formula, reads, expected
):
    model = prepared(formula, reads)
    assert made_orthogonal(model) == expected
    assert made_orthogonal(prepared(formula, reads, orthogonal=False)) == []


def test_orthogonal_true_leaves_out_random_effects_of_groups_that_no_network_reads():
    formula = "y ~ x + (1 | g)"
    assert made_orthogonal(prepared(formula, ["u"], orthogonal=True)) == ["Intercept", "x"]
    both = ["Intercept", *GROUPS, "x"]
    assert made_orthogonal(prepared(formula, ["g"], orthogonal=True)) == both
    # of nested groups the combinations too
    frame = table().assign(h=lambda t: np.where(t.u > 0, "a", "b"))
    model = SemiStructuredRegression("y ~ x + (1 | g/h) + n(h)", networks={"n": MLP(2, (3,), 1)})
    names = made_orthogonal(model.specification.prepare(frame, {}))
    assert len(names) == 1 + 6
    assert names[-1] == "Intercept | g:h[2:b]"


def test_what_networks_share_with_groups_goes_to_the_smallest_random_effects():
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 4, 40)
    fixed = np.column_stack([np.ones(40), rng.normal(size=40)])
    random = np.eye(4)[codes]
    design = torch.from_numpy(np.column_stack([fixed, rng.normal(size=40), random]))
    own = OrthogonalColumns.of(design, [0, 1], [3, 4, 5, 6])
    f = rng.normal(size=40)
    gamma = (own.pseudo_inverse @ torch.from_numpy(f)).numpy()
    # least squares with a vanishing penalty of the random effects
    both = np.column_stack([fixed, random])
    penalty = 1e-9 * np.diag([0.0, 0, 1, 1, 1, 1])
    naive = np.linalg.solve(both.T @ both + penalty, both.T @ f)
    np.testing.assert_allclose(gamma, naive, atol=1e-6)
    assert abs(gamma[2:].sum()) < 1e-12
    rest = f - own.basis.numpy() @ (own.basis.numpy().T @ f)
    np.testing.assert_allclose(rest, f - both @ gamma, atol=1e-12)
    np.testing.assert_allclose(np.bincount(codes, rest), 0, atol=1e-12)


def test_groups_of_single_rows_that_a_network_reads_are_refused():
    frame = table(30).assign(g=np.random.default_rng(0).permutation(30))
    model = SemiStructuredRegression("y ~ x + (1 | g) + n(g)", networks={"n": MLP(1, (3,), 1)})
    with pytest.raises(
        InputError, match=r"^networks: expected those that do not read the groups.*\(1 \| g\)"
    ):
        orthogonal_networks(model.specification.prepare(frame, {}))


def test_predictions_without_groups_need_networks_that_do_not_read_them():
    frame = table()
    for reads in ("g", "u"):
        networks = {"n": MLP(1, (3,), 1)}
        model = SemiStructuredRegression(f"y ~ x + (1 | g) + n({reads})", networks=networks)
        model.fit(
            frame,
            subspace="last-layer",
            inference="elliptical-slice",
            training=Training(epochs=1),
            sampling=Sampling(draws=2, chains=2, warmup=1, progress=False, mode="eager"),
        )
        if reads == "g":
            with pytest.raises(InputError, match="groups: expected True with a network that reads"):
                model.predict(frame, groups=False)
            continue
        prepared_model = model.state.model
        found = rows_without_groups(prepared_model, frame, None, "error")["design"]
        random = [prepared_model.design.names.index(name) for name in GROUPS]
        others = [i for i in range(len(prepared_model.design.names)) if i not in random]
        assert not found[:, random].any()
        assert found[:, others].equal(prepared_model.inputs["design"][:, others])


def test_a_row_of_weight_2_is_two_rows_in_projections():
    """Least squares on expanded rows, also of random effects beside fixed effects of the groups."""
    rng = np.random.default_rng(4)
    codes, count = rng.integers(0, 70, 300), rng.integers(1, 6, 300)
    fixed = np.column_stack([np.ones(300), rng.normal(size=300)])
    design = torch.from_numpy(np.column_stack([fixed, np.eye(70)[codes]]))
    f = torch.from_numpy(rng.normal(size=(3, 300)) + fixed[:, 1] ** 2)
    rows, own = torch.from_numpy(np.arange(300).repeat(count)), torch.from_numpy(count).double()
    for groups in ((), range(2, 72)):
        once = OrthogonalColumns.of(design, [0, 1], groups, own)
        expanded = OrthogonalColumns.of(design[rows], [0, 1], groups)
        gamma = f @ once.pseudo_inverse.mT
        np.testing.assert_allclose(gamma, f[:, rows] @ expanded.pseudo_inverse.mT, atol=1e-10)
        rest = once.residual(f)
        np.testing.assert_allclose(rest[:, rows], expanded.residual(f[:, rows]), atol=1e-10)
        np.testing.assert_allclose(rest, f - gamma @ design[:, once.columns].mT, atol=1e-10)
        assert not np.allclose(rest, OrthogonalColumns.of(design, [0, 1], groups).residual(f), 1e-3)
        again = once.weighted(rest[0].numpy(), count.astype(float))
        np.testing.assert_allclose(once.coefficients(again[None]), 0, atol=1e-10)


def test_networks_of_weighted_rows_are_those_of_expanded_rows():
    frame = table().assign(k=lambda t: np.where(t.x > 0.5, 5, 1))
    tensor = torch.from_numpy(frame[["x"]].to_numpy() ** 2).float()
    network = MLP(1, (4,), 1, seed=0)
    rows = np.arange(len(frame)).repeat(frame.k)
    found, slopes = [], []
    for data, values, weights in (
        (frame, tensor, "k"),
        (frame.iloc[rows], tensor[rows], None),
        (frame, tensor, None),
    ):
        model = SemiStructuredRegression(
            "y ~ x + n(n)", networks={"n": network}, weights=weights, orthogonal=True
        ).specification.prepare(data, {"n": values})
        (own,) = orthogonal = orthogonal_networks(model)
        contributions = Contributions(model.deep, model.inputs, orthogonal, 3)
        flat = torch.cat([p.detach().reshape(1, -1) for p in network.parameters()], 1)
        bases = {own.names: (own.columns.basis, own.columns.dual)}
        module = Predictors(model.structured, model.deep, bases)
        without = EffectsModule(model.structured)(**model.inputs)
        f = (module(**model.inputs) - without)[:, 0].detach()
        np.testing.assert_allclose(f, contributions(flat)[0, :, 0], atol=1e-5)
        scale = model.deep._scales[0]  # the standard deviation of the rows
        found.append(f / scale)
        slopes.append(float(contributions.projections(flat)[0, 1] / scale))
    np.testing.assert_allclose(found[0][rows], found[1], atol=1e-5)
    assert slopes[0] == pytest.approx(slopes[1], abs=1e-6)
    assert abs(slopes[0] - slopes[2]) > 0.01
