"""Adapters as a selection, the memory of the base model, and dtypes."""

import copy
import dataclasses
import warnings

import adapted
import numpy as np
import pytest
import torch
from adapted import peft
from torch import nn

import subbayes
from subbayes import InputError, Network
from subbayes.networks.adapters.names import adapter_names
from subbayes.networks.token_outputs import TokenOutputs


@pytest.mark.parametrize("kind", adapted.ADAPTERS)
@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification"])
def test_adapters_are_what_peft_saves(kind, head):
    """Of each kind, the parameters that peft itself would save, but no head."""
    model = adapted.adapted(kind, head)
    network = Network(model, "adapters", TokenOutputs() if head == "CausalLM" else None)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert set(network.names) == {n for n in trainable if "modules_to_save" not in n}
    saved = peft.get_peft_model_state_dict(model)
    if kind != "vera":  # which saves its shared random projection too
        heads = sum(v.numel() for n, v in saved.items() if ".score." in n)
        assert network.size == sum(v.numel() for v in saved.values()) - heads
    inputs, tokens, labels = adapted.rows()
    with torch.no_grad():
        logits = model(**inputs).logits
        torch.testing.assert_close(network(network.weights, inputs), logits.flatten(1))


def test_heads_beside_adapters_are_optional():
    model = adapted.adapted("lora", "SequenceClassification")
    both = Network(model, ["adapters", "*.modules_to_save.*"])
    heads = [n for n in both.names if "modules_to_save" in n]
    assert heads == ["base_model.model.score.modules_to_save.default.weight"]
    assert set(both.names) == {n for n, p in model.named_parameters() if p.requires_grad}


def test_an_adapter_loaded_for_inference_is_found(tmp_path):
    """Nothing of such a model is trainable; a second adapter beside it is refused."""
    model = adapted.adapted()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(adapted.base_model(), tmp_path)
    assert not any(p.requires_grad for p in loaded.parameters())
    network = Network(loaded, "adapters", TokenOutputs())
    assert torch.equal(network.weights.double(), Network(model, "adapters").weights)
    loaded.load_adapter(tmp_path, "other")
    with pytest.raises(InputError, match="those in use, got 'other' too.*delete_adapter"):
        Network(loaded, "adapters")
    loaded.delete_adapter("other")
    assert Network(loaded, "adapters").names == network.names
    assert all(p.requires_grad for n, p in network.module_with().named_parameters() if "lora" in n)


class OwnLoRA(nn.Module):
    """An adapter that is not of peft."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.base(x) + self.lora_B(self.lora_A(x)))


@pytest.mark.parametrize("name", ["lora_A", "lora_down", "ia3_l", "adapters", "bottleneck_adapter"])
def test_usual_names_without_peft(name):
    module = nn.ModuleDict({"base": nn.Linear(2, 2), name: nn.Linear(2, 2)})
    found = adapter_names(module)
    assert found == [f"{name}.weight", f"{name}.bias"]


def test_adapters_of_ones_own():
    assert Network(OwnLoRA(), "adapters").names == ("lora_A.weight", "lora_B.weight")
    frozen = OwnLoRA().requires_grad_(False)
    assert Network(frozen, "adapters").names == ("lora_A.weight", "lora_B.weight")


def test_no_adapters_and_nothing_but_adapters_are_refused():
    with pytest.raises(InputError, match="adapters in the module.*none in its layers Sequential"):
        Network(nn.Sequential(nn.Linear(2, 1)), "adapters")
    with pytest.raises(InputError, match="beside the weights of a base model.*for all 2 param"):
        Network(nn.ModuleDict({"lora_A": nn.Linear(2, 1)}), "adapters")
    with pytest.raises(InputError, match="Did you mean 'adapters'"):
        Network(OwnLoRA(), "adapter")
    merged = adapted.adapted().merge_and_unload()
    with pytest.raises(InputError, match="before merging"):
        Network(merged, "adapters")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


def tied_language_model():
    return adapted.base_model(tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        (Attention, {"target_modules": ["attention"]}, r"those of nn\.MultiheadAttention, which"),
        (
            adapted.base_model,
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight"]},
            r"those of LoraConfig\(target_parameters=\.\.\.\), which .*Use target_modules",
        ),
        (
            tied_language_model,
            {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
            r"those of base_model\.model\.lm_head, tied .*Leave ensure_weight_tying out",
        ),
    ],
)
def test_layers_of_peft_whose_parameters_cannot_be_exchanged_are_refused(base, options, message):
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    if not options.keys() <= fields:
        pytest.skip("an option of later versions of peft")
    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, **options))
    for parameters in ("adapters", "*.lora_*", "all"):
        with pytest.raises(InputError, match=message):
            Network(model, parameters)


def test_untied_adapters_of_tied_layers_are_independent_weights():
    """What the message for tied adapters suggests: the density is that of peft's own model."""
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens", "lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied layers, when merging or saving
        model = peft.get_peft_model(tied_language_model(), lora, autocast_adapter_dtype=False)
    network = Network(model.eval(), "adapters", TokenOutputs())
    weights = network.weights + 0.1 * torch.randn_like(network.weights)
    inputs, *_ = adapted.rows()
    values = network.unflatten(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in values:
                parameter.copy_(values[name])
        expected = model(**inputs).logits.flatten(1)
        torch.testing.assert_close(network(weights, inputs), expected)


# --- memory ---------------------------------------------------------------------------------------


def addresses(network):
    frozen = {n: t for n, t in network.frozen.items() if "rotary" not in n and "lora" not in n}
    return {n: t.data_ptr() for n, t in frozen.items()}


def test_base_weights_are_shared_and_adapters_are_not():
    model = adapted.adapted()
    network = Network(model, "adapters", TokenOutputs())
    own = {n: p.data_ptr() for n, p in model.named_parameters()}
    assert {n: own[n] for n in addresses(network)} == addresses(network)
    moved = network.module_with(network.weights + 1)
    for name, parameter in moved.named_parameters():
        assert (parameter.data_ptr() == own[name]) == (name not in network.names)
    assert addresses(network.with_weights(network.weights + 1)) == addresses(network)


def test_moving_a_network_does_not_move_the_base_of_the_user():
    model = adapted.adapted()
    before = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters()}
    single = Network(model, "adapters", TokenOutputs()).to("cpu", torch.float32)
    assert single.dtype == torch.float32
    assert all(t.dtype == torch.float32 for t in single.frozen.values() if t.is_floating_point())
    assert {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters()} == before
    shifted = {n: t + 1 for n, t in single.frozen.items() if t.is_floating_point()}
    single.with_buffers(shifted).module_with()
    assert all((p != 0).any() for p in single.module_with().parameters())
    for name, tensor in single.module_with().named_parameters():
        if name in single.frozen:
            assert torch.equal(tensor, single.frozen[name])


def test_nothing_of_the_user_changes():
    model = adapted.adapted().train()
    before, flags = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    inputs, tokens, _ = adapted.rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few draws
        subbayes.fit(
            model,
            {**inputs, "labels": tokens},
            likelihood="causal-lm",
            parameters="adapters",
            subspace="pca",
            training=subbayes.Training(epochs=1, swa_epochs=12),
            sampling=subbayes.Sampling(draws=3, progress=False),
        )
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_density_of_a_base_in_any_dtype(dtype):
    """The density of 16 bits is that of the same rounded weights in float64, up to rounding."""
    model = adapted.adapted(dtype=dtype)
    inputs, tokens, _ = adapted.rows()
    network = Network(model, "adapters", TokenOutputs())
    assert network.dtype == torch.float32
    space = subbayes.subspace.RandomSubspace(network.weights, 4, seed=0)
    posterior = subbayes.Posterior(network, "causal-lm", (inputs, tokens), space)
    z = 0.1 * np.random.default_rng(0).standard_normal((3, 4))
    value, gradient = posterior.value_and_grad(z)
    exact = Network(copy.deepcopy(model).double(), "adapters", TokenOutputs())
    doubled = subbayes.subspace.DenseSubspace(space.shift.double(), space.basis().double())
    truth = subbayes.Posterior(exact, "causal-lm", (inputs, tokens), doubled)
    wanted, slope = truth.value_and_grad(z)
    eps = torch.finfo(dtype).eps
    np.testing.assert_allclose(value, wanted, rtol=2 * eps)
    np.testing.assert_allclose(gradient, slope, atol=60 * eps * np.abs(slope).max())
    if dtype == torch.float32:
        assert posterior.log_likelihood(z).dtype == np.float64


def test_adapters_without_effect_are_refused():
    merged, disabled = adapted.adapted(), adapted.adapted()
    merged.merge_adapter()
    disabled.base_model.disable_adapter_layers()
    for model, message in (
        (merged, "got adapters merged into the weights of the base model. Call unmerge_adapter"),
        (disabled, r"got disabled adapters. Call enable_adapter_layers\(\) first"),
    ):
        with pytest.raises(InputError, match=message):
            Network(model, "adapters", TokenOutputs())


def test_padding_that_counts_is_refused():
    inputs, tokens, _ = adapted.rows()
    data = {**inputs, "labels": inputs["input_ids"]}
    with pytest.raises(InputError, match="label -100 where attention_mask is 0, got other labels"):
        subbayes.fit(adapted.adapted(), data, likelihood="causal-lm", parameters="adapters")
