"""Initial values of adapters, against a new model of peft."""

import copy
import warnings

import adapted
import pytest
import torch
from adapted import peft

import subbayes
from subbayes import InputError, Sampling, Training
from subbayes.networks.initialisation import reinitialise

TASK = dict(task_type="CAUSAL_LM")
Q = dict(**TASK, target_modules=["q_proj"])
KINDS = {
    "lora": lambda: peft.LoraConfig(r=2, **Q),
    "lora of embeddings": lambda: peft.LoraConfig(r=2, **TASK, target_modules=["embed_tokens"]),
    "gaussian": lambda: peft.LoraConfig(r=2, init_lora_weights="gaussian", **Q),
}


def made(config, moved=True):
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = peft.get_peft_model(
            adapted.base_model(dtype=torch.float32), config(), autocast_adapter_dtype=False
        )
        for parameter in model.parameters() if moved else ():
            if parameter.requires_grad:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def outputs(model):
    with torch.no_grad():
        return model(**adapted.rows()[0]).logits


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_begin_as_new_ones(kind):
    trained = made(KINDS[kind])
    before = copy.deepcopy(trained.state_dict())
    other = reinitialise(trained, 0)
    torch.testing.assert_close(outputs(other), outputs(made(KINDS[kind], moved=False)))
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in trained.named_parameters()]
    assert all(torch.equal(t, before[n]) for n, t in trained.state_dict().items())


@pytest.mark.parametrize("initial", ["pissa", "olora"])
def test_initial_values_from_the_base_model_are_refused(initial):
    model = made(lambda: peft.LoraConfig(r=2, init_lora_weights=initial, **Q))
    with pytest.raises(InputError, match=f"init_lora_weights='{initial}'.*factory="):
        reinitialise(model, 0)


def test_other_kinds_are_refused():
    with pytest.raises(InputError, match="LoRA, whose initial values are known.*factory="):
        reinitialise(made(lambda: peft.IA3Config(**Q, feedforward_modules=[])), 0)


def test_members_of_an_ensemble_begin_with_new_adapters():
    inputs, tokens, _ = adapted.rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few draws
        fitted = subbayes.fit(
            made(KINDS["lora"]),
            {**inputs, "labels": tokens},
            likelihood="causal-lm",
            parameters="adapters",
            subspace="random",
            inference="elliptical-slice",
            training=Training(epochs=1, swa_epochs=0),
            sampling=Sampling(draws=2, chains=2, warmup=2, progress=False, initial="ensemble"),
        )
    assert fitted.draws.n_chains == 2


class Whole(torch.nn.Module):
    """A module whose `reset_parameters` sets all parameters in it."""

    def __init__(self):
        super().__init__()
        self.back, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

    def reset_parameters(self):
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)

    def forward(self, x):
        return self.head(torch.tanh(self.back(x)))


def test_neither_a_base_model_nor_adapters_are_reset_by_the_method_of_the_model():
    base = Whole()
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["back"], r=1))
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(5, 3)
    expected = model(x)  # new adapters have no effect
    layer = model.base_model.model.back
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    moved = layer.lora_B["default"].weight.detach().clone()
    layer.lora_A["default"].weight.requires_grad_(False)  # shared with the copy, as the base is
    found = reinitialise(model, 0)
    torch.testing.assert_close(found(x), expected)
    assert torch.equal(layer.lora_B["default"].weight, moved)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) or "lora_B" in name, name
