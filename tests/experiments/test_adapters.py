"""The experiment with adapters, on made-up texts."""

import argparse
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("peft")

from experiments import adapters, adapters_data, adapters_page  # noqa: E402
from experiments.adapters_data import Corpus, Texts, rows_of  # noqa: E402
from experiments.adapters_methods import METHODS, Plan  # noqa: E402
from experiments.adapters_model import Architecture  # noqa: E402

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
        "only": "clinc150-few", "methods": ",".join(METHODS), "seeds": 1, "threads": 1,
        "base_dir": str(tmp_path / "base"), "results": str(tmp_path / "results"),
        "data_dir": None, "recorded": False, "write": None,
    }  # fmt: skip
    return argparse.Namespace(**given | changes)


@pytest.mark.slow
def test_every_method_runs_and_resumes(tmp_path):
    threads = torch.get_num_threads()
    try:
        found = adapters.run(options(tmp_path), print, tiny(), made_up())
        assert set(found["clinc150-few"]) == set(METHODS)
        for scores in found["clinc150-few"].values():
            assert 0 <= scores["accuracy"] <= 1 and scores["nll"] > 0
            assert 0 <= scores["auroc"] <= 1 and scores["seeds"] == 1
        lines = []
        again = adapters.run(options(tmp_path, recorded=True), lines.append, tiny(), made_up())
        assert again == found
        assert "aims for" in lines[-1] and "Settings selected" in lines[-1]
    finally:
        torch.set_num_threads(threads)
