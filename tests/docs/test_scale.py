"""The page about models of billions of weights holds the tables that its script computes."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE = ROOT / "docs" / "scale.py", ROOT / "docs" / "scale.md"


@pytest.fixture(scope="module")
def scale():
    return runpy.run_path(str(SCRIPT))


def test_the_page_has_the_tables_of_the_script(scale):
    page = PAGE.read_text()
    for name, table in scale["tables"]().items():
        assert table in page, f"run `python docs/scale.py` and copy the table {name!r}"


def test_the_script_prints_them(scale):
    out = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "\n\n".join(scale["tables"]().values())


def test_each_chain_of_divided_weights_has_traffic_of_its_own(scale):
    """8 chains of so many tokens on each GPU compute as long as they gather, one after another."""
    model, gpus, chains = scale["MODELS"][2], 8, scale["CHAINS"]
    tokens = scale["tokens_beside_traffic"](model, gpus)
    data = scale["ROWS"] * scale["LENGTH"]
    arithmetic = chains * model.forward * tokens / data / scale["GPU_FLOPS"]
    traffic = chains * 2 * model.weights * 7 / 8 / scale["LINK_BYTES"]
    assert arithmetic == pytest.approx(traffic)
    assert f"| {traffic:.3g} s |" in scale["tables"]()["traffic"]


def test_constants_are_those_of_the_benchmarks(scale):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    on_cpu, on_gpu = scale["DENSITY"]
    assert f"8 chains\n{on_cpu}, no parameter copied" in page
    assert f"{on_gpu} (bar 8.8, missed)" in page


def test_numbers_of_weights_are_those_of_the_models(scale):
    """Llama 3.2 1B, Llama 2 7B and Llama 2 70B as published."""
    assert [model.weights for model in scale["MODELS"]] == [
        1_235_814_400,
        6_738_415_616,
        68_976_648_192,
    ]


def test_numbers_of_adapter_weights_are_those_of_peft(scale):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    import torch

    for model in scale["MODELS"]:
        config = transformers.LlamaConfig(
            vocab_size=8,
            hidden_size=model.width,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=model.heads,
            num_key_value_heads=model.heads * model.keys // model.width,
        )
        with torch.device("meta"):
            base = transformers.LlamaForCausalLM(config)
            lora = peft.LoraConfig(r=scale["RANK"], target_modules=["q_proj", "v_proj"])
            adapted = peft.get_peft_model(base, lora)
        found = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert model.layers * found == model.adapters


def test_bytes_of_the_subspaces_are_those_that_they_store(scale):
    """Of each weight, beside the centre."""
    import torch

    from subbayes.subspace import RandomSubspace, SparseRandomSubspace
    from subbayes.utils.memory import index_dtype

    model, k = scale["MODELS"][0], scale["COORDINATES"]
    rows = scale["memory_of_methods"](model)
    alike = {
        "adapters, random subspace": (RandomSubspace, model.adapters),
        "adapters, sparse random subspace": (SparseRandomSubspace, model.adapters),
    }
    for name, (kind, D) in alike.items():
        space = kind(torch.zeros(1000), k)
        stored = {id(t): t for t in vars(space).values() if isinstance(t, torch.Tensor)}
        own = sum(t.nbytes for t in stored.values()) - space.shift.nbytes
        if kind is SparseRandomSubspace:  # two indices of 4 bytes, but of 8 with torch 2.7
            own -= 2 * 1000 * (index_dtype(1000).itemsize - 4)
        shared = (1 + scale["CHAINS"]) * scale["SINGLE"]
        assert own / 1000 == pytest.approx(rows[name] / D - shared)
