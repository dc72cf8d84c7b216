"""One table of cases, network x likelihood x data x dtype, and the naive version of each.

A test parametrised over `CASES` builds what it needs with `case.build()`; the reference
log-densities of `reference_log_prob` come from SciPy and know nothing of the library.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from subbayes import Network, Posterior, Training
from subbayes.data.data import Data
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Standardized,
)
from subbayes.sparse.configuration import SparseTraining
from subbayes.subspace import FullSubspace, RandomSubspace
from subbayes.utils.trees import n_rows

N = 7

PLAIN = Training(epochs=200, learning_rate=1e-3, clip_norm=None, swa_epochs=20, max_snapshots=20)


def training_options(**given: Any) -> dict[str, Any]:
    """Arguments of training functions: fields of `Training` in one object, the others as given."""
    fields = {
        name: given.pop(name)
        for name in list(given)
        if name in Training.__dataclass_fields__
        and (name != "validation" or isinstance(given[name], float))
    }
    return given | {"training": replace(PLAIN, **fields)}


def sparse_options(**given: Any) -> dict[str, Any]:
    """Arguments of `sparse.fit`: fields of `SparseTraining` in one object, the others as given."""
    names = [name for name in given if name in SparseTraining.__dataclass_fields__]
    training = SparseTraining(**{name: given.pop(name) for name in names})
    return given | {"training": training}


# --- networks: module with C outputs, and inputs it takes ---------------------------------------


def mlp(c: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, c))


def with_dropout(c: int) -> nn.Module:
    """Left in training mode, as people do."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, c)).train()


def weight_normed(c: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(4, c))
    )


class CNN(nn.Module):
    """Convolution and BatchNorm with statistics that are not the initial ones."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.head = nn.Linear(2, c)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Attention(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0][:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], c: int) -> None:
        super().__init__()
        self.cell, self.head = kind(2, 3, batch_first=True), nn.Linear(3, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class TwoInputs(nn.Module):
    """Numbers and categories, by name or by position."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 2), nn.Linear(4, c)

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        return self.head(torch.cat([numbers, self.embedding(codes)], -1))


class ModelOutput(OrderedDict):  # what transformers models return
    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class LanguageModelLike(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.body = mlp(c)

    def forward(self, x: Tensor) -> ModelOutput:
        return ModelOutput(loss=None, logits=self.body(x))


class Tied(nn.Module):
    """Two layers share one weight."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Squeezed(nn.Module):
    """Drops every dimension of size one, the batch's too."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.body = mlp(c)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze()


class Branching(nn.Module):
    """Control flow on its own weights: no vectorised version, no single graph."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, c)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = torch.tanh(hidden) if self.first.weight.sum() > 0 else torch.sin(hidden)
        return self.head(hidden)


class Tokens(nn.Module):
    """Takes the rows of a linear layer together again with a view."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 2), nn.Linear(4, c)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        return self.head(self.embed(torch.cat([x, x.sin()], 1).view(2 * n, 3)).view(n, 4))


class Scaled(nn.Module):
    """Adds a weight to its input in place."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.offset, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, c)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x += self.offset
        return self.head(x)


def frozen_first(c: int) -> nn.Module:
    module = mlp(c)
    module[0].requires_grad_(False)
    return module


def features(rng: np.random.Generator, n: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=(n, 3)))


def images(rng: np.random.Generator, n: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=(n, 1, 5, 5)))


def sequences(width: int) -> Callable[[np.random.Generator, int], Tensor]:
    return lambda rng, n: torch.from_numpy(rng.normal(size=(n, 4, width)))


def by_name(rng: np.random.Generator, n: int) -> dict[str, Tensor]:
    return {
        "numbers": torch.from_numpy(rng.normal(size=(n, 2))),
        "codes": torch.from_numpy(rng.integers(5, size=n)),
    }


def by_position(rng: np.random.Generator, n: int) -> tuple[Tensor, ...]:
    return tuple(by_name(rng, n).values())


MASKS = {"0.weight": torch.arange(12).reshape(4, 3) % 3 == 0, "2.bias": torch.tensor([True])}


@dataclass(frozen=True)
class Architecture:
    module: Callable[[int], nn.Module]
    inputs: Callable[[np.random.Generator, int], Any] = features
    options: dict[str, Any] = field(default_factory=dict)
    vmaps: bool = True


NETWORKS = {
    "mlp": Architecture(mlp),
    "dropout": Architecture(with_dropout),
    "weight-norm": Architecture(weight_normed),
    "cnn": Architecture(CNN, images),
    "transformer": Architecture(Transformer, sequences(4)),
    "attention": Architecture(Attention, sequences(4)),
    "gru": Architecture(lambda c: Recurrent(nn.GRU, c), sequences(2), vmaps=False),
    "lstm": Architecture(lambda c: Recurrent(nn.LSTM, c), sequences(2), vmaps=False),
    "dict": Architecture(TwoInputs, by_name),
    "tuple": Architecture(TwoInputs, by_position),
    "output": Architecture(LanguageModelLike, options={"output": lambda out: out.logits}),
    "tied": Architecture(Tied),
    "squeezed": Architecture(Squeezed),
    "tokens": Architecture(Tokens),
    "in-place": Architecture(Scaled, vmaps=False),
    "branching": Architecture(Branching, vmaps=False),
    "frozen": Architecture(frozen_first),
    "masked": Architecture(mlp, options={"parameters": MASKS}),
    "last-layer": Architecture(mlp, options={"parameters": "last-layer"}),
    "pattern": Architecture(mlp, options={"parameters": ["0.*", "*.bias"]}),
    "chosen": Architecture(mlp, options={"parameters": lambda name, p: p.ndim == 2}),
}

# --- likelihoods: what they are, targets they take, outputs they need ---------------------------


@dataclass(frozen=True)
class Noise:
    likelihood: Likelihood
    targets: Callable[[np.random.Generator, int], Any]
    n_outputs: int


def real(rng: np.random.Generator, n: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=n))


def real_pairs(rng: np.random.Generator, n: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=(n, 2)))


def with_scales(rng: np.random.Generator, n: int) -> tuple[Tensor, Tensor]:
    return real(rng, n), torch.from_numpy(rng.uniform(0.5, 2, size=n))


def large(rng: np.random.Generator, n: int) -> Tensor:
    return 300 + 50 * real(rng, n)


LIKELIHOODS = {
    "gaussian": Noise(Gaussian(noise=0.7), real, 1),
    "gaussian-2": Noise(Gaussian(noise=(0.5, 2.0)), real_pairs, 2),
    "per-observation": Noise(Gaussian(noise="per-observation"), with_scales, 1),
    "heteroscedastic": Noise(HeteroscedasticGaussian(global_variance=0.3), real, 2),
    "heteroscedastic-2": Noise(HeteroscedasticGaussian((0.3, 0.0)), real_pairs, 4),
    "categorical": Noise(
        Categorical(), lambda rng, n: torch.from_numpy(rng.permutation(np.arange(n) % 3)), 3
    ),
    "bernoulli": Noise(Bernoulli(), lambda rng, n: torch.from_numpy(rng.integers(2, size=n)), 1),
    "poisson": Noise(Poisson(), lambda rng, n: torch.from_numpy(rng.poisson(2, size=n)), 1),
    "poisson-2": Noise(Poisson(), lambda rng, n: torch.from_numpy(rng.poisson(2, size=(n, 2))), 2),
    "standardized": Noise(Standardized(Gaussian(noise=0.4), (300.0,), (50.0,)), large, 1),
    "standardized-heteroscedastic": Noise(
        Standardized(HeteroscedasticGaussian(global_variance=0.2), (300.0,), (50.0,)), large, 2
    ),
}


def _moments(likelihood: Likelihood, f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of a Gaussian y | f, written out again."""
    if isinstance(likelihood, Standardized):
        mean, std = _moments(likelihood.likelihood, f)
        scale = np.array(likelihood.scale)
        return np.array(likelihood.shift) + scale * mean, scale * std
    if isinstance(likelihood, HeteroscedasticGaussian):
        t = f.shape[-1] // 2
        variance = np.log1p(np.exp(f[..., t:])) + np.array(likelihood.global_variance)
        return f[..., :t], np.sqrt(variance)
    return f, np.broadcast_to(np.array(likelihood.noise), f.shape)


def reference(likelihood: Likelihood, f: np.ndarray) -> Any:
    """The frozen SciPy distribution of y given outputs f (..., C), targets on the last axis."""
    if isinstance(likelihood, Poisson):
        return stats.poisson(np.exp(f))
    if isinstance(likelihood, Bernoulli):
        return stats.bernoulli(1 / (1 + np.exp(-f)))
    mean, std = _moments(likelihood, f)
    return stats.norm(mean, std)


def reference_log_prob(likelihood: Likelihood, f: np.ndarray, y: Any) -> np.ndarray:
    """Log density of each row by SciPy: f (..., N, C), y as the library takes it -> (..., N)."""
    f = np.asarray(f, dtype=np.float64)
    if isinstance(likelihood, Categorical):
        p = np.exp(f) / np.exp(f).sum(-1, keepdims=True)
        return np.log(
            np.take_along_axis(p, np.broadcast_to(np.asarray(y)[:, None], (*f.shape[:-1], 1)), -1)[
                ..., 0
            ]
        )
    if isinstance(y, tuple):
        return stats.norm(f[..., 0], np.asarray(y[1])).logpdf(np.asarray(y[0]))
    column = np.asarray(y).reshape(len(y), -1)
    frozen = reference(likelihood, f)
    discrete = isinstance(likelihood, (Poisson, Bernoulli))
    return (frozen.logpmf if discrete else frozen.logpdf)(column).sum(-1)


# --- the table -----------------------------------------------------------------------------------


class Rows(Dataset):
    """The rows of tensors, tuples or dicts as (inputs, y), for a loader."""

    def __init__(self, inputs: Any, y: Any) -> None:
        self.inputs, self.y = inputs, y

    def __len__(self) -> int:
        return len(self.y if isinstance(self.y, Tensor) else self.y[0])

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return _row(self.inputs, i), _row(self.y, i)


def _row(values: Any, i: int) -> Any:
    if isinstance(values, dict):
        return {k: v[i] for k, v in values.items()}
    return tuple(v[i] for v in values) if isinstance(values, tuple) else values[i]


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in another dtype; whole numbers stay what they are."""
    if isinstance(values, dict):
        return {k: cast(v, dtype) for k, v in values.items()}
    if isinstance(values, tuple):
        return tuple(cast(v, dtype) for v in values)
    return values.to(dtype) if values.is_floating_point() else values


@dataclass(frozen=True)
class Built:
    """A case in the flesh."""

    module: nn.Module
    network: Network
    inputs: Any
    y: Any
    likelihood: Likelihood
    data: Any

    def call(self, module: nn.Module | None = None, inputs: Any = None) -> Tensor:
        """Outputs (N, C) as a user would get them from the module."""
        module = (self.module if module is None else module).eval()
        inputs = self.inputs if inputs is None else inputs
        if isinstance(inputs, dict):
            out = module(**inputs)
        else:
            out = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
        out = out if isinstance(out, Tensor) else out.logits
        return out.reshape(n_rows(inputs), -1)

    def posterior(self, **options: Any) -> Posterior:
        weights = self.network.weights
        space = (
            RandomSubspace(weights, min(4, len(weights)))
            if len(weights) > 3
            else (FullSubspace(weights))
        )
        return Posterior(self.network, self.likelihood, self.data, space, **options)


def streamed(rows: Dataset, **options: Any) -> Data:
    """Rows that are read from a loader at each evaluation."""
    return Data.of(DataLoader(rows, **options), memory_limit=0)


@dataclass(frozen=True)
class Case:
    network: str
    likelihood: str
    data: str = "memory"
    dtype: torch.dtype = torch.float64

    @property
    def name(self) -> str:
        return f"{self.network}-{self.likelihood}-{self.data}-{str(self.dtype)[6:]}"

    @property
    def vmaps(self) -> bool:
        return NETWORKS[self.network].vmaps

    @property
    def tolerance(self) -> float:
        """Relative: rounding of the dtype, times some depth."""
        return 1e-12 if self.dtype == torch.float64 else 2e-5

    def build(self, n: int = N, seed: int = 0) -> Built:
        architecture, noise = NETWORKS[self.network], LIKELIHOODS[self.likelihood]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = architecture.module(noise.n_outputs).to(self.dtype)
        rng = np.random.default_rng(seed)
        inputs = cast(architecture.inputs(rng, n), self.dtype)
        y = noise.targets(rng, n)
        data = (
            (inputs, y)
            if self.data == "memory"
            else streamed(Rows(inputs, y), batch_size=3, shuffle=self.data == "shuffled")
        )
        network = Network(module, **architecture.options)
        return Built(module, network, inputs, y, noise.likelihood, data)


CASES = [
    *(Case("mlp", name) for name in LIKELIHOODS),
    *(Case("mlp", name, dtype=torch.float32) for name in LIKELIHOODS),
    Case("mlp", "gaussian", "loader"),
    Case("mlp", "per-observation", "loader"),
    Case("mlp", "heteroscedastic", "shuffled"),
    Case("dropout", "heteroscedastic"),
    Case("weight-norm", "gaussian"),
    Case("cnn", "categorical"),
    Case("cnn", "categorical", "loader", torch.float32),
    Case("transformer", "categorical"),
    Case("transformer", "categorical", dtype=torch.float32),
    Case("attention", "bernoulli"),
    Case("gru", "poisson"),
    Case("lstm", "gaussian-2"),
    Case("dict", "bernoulli"),
    Case("dict", "poisson", "loader", torch.float32),
    Case("tuple", "heteroscedastic", "loader"),
    Case("output", "categorical"),
    Case("tied", "gaussian"),
    Case("squeezed", "gaussian"),
    Case("squeezed", "gaussian-2", "loader"),
    Case("tokens", "gaussian"),
    Case("in-place", "gaussian"),
    Case("branching", "standardized"),
    Case("frozen", "gaussian"),
    Case("masked", "per-observation"),
    Case("last-layer", "poisson"),
    Case("pattern", "standardized-heteroscedastic"),
    Case("chosen", "gaussian"),
]


def parametrize(*cases: Case) -> pytest.MarkDecorator:
    """Run a test on the given cases, or on all of the table."""
    chosen = cases or CASES
    return pytest.mark.parametrize("case", chosen, ids=[c.name for c in chosen])


def one_per_network() -> list[Case]:
    """The first case of each network."""
    return list({c.network: c for c in reversed(CASES)}.values())[::-1]


_PLACES = {
    "network": ("hidden", "activation", "dropout"),
    "training": (
        "epochs",
        "learning_rate",
        "batch_size",
        "patience",
        "validation",
        "swa_epochs",
        "swa_learning_rate",
        "prior_scale",
    ),
    "sampling": ("draws", "chains", "warmup", "seed"),
    "sparse": ("structure", "posterior", "slab", "prior_inclusion", "early_epochs"),
}


def without_equal_weights(estimator):
    """The check of scikit-learn that stochastic training does not pass."""
    reason = "the order of the minibatches depends on the number of rows"
    return {"check_sample_weight_equivalence_on_dense_data": reason}


def nested(flat=None, *, sparse=False, **more):
    """Parameters of an estimator from settings by their own names, wherever they belong."""
    flat = dict(flat or {}) | more
    found = {}
    for name, value in flat.items():
        if name == "prior_scale" and value == math.inf:
            name, value = "weight_decay", 0.0
            found.setdefault("training", {})[name] = value
            continue
        place = next((p for p, names in _PLACES.items() if name in names), None)
        if place == "sampling" and sparse:
            place = None
        if place is None:
            found[name] = value
        else:
            found.setdefault(place, {})[name] = value
    parts = {key: found.pop(key) for key in ("rank", "covariance", "scale_prior") if key in found}
    parts = {key: value for key, value in parts.items() if value is not None}
    if found.get("subspace") == "full":
        parts.pop("rank", None)
    if parts:
        from subbayes.models.settings import TableSettings

        changes = {f"subspace.{key}": value for key, value in parts.items()}
        changes["subspace"] = found.get("subspace", "pca")
        found["subspace"] = TableSettings().change(changes).subspace
    return found


def table_settings(**flat):
    """`TableSettings` from settings by their own names."""
    from subbayes.models.settings import TableSettings

    return TableSettings().change(nested(flat))
