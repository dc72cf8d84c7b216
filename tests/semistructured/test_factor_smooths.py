"""Smooths of the levels of a factor, against their definitions in mgcv."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.linalg import block_diag, null_space

from subbayes import InputError, Sampling, load
from subbayes.regression import Regression

LEVELS = list("abcd")
FS, SZ = "s(x, g, bs='fs')", "s(g, x, bs='sz')"


def table(n=90, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.uniform(0, 10, n), "z": rng.normal(size=n)})
    frame["g"], frame["k"] = rng.choice(LEVELS, n), rng.integers(1, 4, n)
    frame["o"] = pd.Categorical(frame.g, LEVELS, ordered=True)
    shift = dict(zip(LEVELS, rng.normal(size=4), strict=True))
    frame["y"] = np.sin(frame.x) + frame.g.map(shift) + 0.2 * rng.normal(size=n)
    return frame


def prepared(formula, **options):
    return Regression(formula, **options).specification.prepare(table())


def columns_of(model, frame, name=None):
    """Columns as they are learned, without centres."""
    terms = [t for t in model.design.terms if t.learned is not None]
    (term,) = terms if name is None else [t for t in terms if t.name == name]
    return term, term.learned.columns(frame)


def functions(frame, k=""):
    """The straight line and the penalised functions of s(x), both standardised over the rows."""
    found = columns_of(prepared(f"y ~ s(x{k})"), frame)[1]
    learned = columns_of(prepared(f"y ~ s(x{k})"), frame)[0].learned
    return found[:, 0] / learned.margins[0].size[0], found[:, 1:]


def test_curves_of_groups_have_the_covariance_of_their_definition():
    frame, (term, columns) = table(), columns_of(prepared(f"y ~ s(x) + {FS}"), table(), FS)
    line, wiggles = functions(frame)
    assert (term.fixed, columns.shape) == (0, (len(frame), 4 * (2 + wiggles.shape[1])))
    tau = {"level": 0.7, "linear": 0.4, "wiggle": 1.3}
    scales = np.repeat([*tau.values()], [4, 4, 4 * wiggles.shape[1]])
    found = (columns * scales**2) @ columns.T
    one = tau["level"] ** 2 + tau["linear"] ** 2 * np.outer(line, line)
    one += tau["wiggle"] ** 2 * wiggles @ wiggles.T
    same = frame.g.to_numpy()[:, None] == frame.g.to_numpy()
    np.testing.assert_allclose(found, np.where(same, one, 0.0), atol=1e-9)
    # the law has these standard deviations
    names = [h.name for h in term.law.hyperparameters]
    assert names == [f"sd({FS}[{part}])" for part in tau]
    assert term.law.sizes == (4, 4, 4 * wiggles.shape[1])


def test_deviations_add_up_to_zero_with_the_penalty_of_all_levels():
    model = prepared(f"y ~ s(x) + {SZ}")
    grid = pd.DataFrame({"x": np.repeat(np.linspace(0, 10, 20), 4), "g": LEVELS * 20})
    term, columns = columns_of(model, grid, SZ)
    by_level = columns.reshape(20, 4, -1)
    np.testing.assert_allclose(by_level.sum(1), 0, atol=1e-9)
    # naively: one smooth for each level, with coefficients restricted to a zero sum at each x
    _, wiggles = functions(grid)
    r = wiggles.shape[1]
    assert (term.fixed, columns.shape[1]) == (6, 3 * (2 + r))
    v = np.random.default_rng(1).normal(size=3 * r)
    found = by_level[..., 6:] @ v
    per_level = [
        np.linalg.lstsq(wiggles[j::4], found[:, j], rcond=None)[0] for j in range(4)
    ]  # u_j
    np.testing.assert_allclose(sum(per_level), 0, atol=1e-8)
    penalty = sum(float(u @ u) for u in per_level)
    assert penalty == pytest.approx(float(v @ v), rel=1e-8)
    restriction = null_space(np.tile(np.eye(r), (1, 4)))  # of all u
    covariance = restriction @ restriction.T
    naive = block_diag(*[wiggles[j::4] for j in range(4)])
    order = np.arange(80).reshape(20, 4).T.reshape(-1)
    ours = columns[order, 6:] @ columns[order, 6:].T
    np.testing.assert_allclose(ours, naive @ covariance @ naive.T, atol=1e-8)


def test_either_order_and_codes_of_groups():
    one, other = (
        columns_of(prepared(f"y ~ {t}"), table())[1] for t in (FS, FS.replace("x, g", "g, x"))
    )
    np.testing.assert_array_equal(one, other)
    codes = prepared("y ~ s(x, k, bs='fs', k=6)")
    term, columns = columns_of(codes, table())
    assert term.learned.levels == {"k": [1, 2, 3]}
    assert columns.shape[1] == 3 * (2 + functions(table(), ", k=6")[1].shape[1])


def test_ordered_factors_have_difference_smooths():
    every, differences = prepared("y ~ C(g) + s(x, by=g)"), prepared("y ~ C(g) + s(x) + s(x, by=o)")
    names = [t.name for t in differences.design.terms if t.kind == "smooth"]
    assert names == ["s(x)", *(f"s(x, by=o)[{v}]" for v in "bcd")]
    for level in "bcd":
        found = columns_of(differences, table(), f"s(x, by=o)[{level}]")[1]
        np.testing.assert_allclose(found, columns_of(every, table(), f"s(x, by=g)[{level}]")[1])
    first = differences.design.term("s(x, by=o)[b]")
    at_first = table().assign(o=pd.Categorical(["a"] * 90, LEVELS, ordered=True))
    assert not first.learned.columns(at_first).any()


@pytest.mark.parametrize("term", [FS, SZ, "s(x, by=o) + C(g)"])
def test_models_of_global_and_group_smooths_fit_and_are_saved(term, tmp_path):
    frame = table(160)
    model = Regression(f"y ~ s(x) + {term}").fit(
        frame, sampling=Sampling(draws=400, chains=4, progress=False)
    )
    truth = np.corrcoef(np.asarray(model.predict(frame).mean).reshape(-1), frame.y)[0, 1]
    assert truth > 0.95
    assert model.warnings() == []
    again = load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(frame).mean, model.predict(frame).mean)
    if term in (FS, SZ):
        with pytest.raises(
            InputError, match="^g: expected the levels seen in training: a, b, c, d"
        ):
            model.predict(frame.assign(g="e"))
        new = model.predict(frame.assign(g="e"), new_levels="reference")
        groups = [np.asarray(model.predict(frame.assign(g=v)).mean) for v in LEVELS]
        if term == SZ:  # the average of the levels, as deviations add up to zero
            np.testing.assert_allclose(new.mean, np.mean(groups, 0), atol=1e-5)
        with pytest.raises(InputError, match=r"conditional_effect\('x', by='g'\)"):
            model.effect(term)
        assert len(model.conditional_effect("x", by="g").table()) > 0


def test_all_curves_of_a_group_shrink_to_the_prior_without_rows_of_it():
    model = prepared(f"y ~ {FS}")
    coefficients = model.structured.coefficients(torch.zeros(1, model.structured.size).double())
    columns = list(model.design.term(FS).columns)
    assert not coefficients[0, columns].any()


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("s(x, bs='fs')", "a column of numbers and a factor for bs='fs'"),
        ("s(g, o, bs='sz')", "a column of numbers and a factor for bs='sz'"),
        ("s(x, g, bs='fs', by=o)", "without by="),
        ("s(log(x), g, bs='fs')", "a column of numbers and a factor"),
        ("s(x, g, bs='fs', degree=2)", "k= alone beside bs='fs'"),
        ("s(x, h, bs='fs')", "none called h"),
        ("s(x, one, bs='fs')", "at least 2 levels of one"),
        ("te(x, z, bs='fs')", "bs= to be one of 'ps'"),
    ],
)
def test_other_factor_smooths_are_refused(term, message):
    frame = table().assign(one="a")
    with pytest.raises(InputError, match=message):
        Regression(f"y ~ {term}").specification.prepare(frame)
