"""The likelihood of tokens against sums of Categorical over positions."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, Predictive
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.likelihoods import Categorical, CategoricalTokens, as_likelihood, from_config
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.training.trainer import train

S, N, L, V = 3, 4, 5, 6
IGNORED = -100


@pytest.fixture
def made():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(S, N, L * V, generator=generator, dtype=torch.float64)
    y = torch.randint(0, V, (N, L), generator=generator)
    y[1, 3:], y[2, 0] = IGNORED, IGNORED
    return f, y


def positions(y, shift):
    """(row, position of the logits, label) of each label that counts."""
    for n in range(len(y)):
        for t in range(L):
            if y[n, t] != IGNORED and (t > 0 or not shift):
                yield n, t - shift, int(y[n, t])


def naive(f, y, shift):
    """Sum over positions one at a time."""
    total = torch.zeros(f.shape[:2], dtype=torch.float64)
    logits = f.unflatten(-1, (L, V))
    for n, t, label in positions(y, shift):
        total[:, n] += Categorical().log_prob(logits[:, n, t], torch.full((S,), label))
    return total


@pytest.mark.parametrize("shift", [False, True])
def test_density_and_score_equal_a_loop_over_positions(made, shift):
    f, y = made
    likelihood = CategoricalTokens(shift=shift)
    torch.testing.assert_close(likelihood.log_prob(f, y), naive(f, y, shift))
    f = f.clone().requires_grad_()
    (slope,) = torch.autograd.grad(naive(f, y, shift).sum(), f)
    torch.testing.assert_close(likelihood.score(f, y), slope)
    single = likelihood.log_prob(f.float(), y)
    assert single.dtype == torch.float64


def test_loss_of_transformers_is_the_mean_over_its_tokens(made):
    """`shift` is the convention of the causal language models of transformers."""
    losses = pytest.importorskip("transformers.loss.loss_utils")
    f, y = made
    logits = f[0].unflatten(-1, (L, V)).float()
    loss = losses.ForCausalLMLoss(logits, y, vocab_size=V)
    found = CategoricalTokens(shift=True).log_prob(f[0], y).sum()
    assert float(found) == pytest.approx(-float(loss) * len(list(positions(y, True))), rel=1e-5)


@pytest.mark.parametrize("shift", [False, True])
def test_curvature_is_the_hessian_of_the_positions_that_count(made, shift):
    f, y = made
    likelihood = CategoricalTokens(n_classes=V, shift=shift)
    found = likelihood.for_targets(y).curvature(f[0])
    hessian = torch.func.hessian(lambda f: -naive(f[None].expand(S, N, L * V), y, shift)[0].sum())
    whole = hessian(f[0])
    for n in range(N):
        torch.testing.assert_close(found[n], whole[n, :, n])
    part = likelihood.for_targets(y).select_rows(torch.tensor([2])).curvature(f[0, 2:3])
    torch.testing.assert_close(part, found[2:3])


def test_moments_are_those_of_each_position(made):
    f, _ = made
    likelihood = CategoricalTokens(n_classes=V)
    flat = f.reshape(S, N * L, V)
    each = Categorical()
    torch.testing.assert_close(likelihood.mean(f).reshape(flat.shape), each.mean(flat))
    torch.testing.assert_close(likelihood.variance(f).reshape(flat.shape), each.variance(flat))
    rows = f[:1].expand(4000, -1, -1)
    drawn = likelihood.sample(rows, torch.Generator().manual_seed(0))
    share = nn.functional.one_hot(drawn, V).double().mean(0)
    p = likelihood.classes(f[0])
    assert bool(((share - p).abs() < 4 * (p * (1 - p) / 4000).sqrt() + 1e-12).all())


def test_predictive_and_scores(made):
    f, y = made
    predictive = Predictive(f, CategoricalTokens(n_classes=V))
    p = f.unflatten(-1, (L, V)).softmax(-1).mean(0)
    np.testing.assert_allclose(predictive.probabilities, p)
    assert predictive.entropy.shape == predictive.labels.shape == (N, L)
    np.testing.assert_allclose(predictive.entropy, torch.special.entr(p).sum(-1))
    scores = metrics.score(predictive, y)
    each = [(np.log(p[n, t, label]), int(p[n, t].argmax()) == label)
            for n, t, label in positions(y, False)]  # fmt: skip
    mean, right = np.mean(each, 0)
    assert scores["log_likelihood_per_token"] == pytest.approx(mean)
    assert scores["perplexity"] == pytest.approx(np.exp(-mean))
    assert scores["accuracy"] == pytest.approx(right)
    rows = naive(f, y, False).logsumexp(0) - np.log(S)
    assert scores["log_likelihood"] == pytest.approx(float(rows.mean()))


def test_table_has_a_row_for_each_token(made):
    f, _ = made
    predictive = Predictive(f, CategoricalTokens(n_classes=V)).with_classes(list("abcdef"))
    frame = predictive.to_frame(threshold=0.4)
    assert frame.index.names == ["row", "token"]
    assert len(frame) == N * L
    one = frame.loc[(2, 3)]
    assert one["label"] == "abcdef"[predictive.labels[2, 3]]
    assert one["doubt"] == (predictive.probabilities[2, 3].max() <= 0.4)
    assert one["p[c]"] == predictive.probabilities[2, 3, 2]
    assert one["mutual_information"] == predictive.mutual_information[2, 3]


class Tagger(nn.Module):
    """Logits (N, L, V) of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(V, 4), nn.Linear(4, V)

    def forward(self, ids):
        return self.head(self.words(ids))


LENGTHS = {"long first": (5, 4, 3, 2), "short first": (2, 3, 4, 5), "mixed": (3, 5, 2, 4)}


class Texts(torch.utils.data.Dataset):
    """Rows of tokens, of lengths of their own; the tokens are their labels."""

    def __init__(self, lengths) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(0, V, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, n):
        return self.rows[n]


def padded(rows, ignored=IGNORED, mask=True):
    """Pad a batch to its longest row."""
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {"ids": pad(rows, True, 0), "labels": pad(rows, True, ignored)}
    if mask:
        batch["attention_mask"] = pad([torch.ones_like(row) for row in rows], True, 0)
    return batch


def loader_of(texts, size=2, **options):
    collate = functools.partial(padded, **options)
    return torch.utils.data.DataLoader(texts, batch_size=size, collate_fn=collate)


class Masked(Tagger):
    """A tagger that takes a mask, which it does not need."""

    def forward(self, ids, attention_mask):
        return super().forward(ids)


@pytest.mark.parametrize("ignored", [IGNORED, -1])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("order", LENGTHS)
def test_batches_of_different_lengths(order, size, ignored):
    """A collator pads each batch to its own length: the density is the sum over single rows."""
    torch.manual_seed(0)
    module, texts = Masked().double(), Texts(LENGTHS[order])
    network = subbayes.Network(module, output=TokenOutputs())
    space = subbayes.subspace.RandomSubspace(network.weights, 3, seed=0)
    likelihood = CategoricalTokens(shift=True, ignore_index=ignored)
    loader = loader_of(texts, size, ignored=ignored)
    posterior = subbayes.Posterior(network, likelihood, loader, space)
    z = np.random.default_rng(0).standard_normal((2, 3))
    expected = []
    for weights in space.weights(torch.from_numpy(z)):
        alone = network.module_with(weights)
        with torch.no_grad():
            rows = [(alone(row[None], None)[0, :-1], row[1:]) for row in texts.rows]
        expected.append(sum(float(Categorical().log_prob(f, y).sum()) for f, y in rows))
    np.testing.assert_allclose(posterior.log_likelihood(z), expected)
    assert posterior.likelihood.n_classes == V


@pytest.mark.parametrize("order", LENGTHS)
def test_fit_of_batches_of_different_lengths(order):
    """Training, with held-out batches, finds the classes in the outputs of any first batch."""
    torch.manual_seed(0)
    data = loader_of(Texts(LENGTHS[order]))
    once = subbayes.Training(epochs=1, swa_epochs=0)
    model = subbayes.fit(
        Masked(),
        data,
        likelihood="tokens",
        subspace="random",
        training=once,
        sampling=subbayes.Sampling(draws=2, warmup=2, progress=False),
    )
    assert model.likelihood.n_classes == V
    with pytest.raises(InputError, match="padded to one length"):
        model.predict(data)
    found, scores = [], model.evaluate(data)
    for batch in data:  # batch by batch
        y = batch.pop("labels")
        p = model.predict(batch).probabilities
        for row, label in zip(p, y, strict=True):
            found += [q for q in zip(row, label.tolist(), strict=True) if q[1] != -100]
    logs = [np.log(q[label]) for q, label in found]
    assert scores["log_likelihood_per_token"] == pytest.approx(np.mean(logs), rel=1e-5)
    assert scores["accuracy"] == np.mean([q.argmax() == label for q, label in found])
    each = [np.sum((q - np.eye(V)[label]) ** 2) for q, label in found]
    assert scores["brier"] == pytest.approx(np.mean(each), rel=1e-5)
    held_out = loader_of(Texts((2, 5, 3)))
    result = train(
        Masked(), "tokens", data, once, validation=held_out, output=TokenOutputs(), progress=False
    )
    assert result.likelihood.n_classes == V


def test_labels_of_another_length_than_the_outputs_of_their_batch(made):
    """A later batch whose labels are longer than its inputs would be divided into other classes."""
    ids = torch.randint(0, V, (2, 6))
    batches = [(ids[:, :2], ids[:, :2]), (ids[:, :3], ids)]
    network = subbayes.Network(Tagger(), output=TokenOutputs())
    space = subbayes.subspace.RandomSubspace(network.weights, 3, seed=0)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    posterior = subbayes.Posterior(network, "tokens", loader, space)
    expected = r"module: expected logits of shape \(N, 6, 6\), as the labels have 6 positions"
    with pytest.raises(InputError, match=f"{expected}, got 18 outputs for each row"):
        posterior.value(np.zeros((1, 3)))


def test_labels_above_the_classes_are_refused_in_any_batch():
    ids = torch.zeros(2, 4).long()
    batches = [(ids[:, :1], ids[:, :1]), (ids, ids + V)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    with pytest.raises(InputError, match=r"y: expected labels in 0\.\.5, .* got 6\. Use -100"):
        subbayes.fit(Tagger(), loader, likelihood="tokens")


@pytest.mark.parametrize("use", [train, subbayes.fit])
def test_padding_that_counts_is_refused_in_any_batch(use):
    """In one batch of all rows, and in the last of batches of lengths of their own."""
    texts = Texts((5, 5, 4, 2))
    for size in (4, 2):
        data = loader_of(texts, size, ignored=0)
        message = rf"y: expected the label -100 .* got other labels at {4 if size == 4 else 2} pos"
        with pytest.raises(InputError, match=message):
            use(Masked(), likelihood="tokens", data=data, output=TokenOutputs())
    weighted = Data.of(padded(texts.rows, 0)).weighted(torch.ones(4))
    with pytest.raises(InputError, match="y: expected the label -100 where attention_mask is 0"):
        subbayes.fit(Masked(), weighted, likelihood="tokens")


def test_names_and_configurations():
    assert as_likelihood("causal-lm") == CategoricalTokens(shift=True)
    assert as_likelihood("tokens") == CategoricalTokens()
    with pytest.raises(InputError, match="Use 'causal-lm'"):
        as_likelihood("CAUSAL_LM")
    likelihood = CategoricalTokens(n_classes=V, shift=True, ignore_index=-1)
    assert from_config(likelihood.to_config()) == likelihood


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.full((N, L), IGNORED), "not ignored, got -100 everywhere. Set labels to"),
        (torch.tensor([[1, IGNORED]]), "not ignored after the first position"),
        (torch.zeros(N), "one label for each token"),
        (torch.tensor([[1, -3]]), "or -100 for positions to ignore, got -3"),
    ],
)
def test_targets_that_are_refused(y, message):
    with pytest.raises(InputError, match=message):
        CategoricalTokens(shift="first" in message).check_targets(y)


def test_outputs_that_are_refused(made):
    _, y = made
    likelihood = CategoricalTokens()
    with pytest.raises(InputError, match=r"logits of shape \(N, 5, classes\).*got 7 outputs"):
        likelihood.check_outputs(7, y)
    with pytest.raises(InputError, match="labels in 0..1"):
        likelihood.check_outputs(2 * L, y)
    with pytest.raises(InputError, match="n_classes=.*size of the vocabulary"):
        likelihood.mean(torch.zeros(1, 10))
    with pytest.raises(InputError, match="at most 4096 outputs.*covariance='sampled'"):
        CategoricalTokens(n_classes=5000).curvature(torch.zeros(1, 5000))
    with pytest.raises(InputError, match="positions, classes.*likelihood='categorical'"):
        TokenOutputs()(torch.zeros(3, 4))
    with pytest.raises(InputError, match="one label per row use likelihood='categorical'"):
        subbayes.fit(Tagger(), (torch.zeros(3, 2).long(), torch.zeros(3)), likelihood="tokens")
    with pytest.raises(InputError, match="likelihood='causal-lm' or 'tokens'"):
        subbayes.fit(Tagger(), (y.clamp_min(0), y.clamp_min(0)), likelihood="categorical")


@pytest.mark.parametrize("shift", [False, True])
def test_blocks_of_the_curvature_are_those_of_each_position(made, shift):
    f, y = made
    likelihood = CategoricalTokens(V, shift=shift).for_targets(y)
    blocks = likelihood.curvature_blocks(f).dense()
    counted = {(n, t) for n, t, _ in positions(y, shift)}
    for n in range(N):
        for t in range(L):
            at = f.unflatten(-1, (L, V))[:, n, t][:, None]
            expected = Categorical().curvature(at)[:, 0] * ((n, t) in counted)
            torch.testing.assert_close(blocks[:, n, t], expected)
    whole = likelihood.curvature(f)
    torch.testing.assert_close(whole[1, 2], torch.block_diag(*blocks[1, 2]))


def test_an_ignored_label_above_the_classes_is_no_label():
    y, likelihood = torch.tensor([[1, 255, 3]]), CategoricalTokens(n_classes=21, ignore_index=255)
    likelihood.check_targets(y)
    CategoricalTokens(ignore_index=255).check_outputs(63, y)
    found = likelihood.log_prob(torch.zeros(1, 63), y).item()
    assert found == pytest.approx(-2 * math.log(21))
    assert CategoricalTokens(ignore_index=255).n_outputs(y) == 3 * 4
    with pytest.raises(InputError, match=r"labels in 0\.\.20.*got 30"):
        likelihood.check_targets(torch.tensor([[30, 255, 3]]))
