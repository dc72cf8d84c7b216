"""Base class of models that predict from inputs: scores, description and saving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from subbayes.artifacts.saving import save
from subbayes.artifacts.tensors import add_prefix
from subbayes.data.arrays import is_list_of_dicts, to_inputs, to_tensor
from subbayes.data.cache import concatenate
from subbayes.data.data import Data, join_targets
from subbayes.diagnostics import metrics
from subbayes.diagnostics.conformal import Calibratable
from subbayes.diagnostics.detection import out_of_distribution
from subbayes.diagnostics.model_card import model_card
from subbayes.diagnostics.surprise import Update
from subbayes.diagnostics.token_scores import TokenScores
from subbayes.distributed.divided_rows import exchanged, gathered
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import TargetParts, split_targets
from subbayes.likelihoods.validation import check_padding, checked_targets, ignored_label
from subbayes.networks.description import describe_likelihood, describe_network
from subbayes.networks.network import Network
from subbayes.networks.token_outputs import check_decoder_inputs
from subbayes.predictions.averaging import count_known_rows, input_batches, with_noise
from subbayes.predictions.distilling import Student, distilled
from subbayes.predictions.exporting import exported, write_graph
from subbayes.predictions.modules import LEVELS, Component, DrawnFunctions, PredictiveModule
from subbayes.predictions.predictive import OUTPUTS_AT_ONCE, Predictive
from subbayes.utils.checks import check_count, fail
from subbayes.utils.progress import progress_bar
from subbayes.utils.trees import n_rows, row_kind, take, to_device
from subbayes.utils.types import RowNumbers


class Predictor(Calibratable, ABC):
    """A model of a network whose predictions average draws.

    Attributes:
        kind: the kind of its artifact; see `subbayes.artifacts.saving`.
        network: the network.
        likelihood: p(y | f).
        modes: additional arguments of `predict` that choose what is averaged.
    """

    kind: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # fields of most subclasses, properties of others

        @property
        def network(self) -> Any:
            """The network."""

        @property
        def likelihood(self) -> Any:
            """p(y | f)."""

        @property
        def name(self) -> Any:
            """The name of the method, where a user chooses it."""

    @property
    def label(self) -> str:
        """The name of the method in tables; by default `name`."""
        return self.name

    @property
    @abstractmethod
    def default_draws(self) -> int:
        """Number of draws that `predict` averages without `n_draws`."""

    @abstractmethod
    def predict(self, inputs: Any, *args: Any, **options: Any) -> Predictive:
        """The predictive distribution at inputs, averaged over draws.

        Keyword arguments of most models are `n_draws` (number of draws, all by default), `noise`
        (noise scale per new row, for `Gaussian(noise="per-observation")`), `memory_limit` (bytes
        of activations held at once), and `progress` (show a progress bar; None shows it on a
        terminal).

        Of a loader that yields pairs the second part is y, which is ignored: a module of several
        inputs needs pairs ((x, mask), y) or dicts of inputs by name. A loader is read once.

        Args:
            inputs: new inputs in the form the module takes, or a loader of them or of pairs
                (inputs, y).
            args: none.
            options: as above, and further ones of each model.

        Raises:
            InputError: inputs that the module does not take; a loader of pairs (x, mask), as far
                as it can be told: the module has a second argument that is None by default, and
                the mask has more numbers per row than the network has outputs.
        """

    def predict_batches(
        self,
        inputs: Any,
        *,
        batch_size: int | None = None,
        n_draws: int | None = None,
        noise: Any = None,
        progress: bool | None = False,
        **options: Any,
    ) -> Iterator[Predictive]:
        """Predict batches of rows in order, so that memory does not grow with their number.

        Each batch is predicted by `predict`, and has the same numbers up to rounding; draws of
        the outputs themselves, as of linearised Laplace for counts, begin anew in each batch.

        Args:
            inputs: as for `predict`.
            batch_size: number of rows at most; by default as many as give 2**22 outputs, 32 MiB.
                The batches of a loader are divided and not joined.
            n_draws: use this many draws.
            noise: a number for all rows, or a noise scale per row, for
                `Gaussian(noise="per-observation")`.
            progress: show a progress bar; None shows it on a terminal.
            options: further arguments of `predict`.

        Raises:
            InputError: inputs that the module does not take, or noise scales of other rows.

        Example:
            >>> import torch
            >>> import subbayes
            >>> from subbayes.baselines.ensemble import WeightSamples
            >>> network = subbayes.Network(subbayes.MLP(2, (3,), 1, seed=0))
            >>> likelihood = subbayes.likelihoods.Gaussian(1.0)
            >>> model = WeightSamples(network, network.weights[None], likelihood, "MAP")
            >>> batches = model.predict_batches(torch.zeros(5, 2), batch_size=2)
            >>> [len(predictive.mean) for predictive in batches]
            [2, 2, 1]
        """
        draws = self.default_draws if n_draws is None else check_count("n_draws", n_draws)
        size = None if batch_size is None else check_count("batch_size", batch_size)
        network = self._parts()[0]
        scales = None if noise is None else to_tensor("noise", noise, keep_double=True)
        options = options | ({} if n_draws is None else {"n_draws": n_draws})
        done = 0
        with progress_bar(count_known_rows(inputs), "Predicting", progress, "rows") as steps:
            for batch in input_batches(inputs, network):
                if size is None:
                    first = to_device(take(batch, slice(2)), network.device)
                    size = max(1, OUTPUTS_AT_ONCE // (draws * network.check(first)))
                for start in range(0, n_rows(batch), size):
                    rows = take(batch, slice(start, start + size))
                    n = n_rows(rows)
                    if scales is not None:
                        options["noise"] = scales[done : done + n] if scales.ndim else scales
                    yield self.predict(rows, **options)
                    done += n
                    steps.update(n)
        if scales is not None and scales.ndim and len(scales) != done:
            fail("noise", f"one scale for each of {done} inputs", len(scales))

    def components(self, inputs: Any, n_draws: int | None = None) -> list[Component]:
        """Parts of the predictive distribution as modules; see `to_module`.

        Args:
            inputs: some rows in the form the module takes.
            n_draws: number of draws, all by default.
        """
        fail("model", "a model whose predictions are a graph of tensors", self.label)

    def predictive_module(
        self,
        inputs: Any = None,
        *,
        n_draws: int | None = None,
        levels: Sequence[float] = LEVELS,
        distil: bool = False,
    ) -> tuple[PredictiveModule | Student, Any]:
        """The predictive distribution as a module that torch can export, and rows to trace it with.

        The arguments are those of `to_module`, which returns its graph.
        """
        if n_draws is not None:
            check_count("n_draws", n_draws)
        rows = self._some_rows() if inputs is None and not distil else inputs
        if rows is None:
            fail("inputs", "a few rows in the form the module takes", "none", "Pass inputs=X[:3]")
        rows = to_inputs(rows)
        network = self._parts()[0]
        network.check(to_device(rows, network.device))
        module = PredictiveModule(self.components(rows, n_draws), levels)
        return distilled(module, rows) if distil else module, rows

    def to_module(
        self,
        inputs: Any = None,
        *,
        n_draws: int | None = None,
        levels: Sequence[float] = LEVELS,
        distil: bool = False,
    ) -> nn.Module:
        """The predictive distribution as a module of torch alone, for any number of rows.

        It takes inputs as the network does, and returns a dict of tensors in float64: "mean",
        "aleatoric" and "epistemic" (variances) and "quantiles" with one number for each level last,
        or "probabilities", "entropy" and "mutual_information" of classes. Rows are not checked.

        Args:
            inputs: a few rows in the form the module takes, to trace it with; by default training
                rows that the model has, or rows of a network of this library.
            n_draws: number of draws, all by default.
            levels: of the quantiles; () for none, which is faster, and necessary for counts.
            distil: train one small network on the predictions at `inputs`, rows like those to
                predict, shape (N, D), and at perturbed ones, and return that. Its attribute
                `distance` is the mean KL divergence from the predictions at a fifth of the rows,
                held out, in nats; a warning says when it is above 0.02.

        Raises:
            InputError: a model whose graph cannot be captured; no inputs, where they are needed.

        Example:
            >>> import torch, subbayes
            >>> model = subbayes.baselines.point_estimate(torch.nn.Linear(2, 3), "categorical")
            >>> module = model.to_module(torch.zeros(1, 2))
            >>> {name: tuple(t.shape) for name, t in module(torch.ones(5, 2)).items()}
            {'probabilities': (5, 3), 'entropy': (5,), 'mutual_information': (5,)}
        """
        options: dict[str, Any] = {"n_draws": n_draws, "levels": levels, "distil": distil}
        module, rows = self.predictive_module(inputs, **options)
        graph = exported(module, rows).module()
        if isinstance(module, Student):
            graph.distance = module.distance  # type: ignore[assignment]
        return graph

    def functions(self, inputs: Any = None, *, n_draws: int | None = None) -> DrawnFunctions:
        """Functions drawn from the posterior, as a module that differentiates in its inputs.

        It takes inputs as the network does, and returns E[y] under each draw, shape (S, N, T), or
        probabilities of classes, (S, N, K). One draw is one function, the same in every call. Of
        linearised Laplace draws are made, whose mean is the closed form.

        Args:
            inputs: as for `to_module`.
            n_draws: number of draws: by default all, or 256 of linearised Laplace.

        Raises:
            InputError: a model whose predictions are no graph of tensors; no inputs, where they are
                needed.

        Example:
            >>> import torch, subbayes
            >>> likelihood = subbayes.likelihoods.Gaussian(0.1)
            >>> model = subbayes.baselines.point_estimate(torch.nn.Linear(2, 1), likelihood)
            >>> x = torch.ones(5, 2, requires_grad=True)
            >>> values = model.functions(x)(x)
            >>> values.shape, torch.autograd.grad(values.sum(), x)[0].shape
            (torch.Size([1, 5, 1]), torch.Size([5, 2]))
        """
        module, rows = self.predictive_module(inputs, n_draws=n_draws, levels=())
        components: Any = module.components
        return DrawnFunctions([one.drawn(n_draws) for one in components], rows)

    def export(
        self,
        path: str | Path,
        inputs: Any = None,
        *,
        n_draws: int | None = None,
        levels: Sequence[float] = LEVELS,
        distil: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Write the predictive distribution to a file that other programs run.

        The graph is that of `to_module`. The metadata of the file name method, likelihood and
        levels as JSON, and the distance of a distilled network.

        Args:
            path: a file .onnx (ONNX; needs the extra "onnx") or .pt2 (`torch.export.load`).
            inputs: as for `to_module`.
            n_draws: number of draws, all by default.
            levels: of the quantiles.
            distil: as for `to_module`.
            overwrite: replace an existing file.

        Raises:
            ImportError: ONNX without the packages onnx and onnxscript.
            InputError: as `to_module`; another ending, an existing file, or an operator that ONNX
                does not have.

        Example:
            >>> import torch, subbayes
            >>> model = subbayes.baselines.point_estimate(torch.nn.Linear(2, 3), "categorical")
            >>> file = model.export("model.pt2", torch.zeros(1, 2))
            >>> sorted(torch.export.load(file).module()(torch.ones(1, 2)))
            ['entropy', 'mutual_information', 'probabilities']
        """
        options: dict[str, Any] = {"n_draws": n_draws, "levels": levels, "distil": distil}
        module, rows = self.predictive_module(inputs, **options)
        facts = {"method": self.label, **module.facts}
        return write_graph(module, rows, path, facts, overwrite=overwrite)

    def _some_rows(self) -> Any:
        """A few rows that the network takes, if they are known."""
        settings = getattr(self._parts()[0].template, "settings", {})
        features = settings.get("features")
        size = features["columns"] if features else settings.get("n_inputs")
        return None if size is None else torch.zeros(3, size)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Tensors to save, by name."""

    @abstractmethod
    def facts(self) -> Any:
        """Everything else to save, as JSON values."""

    def describe(self) -> dict[str, str]:
        """Descriptions of network, likelihood and method."""
        network, likelihood = self._parts()
        return {
            "network": describe_network(network),
            "likelihood": describe_likelihood(likelihood),
            "method": self.label,
        }

    def fit_summary(self) -> dict[str, Any]:
        """Numbers of the fit by name, as the command line prints them."""
        return {"method": self.label, "networks": self.default_draws}

    @property
    def predicts_together(self) -> bool:
        """Whether all processes have to predict the same rows, which none can do alone."""
        return False

    def _parts(self) -> tuple[Network, Likelihood]:
        return self.network, self.likelihood

    def evaluate(
        self,
        inputs: Any,
        y: Any = None,
        level: float = 0.95,
        *,
        ordered: bool = False,
        **options: Any,
    ) -> dict[str, float]:
        """Scores of the predictions on data with known targets; see `metrics.score`.

        Args:
            inputs: in the form the module takes; without `y`, data with their targets as `fit`
                takes them: a loader or a dataset of pairs (inputs, targets), a pair, a dict with
                "labels" or `Data`, whose rows count as often as their weights say.
            y: the targets; by default those of the data. Of `Data` with sharded rows,
                the scores are those of all rows, in all processes.
            level: probability of the interval whose coverage is reported.
            ordered: rows are in the order of time: test whether the coverage has left its band.
            options: arguments of `predict`, such as `n_draws`.

        Raises:
            InputError: no targets, or inputs and targets that do not fit the model.

        Example:
            >>> import subbayes, torch
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> rows = TensorDataset(torch.zeros(5, 2), torch.arange(5) % 3)
            >>> model = subbayes.baselines.point_estimate(torch.nn.Linear(2, 3), "categorical")
            >>> model.evaluate(DataLoader(rows)) == model.evaluate(*rows.tensors)
            True
        """
        weights = None
        if y is None:
            data = _data_with_targets(inputs)
            _check_noise(data, self._parts()[1], options)
            if ordered and (data.division is not None or self._parts()[1].per_position):
                fail("ordered", "False for sharded rows and for tokens", "True")
            if data.division is not None:
                return self._evaluate_divided(exchanged(data), level, options)
            network, likelihood = self._parts()
            if likelihood.per_position:
                check_decoder_inputs(network.output, data.first()[0])
                if not data.in_memory:
                    return self._evaluate_tokens(data, likelihood, options)
            inputs, parts = _parts_to_score(data, likelihood)
            y, weights = parts.values, parts.weights
            options |= {} if parts.noise is None else {"noise": parts.noise}
        elif isinstance(y, Tensor):
            network, likelihood = self._parts()
            if likelihood.per_position:
                check_decoder_inputs(network.output, inputs)
            check_padding(likelihood, inputs, y)
        predictive = self.predict(inputs, **options)
        return metrics.score(predictive, y, level, _as_numbers(weights), ordered)

    @override
    def rows_and_targets(self, rows: Any, y: Any = None) -> tuple[Any, Any]:
        if y is not None:
            return rows, y
        data = _data_with_targets(rows)
        if data.division is not None or data.has_weights:
            got = "rows with weights" if data.has_weights else "sharded rows"
            fail("rows", "all rows in this process, without weights", got)
        inputs, parts = _parts_to_score(data, self._parts()[1])
        if parts.noise is not None:
            expected = "targets without noise scales"
            fail("rows", expected, "both", "Pass rows, y and noise= apart")
        return inputs, parts.values

    def _evaluate_tokens(
        self, data: Data, likelihood: Likelihood, options: dict[str, Any]
    ) -> dict[str, float]:
        """Scores of the labels of positions, batch by batch, which may differ in length."""

        def parts() -> Iterator[TokenScores]:
            for inputs, y in data.batches():
                check_padding(likelihood, inputs, y)
                part = split_targets(y, data.has_weights)
                yield TokenScores.of(self.predict(inputs, **options), part.values, part.counts)

        return TokenScores.joined(parts()).scores()

    def _evaluate_divided(
        self, data: Data, level: float, options: dict[str, Any]
    ) -> dict[str, float]:
        """Scores of rows of which each process has some: predictions are gathered."""
        if self.predicts_together:
            got = "sharded rows"
            fail("inputs", "all rows in each process, for predictions by all processes", got)
        own = self._parts()[1]
        predictive, (inputs, parts) = None, _parts_to_score(data, own)
        y, noise, weights = (
            None if part is None else part.cpu()
            for part in (parts.values, parts.noise, parts.weights)
        )
        known = {} if noise is None else {"noise": noise}
        if self._parts()[0].is_sharded:
            inputs, rows = _as_many_rows(data)
            all_rows = self.predict(inputs, **options | take(known, rows))
            if data.n:
                predictive = Predictive(all_rows.outputs[:, : data.n], all_rows.likelihood)
        elif data.n:
            predictive = self.predict(inputs, **options | known)
        each = gathered(data, (predictive, y, noise, weights))
        found, targets, noises, counts = zip(
            *(part for part in each if part[0] is not None), strict=True
        )
        likelihood = found[0].likelihood
        if noise is not None:
            scales = torch.cat(noises)
            likelihood = with_noise(own, scales, len(scales))
        if len({part.outputs.shape[-1] for part in found}) > 1:
            fail("inputs", "rows with as many outputs in all processes", "sequences of others")
        whole = type(found[0]).joined(found, likelihood)
        every_target = join_targets(targets, ignored_label(own))
        every_weight = None if weights is None else torch.cat(counts)
        return metrics.score(whole, every_target, level, _as_numbers(every_weight))

    def out_of_distribution(
        self, inputs: Any, others: Any, **options: Any
    ) -> dict[str, dict[str, float]]:
        """How well the uncertainty detects inputs that are unlike the training data.

        Args:
            inputs: like the training data, but not trained on.
            others: inputs from elsewhere.
            options: arguments of `predict`, such as `n_draws`.

        Returns:
            AUROC, average precision and false positive rate of each score of uncertainty; see
            `subbayes.diagnostics.out_of_distribution`.
        """
        return out_of_distribution(self.predict(inputs, **options), self.predict(others, **options))

    def update(self, new_rows: Any, *, forgetting: float = 1.0, seed: int = 0) -> Any:
        """The model after new rows, for which its posterior is the prior; see `FittedModel.update`.

        Args:
            new_rows: (inputs, y), a loader, a dataset or `Data`.
            forgetting: power of the likelihood of all earlier rows.
            seed: of resampling and draws.

        Raises:
            InputError: a model that is no posterior of `fit`.
        """
        del new_rows, forgetting, seed
        fail("model", "a posterior of fit, to update", self.label, "Refit on all rows")

    @property
    def updates(self) -> list[Update]:
        """What each `update` was, the last one at the end."""
        return []

    def warnings(self) -> list[str]:
        """Problems of the run, each with a remedy; empty if there are none."""
        return []

    def save(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        scores: Mapping[str, float] | None = None,
    ) -> Path:
        """Save as a folder of safetensors and JSON, without pickle; `subbayes.load` opens it.

        In the folder of an adapter of peft it is saved in the subfolder `subbayes`, with a model
        card in `README.md`, or `MODEL_CARD.md` if that exists; other files are left alone.

        Args:
            path: the folder.
            overwrite: replace an existing artifact.
            scores: of `evaluate`, for the model card.

        Raises:
            InputError: the path is taken (pass `overwrite=True`), or cannot be written.
        """
        return save(self, path, overwrite=overwrite, card=lambda: self.card(scores))

    def card(self, scores: Mapping[str, float] | None = None) -> str:
        """A model card in Markdown: what the model is, its scores, and how to load it."""
        return model_card(self.describe(), self.fit_summary(), scores or {})


class Members(Predictor):
    """A mixture of models with one likelihood, saved as these."""

    members: tuple[Any, ...]

    @property
    def network(self) -> Any:
        """The network of the first member."""
        return self.members[0].network

    @property
    def likelihood(self) -> Any:
        """p(y | f), of all members."""
        return self.members[0].likelihood

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Those of each member, under its number."""
        each = [add_prefix(str(m), member.tensors()) for m, member in enumerate(self.members)]
        return {name: tensor for tensors in each for name, tensor in tensors.items()}


def _as_many_rows(data: Data) -> tuple[Any, Int[Tensor, "_"]]:
    """Inputs of as many rows in each process, the last one repeated, and the rows that they are.

    Sharded weights need the same calls in all processes.
    """
    assert data.division is not None
    rows = torch.arange(max(data.division.shares)).clamp(max=max(data.n - 1, 0))
    if not data.n:
        return take(data.first()[0], rows), rows
    batches = [x for x, _ in data.batches()]
    if len(set(map(row_kind, batches))) > 1:
        fail("inputs", "batches padded to one length", "batches of several", "Pad all rows alike")
    return take(concatenate(batches), rows), rows


def _parts_to_score(data: Data, likelihood: Likelihood) -> tuple[Any, TargetParts]:
    """Inputs, and the parts of their targets; the padding is checked."""
    parts = split_targets(checked_targets(likelihood, data), data.has_weights)
    return data.inputs if data.in_memory else data.loader, parts


def _as_numbers(weights: Tensor | None) -> RowNumbers | None:
    return None if weights is None else weights.double().cpu().numpy()


def _check_noise(data: Data, likelihood: Likelihood, options: dict[str, Any]) -> None:
    """Check that noise scales are not given twice."""
    if options.get("noise") is not None and likelihood.takes_noise:
        expected = "only those that come with the targets of the data"
        fail("noise", expected, "others too", "Leave noise out, or pass evaluate(inputs, y, ...)")


def _data_with_targets(data: Any) -> Data:
    """Data to score, with targets of their own."""
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    labelled = isinstance(data, Mapping) and "labels" in data
    if not (pair or labelled or is_list_of_dicts(data)) and not isinstance(
        data, (Data, DataLoader, Dataset)
    ):
        fail(
            "y",
            "the targets of the rows to score",
            None,
            "Pass evaluate(inputs, y), or a loader or dataset of pairs (inputs, y)",
        )
    return data if isinstance(data, Data) else Data.of(data, "inputs")
