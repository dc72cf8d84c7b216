"""Posteriors saved beside the adapter they are over, and restored around a fresh base model."""

import dataclasses
import hashlib
import json
import warnings

import adapted
import numpy as np
import pytest
import torch
from adapted import peft
from msgspec import ValidationError

import subbayes
from subbayes import InputError, Network, Posterior, Sampling, Training
from subbayes.artifacts import folder as artifact
from subbayes.artifacts.facts import decode, encode
from subbayes.artifacts.saving import checked_facts
from subbayes.artifacts.tensors import as_tensors, read_tensors
from subbayes.baselines import point_estimate
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical
from subbayes.networks.adapters.in_use import replaced_names
from subbayes.networks.adapters.names import _peft_settings, settings_digest

TASKS = {"CausalLM": "causal-lm", "SequenceClassification": "categorical"}


def fitted(head="CausalLM", dtype=torch.float32, kind="lora"):
    model = adapted.adapted(kind, head, dtype)
    inputs, tokens, labels = adapted.rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = subbayes.fit(
            model,
            {**inputs, "labels": tokens if head == "CausalLM" else labels},
            likelihood=TASKS[head],
            parameters="adapters",
            subspace="random",
            training=Training(epochs=1, swa_epochs=0),
            sampling=Sampling(draws=6, progress=False),
        )
    return model, result, inputs, tokens if head == "CausalLM" else labels


def digests(folder):
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("head", TASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_around_a_fresh_base_model(head, dtype, tmp_path):
    model, result, inputs, y = fitted(head, dtype)
    model.save_pretrained(tmp_path)
    before = digests(tmp_path)
    scores = result.evaluate(inputs, y)
    result.save(tmp_path, scores=scores)
    after = digests(tmp_path)
    assert {name: after[name] for name in before} == before
    fresh = peft.PeftModel.from_pretrained(adapted.base_model(head, dtype), tmp_path)
    for restored in (subbayes.load(tmp_path, fresh), subbayes.load(tmp_path / "subbayes", fresh)):
        p, q = (m.predict(inputs).probabilities for m in (result, restored))
        np.testing.assert_allclose(q, p, rtol=1e-6, atol=1e-9)
        assert restored.network.weights.dtype == result.network.weights.dtype
    restored.save(tmp_path, overwrite=True)  # again, from the loaded one
    again = subbayes.load(tmp_path, fresh)
    np.testing.assert_allclose(again.predict(inputs).probabilities, p, rtol=1e-6, atol=1e-9)


def test_the_base_is_not_saved(tmp_path):
    model, result, *_ = fitted("SequenceClassification")
    result.save(tmp_path / "own")
    (file,) = (tmp_path / "own").glob("*.safetensors")
    names = [n for n in read_tensors(file)[0] if n.startswith("network.frozen.")]
    assert [n for n in names if "rotary" not in n] == [
        "network.frozen.base_model.model.score.modules_to_save.default.weight"
    ]  # the head, which was trained beside the adapters
    by_name = Network(model, "*lora_*")
    assert not by_name.base_names  # named by a pattern, everything is saved


def test_a_fresh_model_with_other_adapters_and_another_head_gives_the_same(tmp_path):
    model, result, inputs, _ = fitted("SequenceClassification")
    result.save(tmp_path / "own")
    other = adapted.adapted("lora", "SequenceClassification", torch.float32, seed=5)
    with torch.no_grad():
        dict(other.named_parameters())[
            "base_model.model.score.modules_to_save.default.weight"
        ].add_(1)
    p, q = (
        m.predict(inputs).probabilities for m in (result, subbayes.load(tmp_path / "own", other))
    )
    np.testing.assert_allclose(p, q, rtol=1e-6)


def with_another_original_head(model):
    """The head that `modules_to_save` replaces has other random weights in each process."""
    with torch.no_grad():
        model.base_model.model.score.original_module.weight.add_(1)
    return model


def test_a_base_model_with_another_untrained_head_gives_the_same(tmp_path):
    model, result, inputs, _ = fitted("SequenceClassification")
    p = result.predict(inputs).probabilities
    model.save_pretrained(tmp_path)
    result.save(tmp_path)
    base = adapted.base_model("SequenceClassification", torch.float32)
    with torch.no_grad():
        base.score.weight.add_(1)
    fresh = peft.PeftModel.from_pretrained(base, tmp_path)
    assert any("original_module" in name for name, _ in fresh.named_parameters())
    loaded = subbayes.load(tmp_path, fresh)
    np.testing.assert_allclose(loaded.predict(inputs).probabilities, p, rtol=1e-6)
    with_another_original_head(fresh), with_another_original_head(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fit in (result, loaded):  # it is no change of what they compute
            np.testing.assert_allclose(fit.predict(inputs).probabilities, p, rtol=1e-6)
    loaded.save(tmp_path, overwrite=True)
    again = subbayes.load(
        tmp_path, adapted.adapted("lora", "SequenceClassification", torch.float32)
    )
    np.testing.assert_allclose(again.predict(inputs).probabilities, p, rtol=1e-6)


def test_checkpoints_do_not_depend_on_the_untrained_head():
    model, result, inputs, y = fitted("SequenceClassification")

    def digest(module):
        network = Network(module, "adapters").with_weights(result.network.weights)
        return Posterior(network, "categorical", (inputs, y), result.subspace).fingerprint()

    expected = digest(model)
    assert digest(with_another_original_head(model)) == expected
    with torch.no_grad():
        model.base_model.model.model.norm.weight[0] += 1
    assert digest(model) != expected


def test_an_untrained_head_counts_where_it_is_called():
    model = adapted.adapted("lora", "SequenceClassification", torch.float32)
    head = "base_model.model.score.original_module.weight"
    assert replaced_names(model) == {head}
    model.base_model.model.score.enable_adapters(False)
    assert not replaced_names(model)
    model.base_model.model.score.enable_adapters(True)
    layers = model.base_model.model
    layers.tied = layers.score.original_module  # a further use of the same parameter
    assert not replaced_names(model)


def test_weights_of_the_base_in_the_file_are_refused(tmp_path):
    model, result, *_ = fitted()
    found = artifact.read(result.save(tmp_path / "own"))
    base = {
        f"network.frozen.{name}": torch.zeros_like(result.network.frozen[name])
        for name in result.network.base_names
    }
    for names in (list(base)[:1], list(base)):
        tensors = found.tensors | {name: base[name] for name in names}
        artifact.write(tmp_path / "forged", found.kind, tensors, found.facts, overwrite=True)
        with pytest.raises(InputError, match="expected the base model that"):
            subbayes.load(tmp_path / "forged", model)


def test_another_number_of_classes_is_refused(tmp_path):
    model, result, inputs, _ = fitted()
    found = artifact.read(result.save(tmp_path / "own"))
    for n_classes in (5, 10, 40):
        likelihood = found.facts["likelihood"] | {"n_classes": n_classes}
        facts = found.facts | {"likelihood": likelihood}
        artifact.write(tmp_path / "forged", found.kind, found.tensors, facts, overwrite=True)
        with pytest.raises(InputError, match=f"logits of {n_classes} classes"):
            subbayes.load(tmp_path / "forged", model).predict(inputs)


def test_another_base_model_is_refused(tmp_path):
    model, result, *_ = fitted()
    model.save_pretrained(tmp_path)
    result.save(tmp_path)

    def fresh(dtype=torch.float32, **changes):
        return adapted.adapted("lora", "CausalLM", dtype, **changes)

    with pytest.raises(InputError, match="base model .*in torch.float32, got torch.bfloat16"):
        subbayes.load(tmp_path, fresh(torch.bfloat16))
    changed = fresh()
    changed.base_model.model.lm_head.weight.data[0, 0] += 1
    with pytest.raises(InputError, match="got one with other values of its weights"):
        subbayes.load(tmp_path, changed)
    with pytest.raises(InputError, match="the saved architecture"):
        subbayes.load(tmp_path, fresh(intermediate_size=28))
    for plain in (adapted.base_model(dtype=torch.float32), fresh().merge_and_unload()):
        message = (
            "module: expected a base model with the adapters that the posterior is over, got "
            r"LlamaForCausalLM without adapters\. Wrap it first: load\(path, PeftModel\.from_pre"
        )
        with pytest.raises(InputError, match=message):
            subbayes.load(tmp_path, plain)
    with pytest.raises(InputError, match="Pass load"):
        subbayes.load(tmp_path)


def test_adapters_without_effect_are_refused_on_loading(tmp_path):
    _, result, inputs, _ = fitted("SequenceClassification")
    result.save(tmp_path / "own")

    def fresh():
        return adapted.adapted("lora", "SequenceClassification", torch.float32)

    merged, disabled, inside = fresh(), fresh(), fresh()
    merged.merge_adapter()
    disabled.base_model.disable_adapter_layers()
    with pytest.raises(InputError, match="adapters merged into the weights"):
        subbayes.load(tmp_path / "own", merged)
    with pytest.raises(InputError, match="got disabled adapters"):
        subbayes.load(tmp_path / "own", disabled)
    with inside.disable_adapter(), pytest.raises(InputError, match="got disabled adapters"):
        subbayes.load(tmp_path / "own", inside)
    assert subbayes.load(tmp_path / "own", inside).predict(inputs).probabilities.shape[0] > 0


def test_the_model_card(tmp_path):
    model, result, inputs, y = fitted()
    model.save_pretrained(tmp_path)
    for name in ("README.md", "MODEL_CARD.md"):  # peft writes a template of the former
        (tmp_path / name).unlink(missing_ok=True)
    result.save(tmp_path, scores={"perplexity": 12.345})
    card = (tmp_path / "README.md").read_text()
    for words in ("5 random directions", "next token", "| perplexity | 12.35 |", "| draws | 6 |"):
        assert words in card
    result.save(tmp_path, scores={"perplexity": 9.0}, overwrite=True)
    assert "| perplexity | 9 |" in (tmp_path / "README.md").read_text()
    assert not (tmp_path / "MODEL_CARD.md").exists()
    (tmp_path / "README.md").write_text("# mine")
    result.save(tmp_path, overwrite=True)
    assert (tmp_path / "README.md").read_text() == "# mine"
    (tmp_path / "MODEL_CARD.md").write_text("mine too")
    result.save(tmp_path, overwrite=True)
    assert (tmp_path / "MODEL_CARD.md").read_text() == "mine too"


def test_other_kinds_of_models_are_saved_likewise(tmp_path):
    model = adapted.adapted("lora", "SequenceClassification", torch.float64)
    inputs, _, labels = adapted.rows()
    network = Network(model, "adapters")
    made = {
        "laplace": linearised_laplace(
            network, Categorical(), (inputs, labels), covariance="primal", prior_precision=2.0
        ),
        "map": point_estimate(model, "categorical"),
    }
    for name, one in made.items():
        model.save_pretrained(tmp_path / name)
        one.save(tmp_path / name)
        fresh = peft.PeftModel.from_pretrained(
            adapted.base_model("SequenceClassification"), tmp_path / name
        )
        p, q = (
            m.predict(inputs).probabilities for m in (one, subbayes.load(tmp_path / name, fresh))
        )
        np.testing.assert_allclose(p, q, rtol=1e-6)
        size = sum(f.stat().st_size for f in (tmp_path / name / "subbayes").iterdir())
        assert size < 8 * (network.size + 10) ** 2 + 50_000


def test_a_forged_identity_is_refused(tmp_path):
    """Facts are checked before they are used."""
    _, result, *_ = fitted()
    facts, tensors = decode(encode(result.facts())), as_tensors(result.tensors())
    checked_facts("fitted-model", tensors, facts)
    for forged in ({"shapes": 1}, {"adapters": "float8"}, {"dtypes": "float32"}, {"more": 1}):
        base = facts["network"]["base"] | forged
        bad = facts | {"network": facts["network"] | {"base": base}}
        with pytest.raises(ValidationError):
            checked_facts("fitted-model", tensors, bad)


def test_other_settings_of_model_or_adapters_are_refused(tmp_path):
    model, result, *_ = fitted()
    model.save_pretrained(tmp_path)
    result.save(tmp_path)

    def fresh():
        return peft.PeftModel.from_pretrained(
            adapted.base_model("CausalLM", torch.float32), tmp_path
        )

    subbayes.load(tmp_path, fresh())
    scaled, turned = fresh(), fresh()
    for part in scaled.modules():
        if isinstance(getattr(part, "scaling", None), dict):
            part.scaling["default"] *= 2
    turned.base_model.model.config.rms_norm_eps = 0.1
    for other in (scaled, turned):
        with pytest.raises(InputError, match="other settings, such as the number of heads or the"):
            subbayes.load(tmp_path, other)


CHANGES = {  # of one field of the configuration of the adapter, which change its outputs
    "seed of the frequencies": ("fourier", "random_loc_seed", 774),
    "scale of the frequencies": ("fourier", "scaling", 90.0),
    "key of the projection": ("vera", "projection_prng_key", 7),
    "orthogonal": ("hra", "apply_GS", True),
    "scale by the root of the rank": ("lora", "use_rslora", True),
}
CONFIGS = adapted.ADAPTERS | {
    "fourier": lambda task: peft.FourierFTConfig(
        task_type=task, n_frequency=8, scaling=50.0, target_modules=["q_proj", "v_proj"]
    ),
    "hra": lambda task: peft.HRAConfig(task_type=task, r=2, target_modules=["q_proj", "v_proj"]),
}


def settings(config):
    """The digest of a model with an adapter of a configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return settings_digest(peft.get_peft_model(adapted.base_model(), config))


@pytest.mark.few(1)
@pytest.mark.parametrize("what", CHANGES)
def test_one_field_of_the_configuration_of_the_adapter_is_refused(what, tmp_path, monkeypatch):
    kind, field, value = CHANGES[what]
    monkeypatch.setitem(adapted.ADAPTERS, kind, CONFIGS[kind])
    model, result, inputs, _ = fitted(kind=kind)
    model.save_pretrained(tmp_path)
    result.save(tmp_path)

    def fresh():
        base = adapted.base_model("CausalLM", torch.float32)
        return peft.PeftModel.from_pretrained(base, tmp_path)

    p, q = (m.predict(inputs).probabilities for m in (result, subbayes.load(tmp_path, fresh())))
    np.testing.assert_allclose(q, p, rtol=1e-6, atol=1e-9)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config[field] != value
    file.write_text(json.dumps(config | {field: value}))
    other = fresh()
    with pytest.raises(InputError, match="got other settings, such as"):
        subbayes.load(tmp_path, other)


def test_names_order_and_fields_of_a_later_version_are_no_other_settings():
    @dataclasses.dataclass
    class LoraConfig(peft.LoraConfig):
        added: int | None = 3

    task = adapted.TaskType.CAUSAL_LM
    options = dict(task_type=task, r=2, target_modules=["q_proj", "v_proj"])
    expected = settings(peft.LoraConfig(**options))
    more = dict(base_model_name_or_path="a/b", revision="main", inference_mode=True)
    assert settings(peft.LoraConfig(**options, **more)) == expected
    turned = options | {"target_modules": ["v_proj", "q_proj", "v_proj"]}
    assert settings(peft.LoraConfig(**turned)) == expected
    assert settings(peft.LoraConfig(**options, lora_dropout=0.5)) != expected
    assert settings(LoraConfig(**options)) == expected
    assert settings(LoraConfig(**options, added=4)) != expected


def test_adapters_that_are_not_in_use_are_no_settings():
    model = adapted.adapted("lora")
    expected = settings_digest(model)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["o_proj"]))
    assert list(_peft_settings(model)) == ["default"]
    model.set_adapter("other")
    assert list(_peft_settings(model)) == ["other"]
    assert settings_digest(model) != expected


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "change"), [("ia3", "one value"), ("lora", "merge")])
def test_a_base_model_that_changes_after_the_fit_is_not_used_in_silence(kind, change, tmp_path):
    model, result, inputs, _ = fitted(kind=kind)
    folder = result.save(tmp_path / "own")
    fresh = adapted.adapted(kind, "CausalLM", torch.float32)
    loaded, p = subbayes.load(folder, fresh), result.predict(inputs).probabilities
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(loaded.predict(inputs).probabilities, p, rtol=1e-6, atol=1e-9)
    for module, fit in ((model, result), (fresh, loaded)):
        if change == "merge":
            module.merge_adapter()
        else:
            with torch.no_grad():
                module.base_model.model.lm_head.weight[1, 2] += 1
        with pytest.warns(UserWarning, match="weights of the base model have changed since"):
            changed = fit.predict(inputs).probabilities
        assert not np.allclose(changed, p, atol=1e-4)
        with pytest.raises(InputError, match="^model: expected the base model .* changed since"):
            fit.save(tmp_path / "again")
    again = subbayes.load(folder, adapted.adapted(kind, "CausalLM", torch.float32))
    np.testing.assert_allclose(again.predict(inputs).probabilities, p, rtol=1e-6, atol=1e-9)
