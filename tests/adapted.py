"""Small models of transformers with adapters of peft, made from configurations, and their data."""

import functools

import pytest

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from peft import TaskType  # noqa: E402

WORDS, LENGTH, N = 20, 6, 14
SIZES = dict(vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=2, max_position_embeddings=32, pad_token_id=0)  # fmt: skip

ADAPTERS = {
    "lora": lambda task: peft.LoraConfig(
        task_type=task, r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1
    ),
    "ia3": lambda task: peft.IA3Config(
        task_type=task, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "vera": lambda task: peft.VeraConfig(task_type=task, r=4, target_modules=["q_proj", "v_proj"]),
    "loha": lambda task: peft.LoHaConfig(
        task_type=task, r=2, alpha=2, target_modules=["q_proj", "v_proj"]
    ),
}


@functools.cache
def _base(head, dtype, **changes):
    config = transformers.LlamaConfig(**SIZES | changes, num_labels=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"LlamaFor{head}")(config).to(dtype).eval()


def base_model(head="CausalLM", dtype=torch.float64, **changes):
    """A fresh copy of a small Llama, with the same weights each time."""
    import copy

    return copy.deepcopy(_base(head, dtype, **changes))


def adapted(kind="lora", head="CausalLM", dtype=torch.float64, seed=1, **changes):
    """The model with adapters that have an effect."""
    task = TaskType.CAUSAL_LM if head == "CausalLM" else TaskType.SEQ_CLS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(
            base_model(head, dtype, **changes), ADAPTERS[kind](task), autocast_adapter_dtype=False
        )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "modules_to_save" not in name:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def rows(n=N, seed=0):
    """Token ids with padding on the right, their mask, and labels of tokens and of rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (n, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < 3 + torch.arange(n)[:, None] % (LENGTH - 2)).long()
    tokens = torch.where(mask.bool(), ids, -100)
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    return inputs, tokens, torch.arange(n) % 3
