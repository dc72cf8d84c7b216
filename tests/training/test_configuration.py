"""Validation of `Training`, and the settings of its phases."""

import pytest

from subbayes import InputError, Training


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": -1}, "epochs: expected a whole number of at least 0, got -1"),
        ({"swa_epochs": 1.5}, "swa_epochs: expected a whole number of at least 0, got 1.5"),
        ({"curve_epochs": -1}, "curve_epochs: expected a whole number of at least 0"),
        ({"learning_rate": 0.0}, "learning_rate: expected a finite number above 0"),
        ({"swa_learning_rate": "fast"}, "swa_learning_rate: expected a number above 0"),
        ({"optimizer": "lion"}, "optimizer: expected one of 'adam', 'adamw', 'sgd', got 'lion'"),
        (
            {"optimizer": "adamw", "prior_scale": 1.0},
            "prior_scale: expected None with optimizer='adamw', .*Pass weight_decay",
        ),
        ({"schedule": "step"}, "schedule: expected one of 'constant', 'cosine', 'swa'"),
        ({"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), got 1.0"),
        ({"momentum": "high"}, r"momentum: expected a number in \[0, 1\), got 'high'"),
        ({"batch_size": 0}, "batch_size: expected a whole number of at least 1"),
        ({"final_learning_rate": -1.0}, "final_learning_rate: expected a finite number of at le"),
        ({"prior_scale": 0.0}, "prior_scale: expected a finite number above 0"),
        ({"weight_decay": -1.0}, "weight_decay: expected a finite number of at least 0"),
        ({"prior_scale": 1.0, "weight_decay": 0.1}, "weight_decay: expected either weight_decay"),
        ({"bias_lr_factor": 0.0}, "bias_lr_factor: expected a finite number above 0"),
        ({"clip_norm": 0.0}, "clip_norm: expected a finite number above 0"),
        ({"validation": 1.5}, "validation: expected a fraction between 0 and 1, got 1.5"),
        ({"patience": 0}, "patience: expected a whole number of at least 1"),
        ({"max_snapshots": 1}, "max_snapshots: expected a whole number of at least 2"),
    ],
)
def test_invalid_fields_raise(fields, message):
    with pytest.raises(InputError, match=message):
        Training(**fields)


def test_weight_decay_equals_the_prior():
    assert Training().weight_decay_for(10) == 0.0
    assert Training(weight_decay=0.3).weight_decay_for(10) == 0.3
    assert Training(prior_scale=0.5).weight_decay_for(10) == pytest.approx(0.4)


def test_phases_have_separate_settings():
    training = Training(
        epochs=10,
        schedule="cosine",
        patience=3,
        validation=0.1,
        swa_epochs=4,
        swa_learning_rate=0.2,
        momentum=0.5,
        curve_epochs=7,
    )
    averaging = training.averaging()
    assert (averaging.epochs, averaging.rate(0), averaging.rate(3)) == (4, 0.2, 0.2)
    assert (averaging.optimizer, averaging.momentum) == ("sgd", 0.5)
    assert averaging.patience is averaging.validation is None
    assert averaging.averaging() == averaging
    assert training.along_curve().epochs == 7
    assert Training(epochs=3).along_curve().epochs == 3
    with pytest.raises(InputError, match="swa_epochs: expected a whole number of at least 1"):
        Training(swa_epochs=0).averaging()
