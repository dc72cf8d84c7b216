"""The likelihood of tokens against sums of Categorical over positions."""

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, Predictive
from subbayes.diagnostics import metrics
from subbayes.likelihoods import Categorical, CategoricalTokens, as_likelihood, from_config
from subbayes.networks.token_outputs import TokenOutputs

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


class Tagger(nn.Module):
    """Logits (N, L, V) of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(V, 4), nn.Linear(4, V)

    def forward(self, ids):
        return self.head(self.words(ids))


def test_batches_of_different_lengths(made):
    """A collator pads each batch to its own length: the density is that of padded rows."""
    _, y = made
    torch.manual_seed(0)
    module = Tagger().double()
    ids = torch.randint(0, V, (N, L))
    y[2:, 3:] = IGNORED
    short = [(ids[:2], y[:2]), (ids[2:, :3], y[2:, :3])]
    loader = torch.utils.data.DataLoader(short, batch_size=None)
    network = subbayes.Network(module, output=TokenOutputs())
    space = subbayes.subspace.RandomSubspace(network.weights, 3, seed=0)
    z = np.random.default_rng(0).standard_normal((2, 3))
    whole, ragged = (subbayes.Posterior(network, "tokens", d, space) for d in ((ids, y), loader))
    np.testing.assert_allclose(ragged.value(z), whole.value(z))
    assert whole.likelihood.n_classes == ragged.likelihood.n_classes == V
    model = subbayes.fit(
        module,
        loader,
        likelihood="tokens",
        subspace="random",
        training=subbayes.Training(epochs=2),
        sampling=subbayes.Sampling(draws=5, progress=False),
    )
    with pytest.raises(InputError, match="padded to one length"):
        model.predict(loader)


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
    with pytest.raises(InputError, match="at most 4096 outputs.*needs no curvature"):
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
    blocks = likelihood.curvature_blocks(f)
    counted = {(n, t) for n, t, _ in positions(y, shift)}
    for n in range(N):
        for t in range(L):
            at = f.unflatten(-1, (L, V))[:, n, t][:, None]
            expected = Categorical().curvature(at)[:, 0] * ((n, t) in counted)
            torch.testing.assert_close(blocks[:, n, t], expected)
    whole = likelihood.curvature(f)
    torch.testing.assert_close(whole[1, 2], torch.block_diag(*blocks[1, 2]))
