"""What is recommended for trained networks, beside temperature scaling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from experiments import __main__ as command
from experiments import recommend as experiment
from experiments import recommend_data
from experiments.recommend_data import DATASETS, Recipe, Sets, network_of, shifted, trained
from experiments.recommend_page import bars, markdown
from experiments.store import Store
from subbayes.utils.checks import InputError


def sets_of(name: str, seed: int = 0, rows: int | None = None) -> Sets:
    try:
        return recommend_data.sets_of(name, seed, None, rows)
    except InputError as error:
        pytest.skip(f"data are absent: {error}")


def record(**changes: object) -> dict[str, object]:
    facts: dict[str, object] = {
        "dataset": "digits", "seed": 0, "validation": "full", "budget": "seconds", "gain": 0.02,
        "error": 0.003, "reported": 0.03, "reported_error": 0.004, "ships": True, "score": -0.1,
        "reference": -0.12, "plain": -0.2, "cpu": 3.0, "accuracy": 0.9, "reference_accuracy": 0.9,
        "unlike": 0.9, "entropy": 0.8, "information": 0.95, "shifted": {"noise": [-1.0, 0.1, 0.01]},
        "summary": "a stack",
    }  # fmt: skip
    return facts | changes


@pytest.mark.parametrize("name", ["digits", "dry_bean", "bike"])
def test_no_row_is_in_two_parts(name):
    sets = sets_of(name)
    parts = [
        {row.numpy().tobytes() for row in x.flatten(1)}
        for x, _ in (sets.train, sets.validation, sets.test)
    ]
    shared = [parts[a] & parts[b] for a, b in ((0, 1), (0, 2), (1, 2))]
    assert all(len(rows) < 20 for rows in shared)  # equal measurements of different beans


@pytest.mark.parametrize("name", DATASETS)
def test_each_network_takes_its_inputs_and_ends_in_a_linear_layer(name):
    sets = sets_of(name, rows=8)
    net = network_of(name, sets.train[0].shape[-1]).eval()
    x, y = sets.test
    outputs = net(x)
    assert isinstance(net[-1], nn.Linear)
    assert net(sets.outside).shape[1] == outputs.shape[1]
    if y.is_floating_point():
        assert outputs.shape == y.shape
    else:
        assert int(y.max()) < outputs.shape[1]
    for other in shifted(name, x, 0).values():
        assert other.shape == x.shape
        assert other.dtype == x.dtype


def test_training_is_the_same_for_a_seed_and_kept_in_a_file(tmp_path, monkeypatch):
    sets = sets_of("digits", rows=60)
    rows = sets.train
    one, same, other = (trained("digits", rows, seed, Recipe(1)) for seed in (3, 3, 4))
    assert torch.equal(one(rows[0]), same(rows[0]))
    assert not torch.equal(one(rows[0]), other(rows[0]))
    plan = experiment.Plan(rows=60, epochs=1, members=2)
    first = experiment.members_of("digits", 0, sets, tmp_path, plan)
    monkeypatch.setattr(experiment, "trained", lambda *_: pytest.fail("trains again"))
    again = experiment.members_of("digits", 0, sets, tmp_path, plan)
    for net, loaded in zip(first, again, strict=True):
        assert torch.equal(net(rows[0]), loaded(rows[0]))


def test_the_reference_of_several_networks_scales_their_averaged_probabilities():
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = torch.randint(3, (200,)) * (x[:, 0] > 0)
    members = [nn.Linear(3, 3) for _ in range(3)]
    with torch.no_grad():
        average = torch.stack([net(x).softmax(-1) for net in members]).mean(0).double().numpy()
    grid = np.exp(np.linspace(-5, 5, 4001))
    scores = []
    for temperature in grid:
        powers = average ** (1 / temperature)
        powers /= powers.sum(1, keepdims=True)
        scores.append(np.log(powers[np.arange(200), y.numpy()]).mean())
    reference = experiment.reference_of(members, (x, y), regression=False)
    assert reference.temperature == pytest.approx(grid[int(np.argmax(scores))], rel=0.005)
    assert reference.predict(x).log_prob(y).mean() == pytest.approx(max(scores), abs=1e-5)


def test_the_reference_of_a_regression_has_the_noise_of_validation_rows():
    torch.manual_seed(0)
    x, y = torch.randn(200, 3), torch.randn(200, 1)
    net = nn.Linear(3, 1)
    with torch.no_grad():
        deviation = float(((net(x) - y) ** 2).mean().sqrt())
    assert experiment.reference_of([net], (x, y), True).temperature == pytest.approx(deviation)


def test_bars_are_held_and_missed():
    found = {row[0]: row[-1] for row in bars([record(), record(seed=1, gain=-0.0015)])}
    assert found["seconds, all validation rows: no fit loses more than 0.001"] == "missed"
    assert found["seconds: mean of classes at least 0.012"] == "missed"
    assert found["seconds: at most 15 CPU seconds"] == "held"
    assert found["out-of-distribution score: 0.84 on average"] == "held"
    assert found["at most 0.06 below the better of entropy and mutual information"] == "held"
    small = bars([record(validation="300", gain=-0.0015)])
    assert small[0][-1] == "held"


def test_a_reported_gain_is_compared_with_the_gain_on_test_rows():
    name = "reported gains beyond two combined errors of the test gains: at most 2 of 54"
    for reported, far in ((0.029, "0"), (0.031, "1")):
        row = next(r for r in bars([record(reported=reported)]) if r[0] == name)
        assert row[1] == far  # 0.02, with errors of 0.003 and 0.004


def test_tables_of_records():
    lost = record(seed=1, gain=-0.01)
    failed = record(seed=2, failure="ValueError: no")
    del failed["gain"]
    text = markdown([record(), lost, failed])
    assert "| digits | 2 | 0.0050 ± 0.0021 |" in text
    assert "| digits | 1 | full | seconds | −0.0100 ± 0.0030 | 0.0300 ± 0.0040 | stack |" in text
    assert "| digits | 2 | full | seconds | ValueError: no |" in text
    assert "−1.000 → −0.900" in text
    assert markdown([]) == ""


def test_a_quick_run_is_recorded_and_resumed(tmp_path, capsys):
    sets_of("digits", rows=8)
    arguments = ["recommend", "--quick", "--only", "digits", "--seeds", "1", "--shapes", "full"]
    arguments += ["--budgets", "seconds", "--results", str(tmp_path)]
    assert command.main(arguments) == 0
    (found,) = Store(tmp_path).records.values()
    assert "failure" not in found, found
    assert not found["changed"]
    assert found["score"] == pytest.approx(found["reference"] + found["gain"], abs=1e-4)
    capsys.readouterr()
    assert command.main(arguments) == 0
    assert "digits 0 full seconds:" not in capsys.readouterr().out  # the record was there
