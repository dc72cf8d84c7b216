"""The simulation of coverage: partialling out, truth, and shares with their errors."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import ssr_coverage_tables as tables
from experiments.ssr_coverage_data import network_function, simulate
from experiments.ssr_coverage_methods import known_network, partialling_out


@pytest.mark.slow
def test_partialling_out_finds_effects_that_least_squares_misses():
    rng = np.random.default_rng(1)
    errors = []
    for seed in range(3):
        a = rng.uniform(-2, 2, size=(500, 1))
        d = np.column_stack([a[:, 0] ** 2, 0 * a[:, 0]]) + rng.normal(size=(500, 2))
        y = d @ [1.0, -0.5] + 2 * a[:, 0] ** 2 + 0.5 * rng.normal(size=500)
        found, se = partialling_out(y, d, a, seed)
        errors.append((found - [1.0, -0.5]) / se)
        naive = np.linalg.lstsq(np.column_stack([d, np.ones(500), a]), y, rcond=None)[0]
        assert abs(naive[0] - 1) > 0.5
    assert np.abs(errors).max() < 4


def test_simulated_rows_have_the_correlations_they_say():
    for reads, expected in {"same": 1.0, "correlated": 0.7, "other": 0.0}.items():
        rows = simulate("linear", reads, 20_000, (0,))
        frame = rows.frame
        assert np.corrcoef(frame.x, frame.a1)[0, 1] == pytest.approx(expected, abs=0.03)
        noise = frame.y - rows.effect - rows.network
        assert noise.std() == pytest.approx(0.5, abs=0.01)
        np.testing.assert_allclose(
            rows.network, network_function(*frame[["a1", "a2"]].to_numpy().T)
        )
        again = simulate("linear", reads, 20_000, (0,)).frame
        assert again.equals(frame)


def test_shares_and_their_standard_errors():
    records = [{"population": {"x": {"below": [below]}}} for below in (0.5, 0.97, 0.2, 0.6)]
    share, error = tables.coverage(records, "population", ["x"], 0.9)
    assert share == 0.75
    assert error == pytest.approx(np.std([1, 0, 1, 1], ddof=1) / 2)
    share, error = tables.coverage(records[:1], "population", ["x"], 0.9)
    assert (share, error) == (1.0, pytest.approx((2 / 3 * 1 / 3) ** 0.5))


def test_shares_beyond_two_standard_errors_are_listed():
    names = ("x", "C(c)[T.b]", "C(c)[T.c]", "sigma")
    below = (np.arange(200) + 0.5) / 200

    def records(squeezed):
        """Uniform positions of the truth among draws, those of one effect closer to the middle."""
        for share in below:
            each = dict.fromkeys(names, share) | {squeezed: 0.5 + 0.8 * (share - 0.5)}
            found = {name: {"below": [value], "width": 1.0} for name, value in each.items()}
            yield {"case": "linear", "reads": "other", "n": 120, "population": found}

    assert tables.deviations_markdown(list(records(None))).endswith("errors: 0 of 9**")
    lines = tables.deviations_markdown(list(records("x"))).splitlines()
    assert "errors: 3 of 9" in lines[0]
    assert [line.split("|")[5].strip() for line in lines[4:]] == ["50%", "90%", "95%"]
    assert tables.deviations_markdown([]) == ""


def test_effects_beside_a_known_network_are_least_squares_with_robust_errors():
    sm = pytest.importorskip("statsmodels.api")
    rng = np.random.default_rng(2)
    x, f = np.column_stack([np.ones(60), rng.normal(size=60)]), rng.normal(size=60)
    y = x @ [1.0, 2.0] + f
    found, errors = known_network(x, y, f, 0.3)
    fit = sm.OLS(y, x).fit(cov_type="HC0")  # of residuals without noise
    np.testing.assert_allclose(found, fit.params, atol=1e-12)
    exact = np.diag(fit.cov_params()) + 0.09 * np.diag(np.linalg.inv(x.T @ x))
    np.testing.assert_allclose(errors**2, exact, rtol=1e-10)


def test_ways_of_sampling_are_compared_in_the_data_sets_in_which_both_were_run():
    names = ("x", "C(c)[T.b]", "C(c)[T.c]", "sigma")

    def record(number, sd, below):
        found = {name: {"below": [below], "width": 1.0, "sd": sd} for name in names}
        key = {"case": "linear", "reads": "other", "n": 120, "number": number}
        return key | {"population": found, "oracle": found}

    old = [record(0, 1.0, 0.99), record(1, 1.0, 0.5), record(2, 1.0, 0.5)]
    new = [record(0, 1.1, 0.5), record(1, 1.3, 0.5), record(3, 9.0, 0.5)]
    text = tables.pairs_markdown(old, new)
    row = "| linear effect | other | 120 | 2 | 0.50 | 1.00 | 1.00 | 1.200 ± 0.100 |"
    assert row in text.splitlines()
    assert tables.pairs_markdown(old, []) == ""
    both = tables.newest(old, new)
    assert [r["number"] for r in both] == [0, 1, 2, 3]
    assert [r["population"]["x"]["sd"] for r in both] == [1.1, 1.3, 1.0, 9.0]
