"""The experiment with adapters, on made-up texts."""

import argparse
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("peft")

from experiments import adapters, adapters_data, adapters_page
from experiments.adapters_data import Corpus, Texts, rows_of
from experiments.adapters_methods import METHODS, Plan
from experiments.adapters_model import Architecture
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = {"pay": "bill rent invoice", "play": "song tune record", "cook": "soup rice beans"}


def made_up():
    """Intents that are told apart by most of their words."""
    rng = np.random.default_rng(0)
    words = " ".join(WORDS.values()).split()

    def some(count):
        return [
            (f"please {rng.choice(WORDS[intent].split())} {rng.choice(words)}", intent)
            for _ in range(count)
            for intent in WORDS
        ]

    return Corpus.of({"clinc150": Texts(some(12), some(4), some(6), ["what is rain", "rain song"])})


def tiny():
    plan = Plan()
    training = replace(plan.training, swa_epochs=6, batch_size=10)
    sizes = Architecture(width=16, layers=1, heads=2, epochs=1, batch_size=12)
    return replace(
        plan, architecture=sizes, adapter_rank=1, training=training, members=2, draws=2,
        directions=2, groups=20, steps=24, samples=2, batch_size=8,
    )  # fmt: skip


def options(tmp_path, **changes):
    given = {
        "only": "clinc150-few", "methods": ",".join(METHODS), "seeds": 1, "first": 0, "threads": 1,
        "base_dir": str(tmp_path / "base"), "results": str(tmp_path / "results"),
        "data_dir": None, "recorded": False, "write": None, "device": "cpu",
    }  # fmt: skip
    return argparse.Namespace(**given | changes)


@pytest.mark.slow
def test_every_method_runs_and_resumes(tmp_path):
    threads = torch.get_num_threads()
    try:
        found = adapters.run(options(tmp_path), print, tiny(), made_up())
        assert set(found["clinc150-few"]) == set(METHODS)
        for scores in found["clinc150-few"].values():
            assert scores["nll"] > 0
            assert 0 <= scores["accuracy"] <= 1
            assert 0 <= scores["auroc"] <= 1
        lines = []
        again = adapters.run(options(tmp_path, recorded=True), lines.append, tiny(), made_up())
        assert again == found
        assert "aims for" in lines[-1]
        assert "Settings selected" in lines[-1]
    finally:
        torch.set_num_threads(threads)


def test_rows_have_the_labels_and_words_of_their_texts():
    corpus = made_up()
    rows, few = rows_of(corpus, "clinc150"), rows_of(corpus, "clinc150-few")
    assert (len(rows.train.y), len(few.train.y)) == (36, 30)
    assert few.train.y.bincount().tolist() == [10, 10, 10]
    words = {i: word for word, i in corpus.vocabulary.ids.items()}
    texts = corpus.texts["clinc150"]
    for ids, label, (text, intent) in zip(
        rows.test.inputs["input_ids"], rows.test.y, texts.test, strict=True
    ):
        assert rows.intents[label] == intent
        assert ids[0] == adapters_data.START
        known = [words[i] for i in ids[1:].tolist() if i > adapters_data.MASK]
        assert known == [word for word in text.split() if word in corpus.vocabulary.ids]
    longer = corpus.vocabulary.encode(["pay the bill 12 times!"], 4)
    assert longer["input_ids"].shape == (1, 4)
    assert longer["attention_mask"].sum() == 4


def test_validation_rows_of_banking77_are_the_last_of_each_intent(tmp_path):
    import gzip

    folder = tmp_path / "banking77"
    folder.mkdir()
    for part, count in (("train", 12), ("test", 2)):
        lines = ["text,category", *(f'"{c} {i}, please",{c}' for i in range(count) for c in "ab")]
        with gzip.open(folder / f"{part}.csv.gz", "wt") as file:
            file.write("\n".join(lines))
    found = adapters_data._banking77(str(tmp_path), ["other"])
    assert [text for text, _ in found.validation] == [
        f"{c} {i}, please" for i in (10, 11) for c in "ab"
    ]
    assert len(found.train) == 20
    assert found.first(3).train[-1] == ("b 2, please", "b")


def record(method, seed, nll, auroc=0.8):
    return {
        "dataset": "clinc150-few", "method": method, "seed": seed, "settings": {}, "nll": nll,
        "validation_nll": nll, "auroc": auroc, "accuracy": 0.5, "ece": 0.1, "brier": 0.5,
        "seconds": {"fit_cpu": 1.0, "prediction_cpu": 2.0},
    }  # fmt: skip


def test_differences_are_paired_by_seed():
    noise = np.random.default_rng(0).normal(size=5)
    records = [record("pca", s, 1.0 + noise[s], 0.9) for s in range(5)]
    records += [record("map", s, 1.5 + noise[s] + 0.01 * s) for s in range(4)]
    records += [record("ensemble", s, 0.9 + noise[s]) for s in range(5)]
    records += [record("random", s, 2.0) for s in range(5)]
    assert adapters_page.best_subspace(records) == "pca"
    mean, error, seeds = adapters_page.differences(records, "pca", "map", "nll")
    gaps = 0.5 + 0.01 * np.arange(4)
    assert seeds == 4
    np.testing.assert_allclose([mean, error], [gaps.mean(), gaps.std(ddof=1) / 2])
    found = adapters_page.goals(records, "pca")
    assert found["baselines"] == 2
    assert (found["wins"], found["losses"], found["ahead"]) == (1, 1, ["ensemble"])
    assert found["auroc_gain"] == pytest.approx(0.1)
    text = adapters_page.markdown({"clinc150-few": records})
    assert "| MAP | 0.515 ± 0.006 |" in text
    assert (
        "| NLL no worse than that of any baseline | lower mean: ensemble of adapters | no |" in text
    )


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(InputError, match="methods: expected one of"):
        adapters.run(options(tmp_path, methods="none"), print, tiny(), made_up())
