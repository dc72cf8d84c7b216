"""What is saved beside adapters: other trained parameters, and the adapters in use."""

import warnings

import adapted
import numpy as np
import pytest
import torch
from adapted import peft

import subbayes
from subbayes import InputError, Sampling, Training
from subbayes.artifacts import folder as artifact

TASKS = {"CausalLM": "causal-lm", "SequenceClassification": "categorical"}
LORA = dict(r=2, target_modules=["q_proj", "v_proj"])


def fitted_around(model, head="CausalLM"):
    """A posterior of the adapters of a model, which are not trained further."""
    inputs, tokens, labels = adapted.rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = subbayes.fit(
            model.eval(),
            {**inputs, "labels": tokens if head == "CausalLM" else labels},
            likelihood=TASKS[head],
            parameters="adapters",
            subspace="random",
            inference="elliptical-slice",
            training=Training(epochs=0, swa_epochs=0),
            sampling=Sampling(draws=4, warmup=4, progress=False, mode="eager"),
        )
    return result, inputs


def make(config, head="CausalLM", name="default", **changes):
    """A model with an adapter in float64, every trainable parameter of which has moved."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = peft.get_peft_model(
            adapted.base_model(head, **changes), config, name, autocast_adapter_dtype=False
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def check_same(result, restored, inputs):
    p, q = (m.predict(inputs).probabilities for m in (result, restored))
    np.testing.assert_array_equal(p, q)


def with_norms():
    model = make(peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.requires_grad_(True).add_(0.1)
    return model


def adalora():
    return make(
        peft.AdaLoraConfig(
            task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=10, target_modules=["q_proj"]
        )
    )


BESIDE = {  # models with trained parameters that are neither adapters nor heads
    "biases of layers": lambda: make(
        peft.LoraConfig(task_type="CAUSAL_LM", bias="lora_only", **LORA), attention_bias=True
    ),
    "all biases": lambda: make(
        peft.LoraConfig(task_type="CAUSAL_LM", bias="all", **LORA), attention_bias=True
    ),
    "norms": with_norms,
    "ranks": adalora,
    "ranks, all frozen": lambda: adalora().requires_grad_(False),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", BESIDE)
def test_trained_parameters_beside_adapters_are_saved_and_loaded(kind, tmp_path):
    model = BESIDE[kind]()
    result, inputs = fitted_around(model)
    model.save_pretrained(tmp_path)
    result.save(tmp_path)
    base = adapted.base_model(attention_bias="bias" in kind)
    fresh = peft.PeftModel.from_pretrained(base, tmp_path)
    restored = subbayes.load(tmp_path, fresh)
    check_same(result, restored, inputs)
    restored.save(tmp_path, overwrite=True)  # again, from the loaded one
    check_same(result, subbayes.load(tmp_path, fresh), inputs)

    found = artifact.read(tmp_path / "subbayes")
    network = found.facts["network"]
    own = network["base"]["own"]
    assert own
    assert all(f"network.frozen.{name}" in found.tensors for name in own)

    def forge(name, tensors, **changes):
        facts = {**found.facts, "network": {**network, "base": {**network["base"], **changes}}}
        artifact.write(tmp_path / name, found.kind, tensors, facts)
        return tmp_path / name

    other = next(iter(result.network.base_names))
    more = found.tensors | {f"network.frozen.{other}": result.network.frozen[other].clone()}
    less = {k: t for k, t in found.tensors.items() if k != f"network.frozen.{own[0]}"}
    for path, message in (
        (forge("more", more), "expected the base model that"),
        (forge("less", less), "expected the base model that"),
    ):
        with pytest.raises(InputError, match=message):
            subbayes.load(path, fresh)


def test_an_adapter_beside_the_one_in_use_is_refused(tmp_path):
    model = make(peft.LoraConfig(task_type="SEQ_CLS", **LORA), "SequenceClassification")
    result, inputs = fitted_around(model, "SequenceClassification")
    model.save_pretrained(tmp_path)
    result.save(tmp_path)

    def loaded(name="default"):
        base = adapted.base_model("SequenceClassification")
        return peft.PeftModel.from_pretrained(base, tmp_path, adapter_name=name)

    both = loaded()
    both.load_adapter(tmp_path, "second")
    with pytest.raises(InputError, match="no adapters of peft but those in use, got 'second' too"):
        subbayes.load(tmp_path, both)
    both.set_adapter("second")
    with pytest.raises(InputError, match=r"'default' in use.*'second'\. Call model\.set_adapter"):
        subbayes.load(tmp_path, both)
    with pytest.raises(InputError, match=r"by that name: PeftModel.*adapter_name='default'\)"):
        subbayes.load(tmp_path, loaded("second"))
    both.set_adapter("default")
    both.delete_adapter("second")
    check_same(result, subbayes.load(tmp_path, both), inputs)


def test_an_adapter_of_another_name_has_a_subfolder(tmp_path):
    model = make(peft.LoraConfig(task_type="CAUSAL_LM", **LORA), name="mine")
    result, inputs = fitted_around(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="with other files"):
        result.save(tmp_path)
    result.save(tmp_path / "mine")
    base = adapted.base_model()
    fresh = peft.PeftModel.from_pretrained(base, tmp_path / "mine", adapter_name="mine")
    check_same(result, subbayes.load(tmp_path / "mine", fresh), inputs)
