"""The base model of the experiment with adapters, pretrained here, and its adapters.

A small BERT (two layers of width 128) is pretrained by masked language modelling on the unlabelled
training texts: 15 % of the tokens of each text are chosen anew in each epoch, of which 80 % are
masked, 10 % replaced by another word and 10 % kept (Devlin et al. 2019).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from experiments.adapters_data import MASK, PAD, Corpus
from subbayes.utils.seeding import fork_rng

__all__ = ["Architecture", "adapted_model", "base_weights", "digest_of", "pretrain"]

Say = Callable[..., None]
_TARGETS = ["query", "key", "value", "dense"]


@dataclass(frozen=True)
class Architecture:
    """Sizes of the base model and of its pretraining.

    Attributes:
        width: of the hidden states.
        layers: number of them.
        heads: of attention.
        epochs: passes over the unlabelled texts.
        batch_size: texts for each step.
        learning_rate: of AdamW, which rises over the first 5 % of the steps and falls to zero.
    """

    width: int = 128
    layers: int = 2
    heads: int = 4
    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 1e-3

    def config(self, words: int) -> BertConfig:
        """The configuration of a model of the library transformers."""
        return BertConfig(
            vocab_size=words,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=2 * self.width,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=PAD,
        )


# --- pretraining ----------------------------------------------------------------------------------


def base_weights(
    corpus: Corpus, architecture: Architecture, folder: Path, say: Say
) -> dict[str, Tensor]:
    """The weights of the encoder, from a file in a folder; pretrained and saved if it is not there.

    The name of the file has a digest of the texts and the architecture.
    """
    facts = json.dumps([asdict(architecture), corpus.unlabelled])
    path = folder / f"base-{hashlib.sha256(facts.encode()).hexdigest()[:10]}.safetensors"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(pretrain(corpus, architecture, say), path)
    return load_file(path)


def digest_of(weights: dict[str, Tensor]) -> str:
    """Ten hexadecimal digits that tell the weights of two pretrainings apart.

    Pretraining on another machine, or with another release of torch, gives other weights.
    """
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:10]


def pretrain(corpus: Corpus, architecture: Architecture, say: Say) -> dict[str, Tensor]:
    """Train the base model on the unlabelled texts; returns the weights of its encoder."""
    texts = corpus.vocabulary.encode(corpus.unlabelled)["input_ids"]
    words = len(corpus.vocabulary)
    with fork_rng(0):
        model = BertForMaskedLM(architecture.config(words)).train()
        steps = architecture.epochs * -(-len(texts) // architecture.batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), architecture.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, architecture.learning_rate, steps, pct_start=0.05, anneal_strategy="linear"
        )
        for epoch in range(architecture.epochs):
            total = count = 0.0
            for ids in _batches(texts, architecture.batch_size):
                chosen = (torch.rand(ids.shape) < 0.15) & (ids > MASK)
                if not chosen.any():
                    continue
                hidden = model.bert(_masked(ids, chosen, words), (ids != PAD).long())
                logits = model.cls(hidden.last_hidden_state[chosen])
                loss = nn.functional.cross_entropy(logits, ids[chosen])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                total, count = total + float(loss.detach()) * len(logits), count + len(logits)
            say(f"pretraining, epoch {epoch + 1}: {total / count:.3f} nats for each masked token")
    return {name: t.detach().clone() for name, t in model.bert.state_dict().items()}


def _batches(texts: Tensor, size: int) -> Iterator[Tensor]:
    """Batches of texts of similar length, in random order, without the padding that all share."""
    lengths = (texts != PAD).sum(1) + torch.rand(len(texts))
    groups = lengths.argsort().split(size)
    for i in torch.randperm(len(groups)):
        ids = texts[groups[i]]
        yield ids[:, : int((ids != PAD).sum(1).max())]


def _masked(ids: Tensor, chosen: Tensor, words: int) -> Tensor:
    draw = torch.rand(ids.shape)
    masked = torch.where(chosen & (draw < 0.8), MASK, ids)
    other = torch.randint(MASK + 1, words, ids.shape)
    return torch.where(chosen & (draw > 0.9), other, masked)


# --- adapters -------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """The encoder, the mean of its hidden states over the tokens of a text, and a linear layer.

    Args:
        encoder: the encoder.
        labels: number of classes.
    """

    def __init__(self, encoder: BertModel, labels: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.config.hidden_size, labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of shape (n, labels)."""
        hidden = self.encoder(input_ids, attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden)
        return self.classifier((hidden * weights).sum(1) / weights.sum(1))


def adapted_model(
    weights: dict[str, Tensor],
    architecture: Architecture,
    labels: int,
    rank: int,
    dropout: float,
    seed: int,
) -> PeftModel:
    """The base model with fresh adapters in all its linear layers, and a fresh classifier.

    Args:
        weights: of the encoder.
        architecture: of the encoder.
        labels: number of classes.
        rank: of the adapters.
        dropout: rate of the dropout before the adapters.
        seed: of the initial weights.
    """
    words = len(weights["embeddings.word_embeddings.weight"])
    with fork_rng(seed):
        encoder = BertModel(architecture.config(words), add_pooling_layer=False)
        encoder.load_state_dict(weights)
        lora = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            lora_dropout=dropout,
            target_modules=_TARGETS,
            modules_to_save=["classifier"],
        )
        return get_peft_model(Classifier(encoder, labels), lora)
