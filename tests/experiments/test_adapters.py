"""The experiment with adapters, on made-up texts."""

import argparse
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("peft")

from experiments import adapters, adapters_data, adapters_page
from experiments.adapters_data import Corpus, Texts, rows_of
from experiments.adapters_methods import METHODS, Plan, plan_of
from experiments.adapters_model import Architecture, digest_of
from experiments.store import RESULTS, Store
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
        records = Store(tmp_path / "results", "clinc150-few").records.values()
        assert len({r["base"] for r in records}) == 1
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


def test_seconds_are_those_of_a_cpu_after_the_trainings_of_the_selection():
    """Fitting takes 1 s and prediction 2, but after the selection, and after an interruption."""
    records = [record("map", s, 1.0) for s in range(5)]
    records[0]["seconds"]["fit_cpu"], records[4]["seconds"]["fit_cpu"] = 0.0, 100.0
    assert adapters_page.further_seconds(records) == 3.0
    assert adapters_page.further_seconds(records[:1]) is None
    records += [record("swa", s, 1.0) | {"device": "cuda"} for s in range(3)]
    assert adapters_page.further_seconds(records[5:]) is None
    mixed = [record("swa", s, 1.0) | {"device": d} for s, d in enumerate(("cpu", "cpu", "cuda"))]
    assert adapters_page.further_seconds(mixed) is None
    text = adapters_page.markdown({"clinc150-few": records})
    assert "| further CPU seconds | seeds |" in text
    assert "| 0.800 ± 0.000 | 3 | 5 |" in text
    assert "| 0.800 ± 0.000 | – | 3 |" in text


def test_records_know_their_base_model_which_is_not_part_of_their_key(tmp_path):
    """Keys of records are as before: the digest is that of weights, of whichever pretraining."""
    weights = {"b": torch.ones(3), "a": torch.zeros(2, 2)}
    assert digest_of(weights) == digest_of(dict(reversed(weights.items())))
    assert digest_of(weights) != digest_of(weights | {"b": torch.full((3,), 1 + 1e-6)})
    bench = adapters.Bench(
        rows_of(made_up(), "clinc150-few"), lambda: weights, Store(tmp_path, "x"), tiny(), print
    )
    one = bench._facts("map", {"learning_rate": 5e-3, "epochs": 10})
    bench.weights = lambda: {"b": torch.zeros(3)}
    assert bench._facts("map", {"learning_rate": 5e-3, "epochs": 10}) == one
    records = [record("map", s, 1.0) | {"base": "x"} for s in range(2)]
    assert "base models" not in adapters_page.markdown({"clinc150-few": records})
    records[1]["base"] = "y"
    assert "; with 2 base models**" in adapters_page.markdown({"clinc150-few": records})


def test_keys_of_published_records_are_found(tmp_path):
    """A change of the plan, of its facts or of the methods would compute everything again."""
    store = Store(RESULTS / "adapters", "clinc150-few")
    rows = argparse.Namespace(name="clinc150-few")
    bench = adapters.Bench(rows, lambda: {}, store, plan_of("clinc150-few"), print, False)
    found = bench.records(list(METHODS), range(10))
    assert len(found) == 10 * len(METHODS)


def test_differences_are_paired_by_seed():
    noise = np.random.default_rng(0).normal(size=5)
    records = [record("pca", s, 1.0 + noise[s], 0.9) for s in range(5)]
    records += [record("map", s, 1.5 + noise[s] + 0.01 * s) for s in range(4)]
    records += [record("ensemble", s, 0.9 + noise[s]) for s in range(5)]
    records += [record("random", s, 2.0) for s in range(5)]
    assert adapters_page.best_subspace(records) == "pca"
    harder = [record("subspaces", 4, 1.05 + noise[4])]  # the others have 1.2 on average
    assert adapters_page.best_subspace(records + harder) == "pca"
    easier = [record("subspaces", 4, 0.95 + noise[4])]
    assert adapters_page.best_subspace(records + easier) == "subspaces"
    assert adapters_page.best_subspace([]) is None
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
