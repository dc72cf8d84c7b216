"""Texts with intents, as rows of token ids: clinc150 and banking77, and texts out of scope.

Validation and test parts of clinc150 are its own. Banking77 has no validation part: its is the last
fifth of the training texts of each intent, at most 10, and they are not used in training. The
few-shot training sets are the first 10 texts of each intent. The first 5 validation texts of each
intent of clinc150 are used. Texts out of scope are those of
clinc150, for banking77 too. Tokens are the lower-case words, digits and marks that occur at least
twice in the training texts of both data sets, which the base model is pretrained on, without their
intents; no validation or test text and no text out of scope is among them.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from experiments.datasets import find_file
from subbayes.utils.checks import check_choice

__all__ = ["DATASETS", "Corpus", "Part", "Rows", "Texts", "Vocabulary", "corpus_of", "rows_of"]

DATASETS = ("clinc150-few", "banking77-few", "clinc150", "banking77")
"""Data sets, those with the first 10 texts of each intent first."""

FEW, HELD_OUT, LONGEST = 10, 10, 32
PAD, UNKNOWN, START, MASK = range(4)
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]|[^\sa-z0-9]")

Labelled = list[tuple[str, str]]


@dataclass(frozen=True)
class Part:
    """Rows for a model: token ids, padded on the right, with a mask, and labels.

    Attributes:
        inputs: "input_ids" and "attention_mask", both of shape (n, length).
        y: labels from 0, shape (n,).
    """

    inputs: dict[str, Tensor]
    y: Tensor


@dataclass(frozen=True)
class Texts:
    """A data set, as texts with intents.

    Attributes:
        train: training texts.
        validation: texts to select settings with.
        test: test texts.
        outside: texts out of scope, of the test part.
    """

    train: Labelled
    validation: Labelled
    test: Labelled
    outside: list[str]

    def first(self, count: int) -> Texts:
        """The same with the first training texts of each intent."""
        seen: Counter[str] = Counter()
        kept = []
        for text, intent in self.train:
            seen[intent] += 1
            if seen[intent] <= count:
                kept.append((text, intent))
        return Texts(kept, self.validation, self.test, self.outside)


class Vocabulary:
    """Words that occur at least twice in some texts, with their ids.

    Args:
        texts: the texts.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        counts = Counter(word for text in texts for word in _WORD.findall(text.lower()))
        words = sorted(word for word, count in counts.items() if count > 1)
        self.ids = {word: i for i, word in enumerate(words, MASK + 1)}

    def __len__(self) -> int:
        return len(self.ids) + MASK + 1

    def encode(self, texts: Sequence[str], length: int | None = None) -> dict[str, Tensor]:
        """Ids and mask of texts, cut to a length, by default the one of the longest text."""
        words = [self._ids(text) for text in texts]
        longest = min(LONGEST, max(map(len, words))) if length is None else length
        ids = torch.full((len(words), longest), PAD)
        for row, one in zip(ids, words, strict=True):
            row[: len(one)] = torch.tensor(one[:longest])
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}

    def usual_length(self, texts: Sequence[str]) -> int:
        """The number of tokens that 99 % of some texts have at most, or the largest one allowed."""
        lengths = sorted(len(self._ids(text)) for text in texts)
        return min(LONGEST, lengths[int(0.99 * (len(lengths) - 1))])

    def _ids(self, text: str) -> list[int]:
        words = _WORD.findall(text.lower())
        return [START, *(self.ids.get(word, UNKNOWN) for word in words)]


@dataclass(frozen=True)
class Corpus:
    """All data sets.

    Attributes:
        texts: by name of the data set, with all training texts.
        unlabelled: the training texts of all data sets, for pretraining.
        vocabulary: of these.
    """

    texts: dict[str, Texts]
    unlabelled: list[str]
    vocabulary: Vocabulary

    @classmethod
    def of(cls, texts: dict[str, Texts]) -> Corpus:
        """The corpus of some data sets."""
        unlabelled = [text for one in texts.values() for text, _ in one.train]
        return cls(texts, unlabelled, Vocabulary(unlabelled))


@dataclass(frozen=True)
class Rows:
    """Rows of a data set.

    Attributes:
        name: of the data set.
        intents: names of the labels.
        train: training rows.
        validation: rows to select settings with.
        test: test rows.
        outside: inputs that belong to no intent.
    """

    name: str
    intents: tuple[str, ...]
    train: Part
    validation: Part
    test: Part
    outside: dict[str, Tensor]


def rows_of(corpus: Corpus, name: str) -> Rows:
    """Return the rows of a data set by its name, which ends in "-few" for few training texts."""
    base, _, few = name.partition("-")
    check_choice("only", base, corpus.texts)
    texts = corpus.texts[base].first(FEW) if few else corpus.texts[base]
    intents = tuple(sorted({intent for _, intent in texts.train}))
    labels = {intent: i for i, intent in enumerate(intents)}
    length = corpus.vocabulary.usual_length([text for text, _ in corpus.texts[base].train])

    def part(labelled: Labelled) -> Part:
        inputs = corpus.vocabulary.encode([text for text, _ in labelled], length)
        return Part(inputs, torch.tensor([labels[intent] for _, intent in labelled]))

    return Rows(
        name,
        intents,
        part(texts.train),
        part(texts.validation),
        part(texts.test),
        corpus.vocabulary.encode(texts.outside, length),
    )


# --- files ----------------------------------------------------------------------------------------


@cache
def corpus_of(data_dir: str | None) -> Corpus:
    """Return both data sets, read from the data directory.

    Raises:
        InputError: a file is missing.
    """
    clinc = _clinc150(data_dir)
    return Corpus.of({"clinc150": clinc, "banking77": _banking77(data_dir, clinc.outside)})


def _clinc150(data_dir: str | None) -> Texts:
    with gzip.open(find_file("clinc150/data_full.json.gz", data_dir), "rt") as file:
        parts = json.load(file)
    train, validation, test, outside = (
        [(text, intent) for text, intent in parts[name]]
        for name in ("train", "val", "test", "oos_test")
    )
    found = Texts(validation, [], test, [])
    validation = found.first(5).train
    return Texts(train, validation, test, [text for text, _ in outside])


def _banking77(data_dir: str | None, outside: list[str]) -> Texts:
    known, test = (_table(f"banking77/{part}.csv.gz", data_dir) for part in ("train", "test"))
    total = Counter(intent for _, intent in known)
    seen: Counter[str] = Counter()
    train, validation = [], []
    for text, intent in known:
        seen[intent] += 1
        left = total[intent] - seen[intent]
        held_out = left < min(HELD_OUT, total[intent] // 5)
        (validation if held_out else train).append((text, intent))
    return Texts(train, validation, test, outside)


def _table(name: str, data_dir: str | None) -> Labelled:
    with gzip.open(find_file(name, data_dir), "rt", newline="") as file:
        return [(row["text"], row["category"]) for row in csv.DictReader(file)]
