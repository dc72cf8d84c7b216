"""Adapters of a fine-tuned language model: one density beside one forward pass, and its memory.

The model is a Llama of 374 million weights, made from its configuration with random values in
bfloat16, with LoRA of rank 8 on queries and values by the library peft, and a sparse random
subspace of 50 coordinates of the adapters. The plain forward pass is that of the model of peft over
the same batch. Memory is the peak of a process that makes the model and evaluates the density,
against that of one that makes the model and calls it. Needs the extra `adapters`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness import bar, in_turns, peak_memory, processor_seconds, summary, versions
from subbayes import Network, Posterior
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.subspace import SparseRandomSubspace

CHAINS, COORDINATES, RANK = 8, 50, 8
ONE, MANY, MEMORY = 1.15, 8 * 1.1, 1.15  # times the plain forward pass


@dataclass(frozen=True)
class Size:
    """A model and a batch.

    Attributes:
        width: of the hidden states.
        inner: width of the feed-forward layers.
        layers: number of layers.
        words: size of the vocabulary.
        rows: rows of the batch.
        length: tokens of a row.
        rounds: number of measurements.
    """

    width: int = 1024
    inner: int = 2816
    layers: int = 24
    words: int = 32000
    rows: int = 2
    length: int = 32
    rounds: int = 5


LARGE, SMALL = Size(), Size(128, 352, 4, 4000, 4, 32, 5)


def made(size: Size) -> tuple[Any, dict[str, Any]]:
    """The model with its adapters, and a batch with labels."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.words,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    base = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=16, target_modules=["q_proj", "v_proj"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, lora).eval()
    ids = torch.randint(1, size.words, (size.rows, size.length))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def plain(model: Any, batch: dict[str, Any]) -> None:
    """One forward pass without labels."""
    with torch.no_grad():
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


def density(model: Any, batch: dict[str, Any]) -> Posterior:
    """The posterior over a sparse random subspace, the default for adapters."""
    network = Network(model, "adapters", TokenOutputs())
    space = SparseRandomSubspace(network.weights, COORDINATES, seed=0)
    return Posterior(network, "causal-lm", batch, space)


def points(chains: int) -> Any:
    """Coordinates of some chains."""
    return np.random.default_rng(0).standard_normal((chains, COORDINATES))


def use_memory(name: str, quick: bool) -> None:
    """What a process of its own does: "plain", "one" or "many" (chains)."""
    model, batch = made(SMALL if quick else LARGE)
    plain(model, batch)
    if name != "plain":
        density(model, batch).value(points(1 if name == "one" else CHAINS))


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure; see the module's text."""
    del data_dir
    size = SMALL if quick else LARGE
    try:
        model, batch = made(size)
    except ImportError as error:
        say(f"{error}: install the extra subbayes[adapters]")
        missing = bar(f"adapters ({error.name} is not installed)", 0.0, 1.0)
        return {"missing": str(error)}, [missing]
    bytes_of = sum(p.nbytes for p in model.parameters())
    weights = sum(p.numel() for p in model.parameters())
    posterior = density(model, batch)
    say(f"{weights / 1e6:.0f} million weights, {bytes_of / 2**20:.0f} MiB; {posterior.network!r}")
    own = {id(p): p.data_ptr() for p in model.parameters() if not p.requires_grad}
    copied = set(own.values()) - {t.data_ptr() for t in posterior.network.frozen.values()}
    cases = {
        "plain": partial(plain, model, batch),
        "one": partial(posterior.value, points(1)),
        "many": partial(posterior.value, points(CHAINS)),
    }
    for work in cases.values():
        work()
    timed = in_turns({n: partial(processor_seconds, w) for n, w in cases.items()}, size.rounds)
    del model, posterior, cases
    code = "from benchmarks.adapters import use_memory; use_memory({!r}, {!r})"
    memory = {name: peak_memory(code.format(name, quick)) for name in ("plain", "one", "many")}
    seconds = {name: summary(values) for name, values in timed.items()}
    middle = {name: value["median"] for name, value in seconds.items()}
    for name in memory:
        say(f"{name:6s} {middle[name]:8.3f} s  {memory[name]:8.0f} MiB")
    which = "a small model" if quick else "350 million weights"
    bars = [
        bar(f"{which}: one chain / forward pass", middle["one"] / middle["plain"], ONE, "lower"),
        bar(f"{which}: 8 chains / forward pass", middle["many"] / middle["plain"], MANY, "lower"),
        bar(f"{which}: peak memory, one chain / forward pass", memory["one"] / memory["plain"],
            MEMORY, "lower"),
        bar(f"{which}: frozen parameters that are copied", len(copied), 0, "lower"),
    ]  # fmt: skip
    results = {
        "weights": weights,
        "model_mib": bytes_of / 2**20,
        "adapter_weights": posterior_size(size),
        "seconds": seconds,
        "peak_mib": memory,
        "peers": versions("peft", "transformers"),
    }
    return results, bars


def posterior_size(size: Size) -> int:
    """Weights of the adapters: A and B of two square projections in each layer."""
    return size.layers * 2 * 2 * RANK * size.width
