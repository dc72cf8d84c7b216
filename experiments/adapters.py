"""Adapters of a small transformer: the posterior in a subspace beside other methods, on intents.

At small scale: a BERT of two layers, pretrained here on the unlabelled training texts, is
fine-tuned by LoRA to tell the intents of texts of clinc150 and banking77 apart, with all training
texts or the first 10 of each intent. Scores are those of the test texts, and the AUROC with which
the entropy of a prediction tells texts of no intent apart. Settings are selected on validation
texts; those that are selected on seed 0 are recorded before a test text is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.adapters_data import DATASETS, Corpus, Rows, corpus_of, rows_of
from experiments.adapters_methods import METHODS, Plan, Session, plan_of, validation_nll
from experiments.adapters_model import base_weights, digest_of
from experiments.adapters_page import markdown, summary
from experiments.datasets import cache_dir
from experiments.markdown import add_recorded_option, add_write_option, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import numbers_from, split_names
from subbayes.diagnostics import metrics
from subbayes.diagnostics.detection import out_of_distribution
from subbayes.utils.checks import check_choice, check_count

__all__ = ["Bench", "add_options", "run", "scores_of"]

Say = Callable[..., None]


@dataclass
class Bench:
    """The records of one data set, and how to compute them.

    Attributes:
        rows: of the data set.
        weights: returns those of the base model.
        store: of the records.
        plan: sizes.
        say: prints a line.
        computes: whether missing records are computed; without, they are left out.
        device: device of the models.
        settings: selected settings by method.
    """

    rows: Rows
    weights: Callable[[], dict[str, Tensor]]
    store: Store
    plan: Plan
    say: Say
    computes: bool = True
    device: str = "cpu"
    settings: dict[str, Record | None] = field(default_factory=dict)
    _known: dict[int, dict[str, Any]] = field(default_factory=dict)  # trainings by seed

    def records(self, methods: Sequence[str], seeds: Iterable[int]) -> list[Record]:
        """The records of all methods, seed by seed.

        Args:
            methods: names of methods.
            seeds: the seeds.
        """
        found = []
        for seed in seeds:
            for method in methods:
                settings = self.selected(method)
                if settings is None:
                    continue
                facts = self._facts(method, settings) | {"seed": seed}
                key = key_of(f"{self.rows.name}-{method}-{seed}", facts)
                if self.computes or key in self.store:
                    compute = lambda m=method, f=facts, s=seed: f | self._test(m, f, s)  # noqa: E731
                    found.append(self.store.get(key, compute, self._report))
            self._known.clear()
        return found

    def selected(self, method: str) -> Record | None:
        """The candidate with the best score on validation rows, with seed 0.

        None if there are missing scores that are not to be computed.
        """
        if method not in self.settings:
            self.settings[method] = self._select(method)
        return self.settings[method]

    def _select(self, method: str) -> Record | None:
        candidates, scores = METHODS[method].candidates, []
        base = METHODS[method].base
        if base != method and self.selected(base) is None:
            return None
        if len(candidates) == 1:
            return candidates[0]
        for candidate in candidates:
            facts = self._facts(method, candidate) | {"kind": "validation", "seed": 0}
            key = key_of(f"{self.rows.name}-{method}-validation", facts)
            if not self.computes and key not in self.store:
                return None
            compute = lambda f=facts, c=candidate: f | self._validation(method, c)  # noqa: E731
            scores.append(self.store.get(key, compute, self._report)["nll"])
        return candidates[min(range(len(scores)), key=scores.__getitem__)]

    def _facts(self, method: str, settings: Record) -> Record:
        """What determines a record."""
        sizes, used = dataclasses.asdict(self.plan), METHODS[method].fields
        names = ("architecture", "adapter_rank", "training", *used)
        return {
            "dataset": self.rows.name,
            "method": method,
            "settings": settings,
            "training": self._training(method, settings),
            "plan": {name: sizes[name] for name in names},
        }

    def _training(self, method: str, settings: Record) -> Record:
        """The settings of the training."""
        base = METHODS[method].base
        found = settings if base == method else self.selected(base)
        assert found is not None
        return found

    # --- computation ------------------------------------------------------------------------------

    def _session(self, seed: int, training: Record) -> Session:
        known = self._known.setdefault(seed, {})
        return Session(self.rows, self.weights(), self.plan, seed, training, known, self.device)

    def _fit(self, method: str, settings: Record, seed: int) -> tuple[Any, Record]:
        session = self._session(seed, self._training(method, settings))
        started, cpu = time.perf_counter(), time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            fitted = METHODS[method].fit(session, settings)
        seconds = {"fit": time.perf_counter() - started, "fit_cpu": time.process_time() - cpu}
        problems = sorted({str(w.message) for w in caught if issubclass(w.category, UserWarning)})
        facts = {"seconds": seconds, "warnings": [one[:200] for one in problems]}
        return fitted, facts | {"base": digest_of(session.weights)}

    def _validation(self, method: str, candidate: Record) -> Record:
        fitted, facts = self._fit(method, candidate, 0)
        return facts | {"nll": validation_nll(fitted, self.rows.validation)}

    def _test(self, method: str, facts: Record, seed: int) -> Record:
        fitted, found = self._fit(method, facts["settings"], seed)
        started = time.process_time()
        scores = {"validation_nll": validation_nll(fitted, self.rows.validation)}
        scores |= scores_of(fitted, self.rows)
        found["seconds"] |= {"prediction_cpu": time.process_time() - started}
        run_facts = {
            "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0],
            "device": self.device,
            "versions": versions(),
        }
        return {"kind": "test", **scores, **found, **run_facts}

    def _report(self, record: Record) -> None:
        label = f"{record['dataset']} {METHODS[record['method']].label} {record['seed']}"
        names = ("accuracy", "nll", "ece", "brier", "auroc")
        shown = ", ".join(f"{name} {record[name]:.4f}" for name in names if name in record)
        kind = f"{record['settings']} " if record["kind"] == "validation" else ""
        self.say(f"{label}: {kind}{shown}, {record['seconds']['fit_cpu']:.0f} CPU seconds to fit")


def scores_of(fitted: Any, rows: Rows) -> Record:
    """Scores of the test rows, and AUROCs of the texts that belong to no intent."""
    inside, outside = fitted.predict(rows.test.inputs), fitted.predict(rows.outside)
    scores = metrics.score(inside, rows.test.y)
    found = out_of_distribution(inside, outside)
    return {
        "accuracy": scores["accuracy"],
        "nll": -scores["log_likelihood"],
        "ece": scores["ece"],
        "brier": scores["brier"],
        "auroc": found["entropy"]["auroc"],
        "auroc_mutual_information": found["mutual_information"]["auroc"],
        "auroc_max_probability": found["max_probability"]["auroc"],
    }


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument(
        "--only",
        default=",".join(DATASETS),
        help="data sets, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--methods",
        default=",".join(METHODS),
        help=f"methods, separated by commas, of {', '.join(METHODS)} (default: all)",
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds of each method")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--threads", type=int, default=1, help="threads of each method")
    parser.add_argument("--device", default="cpu", help="device of the models")
    parser.add_argument(
        "--base-dir",
        default=None,
        help="folder of the pretrained base model, which is made there if it is missing "
        "(default: the cache of downloads)",
    )
    add_recorded_option(parser)
    add_write_option(parser)


def run(
    options: argparse.Namespace, say: Say, plan: Plan | None = None, corpus: Corpus | None = None
) -> Record:
    """Compute the missing records and print the tables; return a summary."""
    names = split_names(options.only, DATASETS)
    methods = options.methods.split(",")
    for method in methods:
        check_choice("methods", method, METHODS)
    seeds = numbers_from(options.first, "seeds", options.seeds)
    torch.set_num_threads(check_count("threads", options.threads))
    architecture = (Plan() if plan is None else plan).architecture
    corpus = corpus_of(options.data_dir) if corpus is None else corpus
    folder = Path(options.base_dir) if options.base_dir else cache_dir() / "experiments-adapters"
    found = {}
    for name in names:
        bench = Bench(
            rows_of(corpus, name),
            lambda: base_weights(corpus, architecture, folder, say),
            Store(options.results, name),
            plan_of(name) if plan is None else plan,
            say,
            not options.recorded,
            options.device,
        )
        found[name] = bench.records(methods, seeds)
    found = {name: records for name, records in found.items() if records}
    publish(markdown(found), "adapters", options, say)
    return summary(found)
