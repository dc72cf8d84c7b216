"""Settings of tables: changed by dotted names, resolved for a task, saved with estimators."""

import json

import numpy as np
import pytest

from subbayes.inference.samplers.nuts import NUTS
from subbayes.models.settings import (
    TABLE_TRAINING,
    Perceptron,
    TableSettings,
    configured,
    decode_parameters,
    encode_parameters,
    is_used,
)
from subbayes.priors import EvidencePrior
from subbayes.subspaces.optimal import Optimal
from subbayes.subspaces.pca import PCA
from subbayes.tables.array_model import fit_arrays
from subbayes.training.configuration import Training
from subbayes.utils.checks import InputError, InputTypeError


def test_change_subspace_and_engine_by_name_and_field():
    changed = TableSettings().change(
        {"subspace": "optimal", "subspace.rank": "7", "inference.target_acceptance": "0.9"}
        | {"inference": "nuts", "network.hidden": "20,10", "training": {"epochs": 3}}
    )
    assert changed.subspace == Optimal(rank=7)
    assert changed.inference == NUTS(target_acceptance=0.9)
    assert changed.network.hidden == (20, 10)
    assert changed.training.epochs == 3
    assert changed.training.learning_rate == TABLE_TRAINING.learning_rate
    assert TableSettings().change({"subspace": {"name": "pca", "rank": 2}}).subspace == PCA(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subspace": "random", "subspace.covariance": "kfac"}, "subspace.covariance: expected"),
        ({"subspace.rank": "many"}, "subspace.rank: expected a whole number or none"),
        ({"subspace": "pcs", "subspace.rank": 2}, "subspace: expected one of 'pca'"),
        ({"inference": "gibbs", "inference.thin": 2}, "inference: expected one of"),
        ({"training.epoch": "3"}, "training.epoch: .*Did you mean 'epochs'"),
        ({"sparse.slab": "cauchy"}, "sparse.slab: expected one of 'student-t', 'normal'"),
    ],
)
def test_invalid_changes_raise_one_line_errors(changes, message):
    with pytest.raises(InputError, match=message):
        TableSettings().change(changes | ({} if "subspace" in changes else {"subspace": "pca"}))


def test_training_for_task():
    settings = TableSettings()
    assert settings.training_for("regression", 100).prior_scale == 0.3
    assert settings.training_for("classification", 100).prior_scale == 1.0
    flat = settings.change({"training.weight_decay": 0.0}).training_for("regression", 100)
    assert (flat.prior_scale, flat.weight_decay) == (None, 0.0)
    stopping = settings.change({"training.patience": 3}).training_for("count", 100)
    assert stopping.validation == 0.2
    assert (
        settings.change({"training.validation": 0.3}).training_for("count", 100).validation is None
    )


def test_configured():
    default = Training(epochs=7)
    assert configured("training", None, default) is default
    assert configured("training", {"learning_rate": 0.5}, default) == Training(7, 0.5)
    with pytest.raises(InputTypeError, match="training: expected a Training, or a dict"):
        configured("training", 3, default)


def test_estimator_parameters_round_trip_through_json():
    defaults = {"network": Perceptron(), "training": TABLE_TRAINING}
    params = {
        "network": {"hidden": (4,)},
        "training": Training(epochs=9, batch_size=None),
        "subspace": Optimal(rank=3, covariance="kfac"),
        "inference": NUTS(max_depth=4),
        "prior": EvidencePrior("diagonal"),
        "random_state": 3,
    }
    found = decode_parameters(json.loads(json.dumps(encode_parameters(params, defaults))), defaults)
    assert found == params | {"network": Perceptron((4,))}


def test_settings_that_methods_use():
    used = {
        "members": ("ensemble",),
        "sparse.slab": ("sparse",),
        "training.swa_epochs": ("pca", "random", "swa", "swag"),
        "inference": ("pca", "random"),
        "sampling.draws": ("pca", "random"),
        "sampling.seed": ("pca", "random", "map", "swa", "swag", "ensemble", "sparse"),
        "training.epochs": ("pca", "random", "map", "swa", "swag", "ensemble", "sparse"),
        "training.time_limit": ("pca", "random", "map", "swa", "swag", "ensemble"),
    }
    for setting, methods in used.items():
        found = [name for name in used["sampling.seed"] if is_used(setting, name)]
        assert found == list(methods)
    hierarchical = ("effort", "likelihood", "sampling.seed")
    assert all(is_used(name, "hierarchical") for name in hierarchical)
    for name in ("training.epochs", "network.hidden", "subspace.rank", "prior", "members"):
        assert not is_used(name, "hierarchical")


def test_training_stops_early_from_5000_rows():
    settings = TableSettings()
    assert settings.training_for("count", 4999).patience is None
    chosen = settings.training_for("count", 5000)
    assert (chosen.patience, chosen.validation) == (20, 0.1)
    assert chosen.epochs == settings.training.epochs
    own = settings.change({"training.validation": 0.3})
    assert own.training_for("count", 5000).validation == 0.3
    own = settings.change({"training.patience": 100})
    assert (own.training_for("count", 5000).patience) == 100
    assert own.training_for("count", 5000).validation == 0.2


def test_training_of_tables_has_a_time_limit():
    assert TableSettings().training_for("regression", 10**6).time_limit == 600.0
    for text, expected in (("30", 30.0), ("none", None)):
        own = TableSettings().change({"training.time_limit": text})
        assert own.training_for("regression", 100).time_limit == expected
    with pytest.raises(InputError, match="time_limit: expected a finite number above 0, got 0"):
        TableSettings().change({"training.time_limit": "0"})


def test_a_time_limit_leaves_enough_snapshots_for_the_rank(monkeypatch):
    seen = []

    def train_trajectory(*args, least_snapshots, **options):
        seen.append(least_snapshots)
        raise KeyboardInterrupt

    monkeypatch.setattr("subbayes.models.fit.train_trajectory", train_trajectory)
    x = np.linspace(-1, 1, 60, dtype=np.float32)[:, None]
    for subspace in (
        {"subspace": "pca", "subspace.rank": 12},
        {"subspace": "pca"},
        {"subspace": "full"},
    ):
        with pytest.raises(KeyboardInterrupt):
            fit_arrays(x, x[:, 0], "regression", TableSettings().change(subspace), progress=False)
    assert seen == [13, 10, 10]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [None, "map", "ensemble"])
def test_large_tables_hold_out_rows(monkeypatch, method):
    monkeypatch.setattr("subbayes.models.settings.STOPPING_ROWS", 60)
    x = np.linspace(-1, 1, 60, dtype=np.float32)[:, None]
    settings = TableSettings().change(
        {"network.hidden": (4,), "training": {"epochs": 3, "swa_epochs": 3}, "members": 2,
         "subspace.rank": 1, "sampling": {"draws": 4, "chains": 1}}
    )  # fmt: skip
    seen = []
    original = TableSettings.training_for

    def training_for(self, task, rows):
        seen.append(original(self, task, rows))
        return seen[-1]

    monkeypatch.setattr(TableSettings, "training_for", training_for)
    model = fit_arrays(x, x[:, 0], "regression", settings, method=method, progress=False)
    assert [(one.patience, one.validation) for one in seen] == [(20, 0.1)]
    if method is None:
        assert model.posterior.data.n == 60  # the posterior uses all rows
