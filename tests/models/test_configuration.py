"""Changes of configurations by dotted names, and reading from text, TOML and JSON."""

from dataclasses import asdict, dataclass, field

import pytest

from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import ENGINES
from subbayes.models.configuration import change, parse, read_toml, settings_of
from subbayes.models.settings import TableSettings
from subbayes.subspaces.registry import SUBSPACES, subspace_method
from subbayes.training.configuration import Training
from subbayes.utils.checks import InputError, check_count


@dataclass(frozen=True)
class Whole:
    """All settings.

    Attributes:
        rank: number of coordinates,
            of the subspace.
        training: how to train.
    """

    rank: int | None = None
    training: Training = field(default_factory=Training)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self):
        if self.rank is not None:
            check_count("rank", self.rank)


def test_settings_of_lists_paths_and_descriptions():
    found = {setting.path: setting for setting in settings_of(Whole())}
    assert found["rank"].description == "number of coordinates, of the subspace."
    assert found["training.epochs"].default == Training().epochs
    assert found["sampling.draws"].name == "draws"
    assert "training" not in found


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        ("none", int | None, None),
        ("7", int | None, 7),
        ("1e-2", float | str, 0.01),
        ("loo", float | str, "loo"),
        ("50,20", tuple[int, ...], (50, 20)),
        ("[50, 20]", tuple[int, ...], (50, 20)),
        ("none", tuple[int, ...], ()),
        ("true", bool, True),
    ],
)
def test_parse_by_type(text, annotation, value):
    found = parse("x", text, annotation)
    assert found == value
    assert type(found) is type(value)


def test_change_by_dotted_names_and_tables():
    changed = change(Whole(), {"rank": "4", "training.epochs": "9", "sampling": {"draws": 50}})
    assert (changed.rank, changed.training.epochs, changed.sampling.draws) == (4, 9, 50)
    assert Whole().training.epochs == Training().epochs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.epoch": 3}, r"training\.epoch: expected one of .* Did you mean 'epochs'"),
        ({"rank": "two"}, "rank: expected a whole number or none, got 'two'"),
        ({"training.epochs": -1}, r"^epochs: expected a whole number of at least 0"),
        ({"training": 3}, r"training: expected settings of it"),
        (
            {"training.optimizer": "lion"},
            r"training\.optimizer: expected one of 'adam', 'adamw', 'sgd'",
        ),
        ({"rank": 0}, "rank: expected a whole number of at least 1, got 0"),
    ],
)
def test_change_with_invalid_values_raises(changes, message):
    with pytest.raises(InputError, match=message):
        change(Whole(), changes)


def test_toml_and_json(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("rank = 3\n[training]\nepochs = 12\nbatch_size = 'none'\n")
    changed = change(Whole(), read_toml(path))
    assert (changed.rank, changed.training.epochs, changed.training.batch_size) == (3, 12, None)
    assert change(Whole(), asdict(changed)) == changed
    path.write_text("rank = = 3")
    with pytest.raises(InputError, match="config: expected a TOML file"):
        read_toml(path)
    with pytest.raises(InputError, match="config: expected a file that can be read"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_toml_with_a_byte_order_mark_is_read(tmp_path, end):
    path = tmp_path / "settings.toml"
    path.write_bytes(b"\xef\xbb\xbf" + f"rank = 3{end}[training]{end}epochs = 12{end}".encode())
    assert read_toml(path) == {"rank": 3, "training": {"epochs": 12}}


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("a = " + "[" * 20000 + "]" * 20000, "a TOML file, got"),
        ("rank = " + "9" * 5000, "a TOML file, got"),
        (b"\xff", "a TOML file, got"),
    ],
    ids=["deep", "digits", "not text"],
)
def test_toml_that_cannot_be_used_raises_one_line(tmp_path, content, pattern):
    path = tmp_path / "settings.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=rf"\Aconfig: expected {pattern}[^\n]*\Z"):
        read_toml(path)


def test_dots_that_are_no_names_are_read(tmp_path):
    file = tmp_path / "settings.toml"
    numbers = ", ".join(["0.25"] * 100)
    file.write_text(f'x = [{numbers}]\npath = "{"../" * 50}"\n')
    assert len(read_toml(file)["x"]) == 100


CONFIGURATIONS = {
    "table": TableSettings(),
    **{name: ENGINES[name]() for name in ENGINES},
    **{name: subspace_method(name) for name in SUBSPACES},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_is_read_back(name):
    config = CONFIGURATIONS[name]
    values = {
        setting.path: setting.default
        for setting in settings_of(config)
        if setting.default is not None
    }
    assert change(config, values) == config
