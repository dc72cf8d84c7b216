"""Memory, arithmetic and traffic for language models of 1 to 70 billion weights on 1 to 64 GPUs.

`python docs/scale.py` prints the tables of `docs/scale.md`; a test compares them. Nothing here is
measured on such machines: the tables follow from the shapes of the models, the formulas below, and
constants that benchmarks measured on small ones, on a CPU and on an H100.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Measured, see docs/benchmarks.md.
DENSITY = 7.95, 13.9  # forward passes of a density of 8 chains: CPU (`adapters`), H100 (`gpu`)
EVALUATIONS = 8  # of the density, for a draw of elliptical slice sampling (`ess`)
NORMALS = 1e8  # normal numbers that NumPy draws in a second, about

# What is computed for.
ROWS, LENGTH = 1000, 512  # of the data, and tokens of each
CHAINS, COORDINATES, RANK = 8, 50, 8
STEPS = 10  # gradients of a draw of HMC
DRAWS, SELECTED, CLASSES = 1000, 1000, 10

# The machine: an accelerator of 80 GB at 40 % of 989 TFLOP/s in bfloat16, 50 GB/s to the others.
GPU_BYTES, GPU_FLOPS, LINK_BYTES = 80e9, 0.4 * 989e12, 50e9
GPUS = (1, 8, 64)
STORED, SINGLE, DOUBLE, INDEX = 2, 4, 8, 4  # bytes of bfloat16, float32, float64, int32


@dataclass(frozen=True)
class Model:
    """Shapes of a language model of the architecture of Llama.

    Attributes:
        name: of the column in the tables.
        width: of the hidden states.
        inner: width of the feed-forward layers.
        layers: number of layers.
        keys: width of the keys and values of all heads.
        heads: number of heads.
        words: size of the vocabulary.
        tied: whether the embedding is the matrix of the last layer too.
    """

    name: str
    width: int
    inner: int
    layers: int
    keys: int
    heads: int
    words: int
    tied: bool = False

    @property
    def weights(self) -> int:
        """Number of weights W."""
        attention = 2 * self.width * (self.width + self.keys)
        layer = attention + 3 * self.width * self.inner + 2 * self.width
        return self.layers * layer + self.width + (2 - self.tied) * self.words * self.width

    @property
    def adapters(self) -> int:
        """Number of weights D of LoRA on queries and values."""
        return self.layers * RANK * (3 * self.width + self.keys)

    @property
    def forward(self) -> float:
        """Operations of a forward pass over all data: two for each weight, and attention."""
        attention = 4 * LENGTH * self.width * self.layers
        embedding = 0 if self.tied else self.words * self.width  # is looked up
        return ROWS * LENGTH * (2 * (self.weights - embedding) + attention)

    @property
    def row(self) -> float:
        """Bytes of the activations of a row in a forward pass: logits and their log-softmax."""
        return LENGTH * (self.words * (STORED + 2 * SINGLE) + 4 * self.inner * STORED)

    @property
    def row_with_gradient(self) -> float:
        """The same with what backward needs (Korthikanti et al. 2022, equation 1)."""
        layer = 34 * LENGTH * self.width + 5 * self.heads * LENGTH**2
        return self.row + self.layers * layer


MODELS = (
    Model("1 billion", 2048, 8192, 16, 512, 32, 128_256, tied=True),
    Model("7 billion", 4096, 11_008, 32, 4096, 32, 32_000),
    Model("70 billion", 8192, 28_672, 80, 1024, 64, 32_000),
)


def memory_of_methods(model: Model) -> dict[str, float]:
    """Bytes by method, beside the weights of the model and the activations."""
    W, D, k = model.weights, model.adapters, COORDINATES
    centre_and_chains = (1 + CHAINS) * SINGLE
    factors = model.layers * (3 * model.width**2 + model.keys**2 + 4 * RANK**2)
    return {
        "all weights, random subspace": (2 * SINGLE + SINGLE * k) * W,
        "all weights, sparse random subspace": (2 * SINGLE + SINGLE + 2 * INDEX) * W,
        "adapters, random subspace": (centre_and_chains + SINGLE * k) * D,
        "adapters, sparse random subspace": (centre_and_chains + SINGLE + 2 * INDEX) * D,
        "adapters, subnetwork of 1000": centre_and_chains * D + DOUBLE * (D + SELECTED**2),
        "adapters, linearised Laplace, KFAC": DOUBLE * (factors + D),
        "adapters, linearised Laplace, 64 draws": 64 * SINGLE * D,
        "head of 10 classes, KFAC": DOUBLE * (model.width**2 + CLASSES**2),
        "head of 10 classes, exact": DOUBLE * (model.width * CLASSES) ** 2,
    }


def seconds_of_pass(model: Model, gpus: int) -> float:
    """Seconds of a forward pass over all data whose rows are divided among GPUs."""
    return model.forward / (gpus * GPU_FLOPS)


def gathered_bytes(model: Model, gpus: int) -> float:
    """Bytes that each GPU receives in a pass of one chain, if GPUs divide the weights."""
    return STORED * model.weights * (gpus - 1) / gpus


def tokens_beside_traffic(model: Model, gpus: int) -> float:
    """Tokens of each GPU whose arithmetic takes as long as the traffic of a pass of one chain.

    Chains of divided weights are evaluated one after another, each with passes of its own.
    """
    seconds_of_token = model.forward / (ROWS * LENGTH) / GPU_FLOPS
    return gathered_bytes(model, gpus) / LINK_BYTES / seconds_of_token


# --- tables ---------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """The tables by name, in Markdown."""
    return {
        "models": _table("", _models()),
        "memory": _table("bytes of", _memory()),
        "arithmetic": _table("", _arithmetic()),
        "traffic": _table("", _traffic()),
    }


def _models() -> Iterator[tuple[str, list[str]]]:
    yield "weights W", [_count(m.weights) for m in MODELS]
    yield "adapter weights D", [_count(m.adapters) for m in MODELS]
    yield "weights in bfloat16", [_bytes(STORED * m.weights) for m in MODELS]
    yield "activations of a row, density", [_bytes(m.row) for m in MODELS]
    yield "activations of a row, gradient", [_bytes(m.row_with_gradient) for m in MODELS]
    yield (
        "GPUs that hold the weights and a row with its gradient",
        [str(int(-(-(STORED * m.weights + m.row_with_gradient) // GPU_BYTES))) for m in MODELS],
    )


def _memory() -> Iterator[tuple[str, list[str]]]:
    for name in memory_of_methods(MODELS[0]):
        yield name, [_bytes(memory_of_methods(m)[name]) for m in MODELS]


def _arithmetic() -> Iterator[tuple[str, list[str]]]:
    yield "forward pass over the data", [f"{m.forward / 1e15:.3g} PFLOP" for m in MODELS]
    for gpus in GPUS:
        plural = "GPU" if gpus == 1 else "GPUs"
        yield (
            f"density of {CHAINS} chains, {gpus} {plural}",
            [
                _range(seconds_of_pass(m, gpus)) if _fits(m, gpus) else "does not fit"
                for m in MODELS
            ],
        )
    gpus = GPUS[-1]
    evaluations = {
        f"{DRAWS} draws, elliptical slice": EVALUATIONS,
        f"{DRAWS} draws, HMC, adapters": 2 * STEPS,
        f"{DRAWS} draws, HMC, all weights": 3 * STEPS,
    }
    for name, passes in evaluations.items():
        yield (
            f"{name}, {gpus} GPUs",
            [_range(DRAWS * passes * seconds_of_pass(m, gpus)) for m in MODELS],
        )
    yield (
        "sparse random subspace of all weights: a look-up",
        [_seconds(m.weights * (INDEX + 3 * SINGLE) / 2e12) for m in MODELS],
    )
    yield (
        "random subspace of all weights: numbers of the basis",
        [_seconds(COORDINATES * m.weights / NORMALS) for m in MODELS],
    )


def _fits(model: Model, gpus: int) -> bool:
    return STORED * model.weights / gpus + model.row_with_gradient <= GPU_BYTES


def _traffic() -> Iterator[tuple[str, list[str]]]:
    each = 32 * (COORDINATES + 1) + 8 / CHAINS  # 673 for k = 20, as measured by `distributed`
    yield "rows divided: bytes of an evaluation, each chain", [_bytes(each) for _ in MODELS]
    for gpus in GPUS[1:]:
        name = f"weights divided among {gpus}:"
        gathered = [gathered_bytes(m, gpus) for m in MODELS]
        yield f"{name} bytes of a pass, each GPU", [_bytes(b) for b in gathered]
        yield (
            f"{name} seconds for them, {CHAINS} chains",
            [_seconds(CHAINS * b / LINK_BYTES) for b in gathered],
        )
        yield (
            f"{name} tokens of each GPU whose arithmetic takes as long",
            [_count(tokens_beside_traffic(m, gpus)) for m in MODELS],
        )


def _table(corner: str, rows: Iterator[tuple[str, list[str]]]) -> str:
    head = [corner, *(model.name for model in MODELS)]
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _count(number: float) -> str:
    for unit in ("", " thousand", " million"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} billion"


def _range(seconds: float) -> str:
    """The time of a density by that of a pass: as on a CPU, and as on an H100."""
    return " to ".join(_seconds(seconds * passes) for passes in DENSITY)


def _seconds(seconds: float) -> str:
    for unit, length in (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if seconds < 100 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"


if __name__ == "__main__":
    print("\n\n".join(tables().values()))
