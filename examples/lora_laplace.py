"""Linearised Laplace approximation of the low-rank adapters of a transformer.

    python examples/lora_laplace.py

A small transformer with random weights takes the place of a pretrained one: it takes a dict of
tokens and their mask, and returns an object with `.logits`. Its weights are frozen except for the
adapters that LoRA (Hu et al. 2022) adds to its linear layers, which are selected by a name pattern.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

import subbayes
from subbayes.diagnostics.metrics import score
from subbayes.subspaces.optimal import optimal

WORDS, LENGTH, CLASSES = 24, 10, 3


class LoRA(nn.Module):
    """A frozen linear layer plus a low-rank adapter, which is initialised to zero."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the outputs of the layer and of the adapter."""
        return self.base(x) + self.lora_b(self.lora_a(x))


class Block(nn.Module):
    """Self-attention and a perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        """Apply the block; masked tokens are not attended to."""
        x = self.norm_1(h)
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        visible = mask[:, None, None, :].bool()
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        return h + self.down(nn.functional.gelu(self.up(self.norm_2(h))))


class Transformer(nn.Module):
    """A classifier of sentences with the interface of the library transformers."""

    def __init__(self, width: int = 32, depth: int = 2):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        """Return the logits of the mean of the tokens."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        h = self.words(input_ids) + self.places(places)
        for block in self.blocks:
            h = block(h, attention_mask)
        mask = attention_mask.unsqueeze(-1).to(h)
        return SimpleNamespace(logits=self.classifier((h * mask).sum(1) / mask.sum(1)))


def with_adapters(model: nn.Module, rank: int = 4) -> nn.Module:
    """Freeze a transformer and add adapters to its queries and values."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.query, block.value = LoRA(block.query, rank), LoRA(block.value, rank)
    return model


def sentences(n: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return tokens of three kinds, and the most frequent kind; one label in ten is wrong."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, LENGTH + 1, (n, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    ids = torch.randint(WORDS, (n, LENGTH), generator=generator)
    counts = (nn.functional.one_hot(ids % CLASSES, CLASSES) * mask.unsqueeze(-1)).sum(1)
    wrong = torch.rand(n, generator=generator) < 0.1
    others = torch.randint(CLASSES, (n,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask}, torch.where(wrong, others, counts.argmax(1))


def main(n: int = 200, epochs: int = 150, rank: int = 30) -> dict[str, subbayes.Predictive]:
    """Train the adapters and predict with their posterior."""
    torch.manual_seed(0)
    model = with_adapters(Transformer())
    data, (new, labels) = sentences(n, seed=1), sentences(400, seed=2)

    trained = subbayes.training.train(
        model,
        subbayes.likelihoods.Categorical(),
        data,
        subbayes.Training(epochs=epochs, learning_rate=1e-3, prior_scale=1.0, clip_norm=None),
        parameters="*.lora_*",
        output=lambda out: out.logits,
        seed=0,
        progress=False,
    )
    network, likelihood = trained.network, trained.likelihood
    print(network)

    every = subbayes.inference.tune_prior(
        subbayes.inference.linearised_laplace(network, likelihood, data)
    )
    chosen = {"prior_precision": every.prior_precision}
    space = optimal(network, likelihood, data, inputs=new, rank=rank, **chosen)
    inside = subbayes.inference.linearised_laplace(network, likelihood, data, space, **chosen)
    print(every, inside, sep="\n")

    point = subbayes.Predictive(network(network.weights, new).detach()[None], likelihood)
    predictives = {
        "adapters at the maximum": point,
        "all adapter weights": every.predict(new),
        f"optimal subspace, rank {space.rank}": inside.predict(new),
    }
    for name, found in predictives.items():
        scores = score(found, labels)
        print(f"{name:30} " + "  ".join(f"{key} {value:.3f}" for key, value in scores.items()))
    print(
        "class probabilities of the first sentences:",
        inside.predict(new).probabilities[:4].round(2),
        sep="\n",
    )
    return predictives


if __name__ == "__main__":
    main()
