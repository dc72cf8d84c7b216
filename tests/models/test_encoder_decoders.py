"""Language models of an encoder and a decoder, with adapters."""

import warnings

import adapted
import numpy as np
import pytest
import torch
from adapted import peft, transformers
from torch.utils.data import DataLoader

import subbayes
from subbayes import InputError, Sampling, Training

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {
    "T5": dict(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0),
    "Bart": dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                 decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
                 max_position_embeddings=16, decoder_start_token_id=0, bos_token_id=1,
                 eos_token_id=2, forced_eos_token_id=None),
}  # fmt: skip


def model_of(kind):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=adapted.WORDS, pad_token_id=0, **SIZES[kind]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
        lora = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2)
        return peft.get_peft_model(base, lora).eval()


def rows_of(model):
    """Texts that are padded, with labels of the same length that are padded elsewhere."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(3, adapted.WORDS, (2, 12, 5), generator=generator)
    mask = (torch.arange(5) < 3 + torch.arange(12)[:, None] % 3).long()
    labels = torch.where(torch.arange(5) < 5 - torch.arange(12)[:, None] % 2, labels, -100)
    rows = {"input_ids": ids * mask, "attention_mask": mask}
    decoder = model.get_base_model().prepare_decoder_input_ids_from_labels(labels)
    return rows, rows | {"decoder_input_ids": decoder}, labels


def fit(model, inputs, labels, likelihood="tokens"):
    return subbayes.fit(
        model,
        {**inputs, "labels": labels},
        likelihood=likelihood,
        parameters="adapters",
        subspace="random",
        training=Training(epochs=0, swa_epochs=0),
        sampling=Sampling(draws=4, chains=2, progress=False),
    )


@pytest.mark.parametrize("kind", SIZES)
def test_the_density_is_the_loss_of_the_model(kind):
    model = model_of(kind)
    rows, inputs, labels = rows_of(model)
    fitted = fit(model, inputs, labels)
    value = fitted.posterior.log_likelihood(np.zeros((1, fitted.posterior.rank)))
    counted = int((labels != -100).sum())
    with torch.no_grad():
        loss = model(**rows, labels=labels).loss.double()
    np.testing.assert_allclose(float(value[0]), -counted * float(loss), rtol=1e-5)
    each = [dict(zip(inputs, one, strict=True)) for one in zip(*inputs.values(), strict=True)]
    loader = DataLoader([r | {"labels": y} for r, y in zip(each, labels, strict=True)], 5)
    assert fitted.evaluate(loader) == fitted.evaluate(inputs, labels)


@pytest.mark.parametrize("kind", SIZES)
def test_rows_without_inputs_of_the_decoder_are_refused(kind):
    """T5 raises an error of its own, Bart takes the inputs of the encoder instead."""
    model = model_of(kind)
    rows, inputs, labels = rows_of(model)
    with pytest.raises(InputError, match="decoder_input_ids.*prepare_decoder_input_ids"):
        fit(model, rows, labels)
    fitted = fit(model, inputs, labels)
    for call in (lambda: fitted.predict(rows), lambda: fitted.evaluate(rows, labels)):
        with pytest.raises(InputError, match="^inputs: expected decoder_input_ids"):
            call()


def test_labels_of_the_next_token_are_refused():
    model = model_of("T5")
    _, inputs, labels = rows_of(model)
    with pytest.raises(InputError, match="^likelihood: .*position t predicts label t"):
        fit(model, inputs, labels, "causal-lm")


def test_padding_is_that_of_the_decoder():
    model = model_of("T5")
    _, inputs, labels = rows_of(model)
    mask = (labels != -100).long()
    fit(model, inputs | {"decoder_attention_mask": mask}, labels)
    mask[0, 0] = 0
    with pytest.raises(InputError, match="where decoder_attention_mask is 0"):
        fit(model, inputs | {"decoder_attention_mask": mask}, labels)


def test_an_encoder_alone_has_no_decoder():
    config = transformers.T5Config(
        vocab_size=adapted.WORDS, pad_token_id=0, num_labels=3, **SIZES["T5"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder = transformers.T5ForTokenClassification(config).eval()
    ids = torch.randint(3, adapted.WORDS, (6, 5))
    model = peft.get_peft_model(encoder, peft.LoraConfig(task_type="TOKEN_CLS", r=2)).eval()
    fit(model, {"input_ids": ids}, ids % 3)
