"""Scores and batches of active learning, beside sums over all labels; pools and their files."""

import itertools
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

import subbayes
from subbayes import InputError, Network, active
from subbayes.baselines.ensemble import WeightSamples
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical, Gaussian

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0].sin()


def draws(likelihood, outputs, count=6):
    """A linear network at weights drawn from N(0, 1)."""
    network = Network(torch.nn.Linear(3, outputs, bias=False))
    generator = torch.Generator().manual_seed(1)
    weights = 1.5 * torch.randn(count, network.size, generator=generator)
    return WeightSamples(network, weights, likelihood, "draws")


@pytest.fixture(scope="module")
def classes():
    return draws(Categorical(3), 3)


@pytest.fixture(scope="module")
def numbers():
    return draws(Gaussian(0.5), 1)


def probabilities(model, rows):
    return model.predict(rows).likelihood.classes(model.predict(rows).outputs).numpy()


def entropy(p):
    return -sum(q * np.log(q) for q in np.ravel(p) if q > 0)


def joint_information(p):
    """I(y_1, ..., y_b; s) by all labels, from probabilities (S, b, K)."""
    S, b, K = p.shape
    joint = np.array(
        [
            np.mean([np.prod([p[s, i, y] for i, y in enumerate(labels)]) for s in range(S)])
            for labels in itertools.product(range(K), repeat=b)
        ]
    )
    return entropy(joint) - sum(entropy(p[s, i]) for s in range(S) for i in range(b)) / S


def covariance(model, rows):
    """Of functions at rows, in units of the noise."""
    f = model.predict(rows).outputs[..., 0].numpy()
    return np.cov(f.T) / 0.5**2


def test_bald_is_the_mutual_information_of_label_and_draw(classes, numbers):
    p = probabilities(classes, X)
    expected = [joint_information(p[:, [i]]) for i in range(8)]
    np.testing.assert_allclose(active.bald(classes, X), expected, atol=1e-12)
    np.testing.assert_allclose(
        active.bald(classes, X), classes.predict(X).mutual_information, atol=1e-12
    )
    expected = 0.5 * np.log1p(np.diag(covariance(numbers, X)))
    np.testing.assert_allclose(active.bald(numbers, X), expected, rtol=1e-6)


def test_epig_is_the_mean_mutual_information_with_labels_of_targets(classes, numbers):
    targets = X[:3].flip(1)
    p, q = probabilities(classes, X), probabilities(classes, targets)
    expected = [
        np.mean(
            [
                entropy(p[:, i].mean(0))
                + entropy(q[:, m].mean(0))
                - entropy(np.mean([np.outer(p[s, i], q[s, m]) for s in range(6)], 0))
                for m in range(3)
            ]
        )
        for i in range(8)
    ]
    np.testing.assert_allclose(active.epig(classes, X, targets), expected, atol=1e-12)
    both = np.eye(11) + covariance(numbers, torch.cat([X, targets]))
    expected = [
        np.mean(
            [
                -0.5 * np.log(np.linalg.det(both[np.ix_([i, m], [i, m])]) / both[i, i] / both[m, m])
                for m in range(8, 11)
            ]
        )
        for i in range(8)
    ]
    np.testing.assert_allclose(active.epig(numbers, X, targets), expected, rtol=1e-5)


def greedy(score, batch):
    chosen = []
    for _ in range(batch):
        scores = {i: score([*chosen, i]) for i in range(8) if i not in chosen}
        chosen.append(max(scores, key=scores.get))
    return chosen


def test_batches_have_the_largest_joint_information(classes, numbers):
    p = probabilities(classes, X)
    found = active.batch_bald(classes, X, 4)
    assert found.tolist() == greedy(lambda rows: joint_information(p[:, rows]), 4)
    K = covariance(numbers, X)

    def determinant(rows):
        return np.linalg.slogdet(np.eye(len(rows)) + K[np.ix_(rows, rows)])[1]

    assert active.batch_bald(numbers, X, 4).tolist() == greedy(determinant, 4)


def test_drawn_configurations_estimate_the_same_joint_entropies(classes):
    p = torch.from_numpy(probabilities(classes, X))
    chosen = [1, 4]
    few = active._drawn_configurations(p[:, chosen], torch.Generator().manual_seed(0))
    found = active._joint_entropy(few, p).numpy() / len(few)
    base = joint_information(p[:, chosen].numpy())
    conditional = torch.special.entr(p).sum(-1).mean(0).numpy()
    expected = [joint_information(p[:, [*chosen, i]].numpy()) - base for i in range(8)]
    each = np.concatenate([active._joint_entropy(one[None], p)[None] for one in few])
    error = each.std(0) / len(few) ** 0.5
    assert (np.abs(found - conditional - expected) < 4 * error + 1e-12).all()


def test_a_batch_has_no_two_copies_of_a_row_while_others_say_more(numbers):
    rows = torch.cat([5 * X[:1], 5 * X[:1], X[1:]])
    assert len({0, 1} & set(active.batch_bald(numbers, rows, 3).tolist())) == 1


def test_thompson_takes_the_best_row_of_each_draw(numbers):
    f = numbers.predict(X).outputs[..., 0].numpy()
    assert active.thompson(numbers, X, 1, seed=3)[0] in f.argmax(1)
    found = active.thompson(numbers, X, 8)
    assert sorted(found) == list(range(8))


def test_rows_of_linearised_laplace_are_drawn_together():
    network = Network(subbayes.MLP(3, (6,), 1, seed=0))
    model = linearised_laplace(network, Gaussian(0.3), (X, Y))
    joint = model.predict(X, joint=True).covariance
    f = model.functions(X, n_draws=4000)(X)[..., 0].detach().numpy()
    scale = np.sqrt(np.outer(np.diag(joint), np.diag(joint)))
    assert (np.abs(np.cov(f.T) - joint) < 4 * scale * np.sqrt(2 / 4000)).all()
    np.testing.assert_allclose(f.mean(0), model.predict(X).mean, atol=1e-5)


def test_a_pool_is_asked_within_its_budget_and_goes_on_from_its_file(tmp_path, classes):
    file = tmp_path / "pool.json"
    rows = torch.cat([X, X[:2]])  # two rows twice
    pool = active.Pool(rows, 7, file)
    asked = pool.ask(classes, 3)
    again = active.Pool(rows, 7, file)
    assert again.ask(classes, 3).tolist() == asked.tolist()  # without an answer
    again.tell(asked % 3)
    inputs, labels = active.Pool(rows, 7, file).labelled
    assert torch.equal(inputs, rows[asked])
    assert labels.tolist() == (asked % 3).tolist()
    for method in (active.bald, partial(active.epig, targets=X), lambda model, rows: -rows[:, 0]):
        again.tell([0] * len(again.ask(classes, 1, method)))
    assert again.remaining == 1
    assert len(again.ask(classes, 5)) == 1
    again.tell([1])
    assert len(again.ask(classes, 5)) == 0
    keys = rows[list(again.labels)]
    assert len(keys.unique(dim=0)) == 7
    with pytest.raises(InputError, match="path"):
        active.Pool(X, 7, file)


def test_a_pool_smaller_than_the_batch_gives_what_it_has(numbers):
    pool = active.Pool(np.concatenate([X[:3], X[:3]]), 100)
    assert sorted(pool.ask(numbers, 10)) == [0, 1, 2]
    with pytest.raises(InputError, match="labels"):
        pool.tell([1.0])
    for choose in (active.batch_bald, active.thompson):
        with pytest.raises(InputError, match="batch"):
            choose(numbers, X[:3], 4)


def test_estimators_take_their_own_rows():
    frame = pd.DataFrame(X.numpy(), columns=["a", "b", "c"])
    quick = {"training": {"epochs": 3, "swa_epochs": 4}, "sampling": {"draws": 10}}
    model = subbayes.SubspaceClassifier(**quick, random_state=0).fit(frame, Y > 0)
    pool = active.Pool(frame, 4)
    asked = pool.ask(model, 4)
    pool.tell((Y > 0).numpy()[asked])
    rows, labels = pool.labelled
    assert rows.equals(frame.iloc[asked])
    assert labels.dtype == bool
    np.testing.assert_allclose(
        active.bald(model, frame), model.predict_dist(frame).mutual_information, atol=1e-6
    )


def test_what_has_no_score_is_refused(classes):
    with pytest.raises(InputError, match="model"):
        active.thompson(classes, X, 2)
    with pytest.raises(InputError, match="model"):
        active.bald(draws(Gaussian(0.5), 2), X)
    with pytest.raises(InputError, match="method"):
        active.Pool(X, 3).ask(classes, 1, "badge")
