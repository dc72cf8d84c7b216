"""CIFAR-10 with convolutional networks: tables 1, 8 and 9 of Izmailov et al. (2019).

SGD, weight averaging (SWA), SWAG, a deep ensemble, and elliptical slice sampling and mean-field
variational inference in the PCA, random and curve subspaces, on the 10,000 training and 1,000 test
images at hand. 1,000 of the training images are held out; each temperature is selected on them.
A record is saved as soon as it is computed, in the order of the methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from experiments import cifar_tables as tables
from experiments import images as pictures
from experiments.cifar_data import Rows, rows_of
from experiments.cifar_methods import METHODS, PLANS, QUICK, Plan, Session, sampled
from experiments.markdown import add_recorded_option, add_write_option, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import numbers_from, split_names
from subbayes import Predictive
from subbayes.diagnostics import metrics
from subbayes.utils.checks import fail

__all__ = ["Bench", "add_options", "run"]

Say = Callable[..., None]
Predict = Callable[[torch.Tensor], Predictive]


@dataclass
class Bench:
    """The records of one model, and how to compute them.

    Attributes:
        model: name of the model.
        images: returns the images.
        plan: sizes.
        store: of the records.
        say: prints a line.
        device: of the networks.
        computes: whether missing records are computed; without, they are left out.
    """

    model: str
    images: Callable[[], pictures.Images]
    plan: Plan
    store: Store
    say: Say
    device: str = "cpu"
    computes: bool = True
    _session: Session | None = field(default=None, init=False)

    def records(self, methods: Sequence[str], seeds: Iterable[int]) -> list[Record]:
        """The records of all methods, and the temperatures of their subspaces, seed by seed."""
        found: list[Record] = []
        for seed in seeds:
            for method in methods:
                name, temperature = METHODS[method].tuned, 1.0
                if name is not None:
                    tried = self._record("temperatures", name, seed)
                    if tried is None:
                        continue
                    if tried not in found:
                        found.append(tried)
                    temperature = selected(tried)
                record = self._record("scores", method, seed, temperature)
                if record is not None:
                    found.append(record)
            self._session = None
        return found

    def _record(
        self, kind: str, name: str, seed: int, temperature: float | None = None
    ) -> Record | None:
        """A record, or None if it is missing and not to be computed."""
        facts = {
            "kind": kind,
            "model": self.model,
            "method": name,
            "seed": seed,
            "plan": dataclasses.asdict(self.plan),
            **self._device_facts(),
        }
        key = key_of(f"{self.model}-{name}-{kind}-{seed}", facts)
        if not self.computes and key not in self.store:
            return None

        def compute() -> Record:
            if temperature is None:
                return facts | self._temperatures(self._of(seed), name)
            return facts | self._scores(self._of(seed), name, temperature)

        return self.store.get(key, compute, self._report)

    def _device_facts(self) -> Record:
        """The kind of the device, on which the trainings that methods share depend.

        The first records, of CUDA, have none in their keys.
        """
        kind = torch.device(self.device).type
        return {} if kind == "cuda" else {"device_type": kind}

    # --- computation ------------------------------------------------------------------------------

    def _of(self, seed: int) -> Session:
        """The session of a seed, with its trainings."""
        if self._session is None:
            sizes = (self.plan.images, self.plan.validation, self.plan.test)
            rows = rows_of(self.images(), sizes, seed, self.device)
            self._session = Session(self.model, rows, self.plan, seed)
        return self._session

    def _temperatures(self, session: Session, name: str) -> Record:
        """Scores at each temperature; those of the test images select nothing."""
        known, started, parts = dict(session.seconds), time.perf_counter(), []
        for temperature in session.plan.temperatures:
            predict, facts = sampled(session, name, temperature, session.plan.tuning_draws)
            scores = _held_out_scores(predict, session.rows)
            parts.append({"temperature": temperature, **scores, **facts})
        seconds = _seconds(session, known, time.perf_counter() - started)
        return {"candidates": parts, "seconds": seconds, **self._machine()}

    def _scores(self, session: Session, name: str, temperature: float) -> Record:
        known, started = dict(session.seconds), time.perf_counter()
        predict, facts = METHODS[name].fit(session, temperature)
        fitted = time.perf_counter()
        found = _held_out_scores(predict, session.rows)
        seconds = _seconds(session, known, fitted - started)
        seconds["prediction"] = time.perf_counter() - fitted
        used = {"temperature": temperature} if METHODS[name].tuned else {}
        weights = session.member(0).network.size
        return {
            **found["test"],
            "validation": found["validation"],
            **used,
            **facts,
            "weights": weights,
            "seconds": seconds,
            **self._machine(),
        }

    def _machine(self) -> Record:
        on_gpu = torch.device(self.device).type == "cuda"
        name = torch.cuda.get_device_name(self.device) if on_gpu else platform.machine()
        return {"device": name, "versions": versions()}

    def _report(self, record: Record) -> None:
        label = f"{self.model} {record['method']} {record['seed']}:"
        if record["kind"] == "temperatures":
            found = f"temperature {selected(record):g}"
        else:
            names = ("accuracy", "nll", "ece")
            found = ", ".join(f"{name} {record[name]:.4f}" for name in names)
        seconds = record["seconds"]
        trained = sum(seconds["trainings"].values())
        self.say(label, f"{found}, {seconds['fit']:.0f} s after {trained:.0f} s of training")


def _seconds(session: Session, known: Record, total: float) -> Record:
    """Divide seconds into those of trainings that were not known before, and the rest."""
    trainings = {name: own for name, own in session.seconds.items() if name not in known}
    return {"fit": total - sum(trainings.values()), "trainings": trainings}


def selected(record: Record) -> float:
    """The temperature with the best likelihood of the validation images."""
    return min(record["candidates"], key=lambda one: one["validation"]["nll"])["temperature"]


def _held_out_scores(predict: Predict, rows: Rows) -> dict[str, Record]:
    """Scores of validation and test images, which are predicted together.

    Batch-normalisation statistics are then re-estimated once for each weight vector.
    """
    found = predict(torch.cat([rows.validation.x, rows.test.x]))
    outputs, n = found.outputs, len(rows.validation.y)
    return {
        "validation": _scores(Predictive(outputs[:, :n], found.likelihood), rows.validation.y),
        "test": _scores(Predictive(outputs[:, n:], found.likelihood), rows.test.y),
    }


def _scores(predictive: Predictive, y: torch.Tensor) -> Record:
    """Accuracy, negative log-likelihood with its standard error, and calibration error."""
    y = y.cpu()
    terms = -np.asarray(predictive.log_prob(y), dtype=np.float64)
    return {
        "accuracy": metrics.accuracy(predictive, y),
        "nll": float(terms.mean()),
        "nll_error": float(terms.std() / np.sqrt(len(terms))),
        "ece": metrics.ece(predictive, y),
    }


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--model", nargs="+", default=["resnet20"], choices=tuple(PLANS))
    parser.add_argument(
        "--methods",
        default=",".join(METHODS),
        help=f"methods, separated by commas, of {', '.join(METHODS)} (default: all)",
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds of each method")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--device", default="cpu", help="device of the networks")
    parser.add_argument("--epochs", type=int, default=None, help="epochs of the first phase")
    parser.add_argument("--width", type=float, default=None, help="factor of all channels")
    parser.add_argument("--quick", action="store_true", help="run at a small size")
    add_recorded_option(parser)
    add_write_option(parser)


def plan_of(options: argparse.Namespace, model: str) -> Plan:
    """The sizes for a model with the changes of the options."""
    changes: dict[str, Any] = dict(QUICK) if options.quick else {}
    changes |= {name: getattr(options, name) for name in ("epochs", "width")
                if getattr(options, name) is not None}  # fmt: skip
    return dataclasses.replace(PLANS[model], **changes)


def run(
    options: argparse.Namespace,
    say: Say,
    plan: Plan | None = None,
    images: pictures.Images | None = None,
) -> Record:
    """Compute the missing records and print the tables; return a summary."""
    methods = split_names(options.methods, METHODS, "methods")
    missing = torch.device(options.device).type == "cuda" and not torch.cuda.is_available()
    if missing and not options.recorded:
        fail("device", "a device of this machine", options.device, "Use --device cpu")
    seeds = numbers_from(options.first, "seeds", options.seeds)
    found: list[Record] = []
    for model in options.model:
        bench = Bench(
            model,
            lambda: pictures.load("cifar10", options.data_dir) if images is None else images,
            plan_of(options, model) if plan is None else plan,
            Store(options.results, model),
            say,
            options.device,
            not options.recorded,
        )
        with pictures.float32_convolutions():
            found += bench.records([name for name in METHODS if name in methods], seeds)
    publish(tables.page(found), "cifar", options, say)
    return tables.summary(found)
