"""The public names of the package, by subject, with a line each, for docs/public-interface.md.

`python docs/public_names.py` prints the tables that the documentation shows in place of
`<!-- public names -->`. Subjects are packages and files; their names are those of `__all__`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any, get_args

SUBJECTS = {
    "": "What `subbayes` itself exports",
    "tables": "Tables",
    "comparison": "Comparison of methods",
    "recommendation": "Trained networks",
    "regression": "Regression with formulas",
    "semistructured": "Effects beside networks",
    "sparse": "Sparse networks",
    "likelihoods": "Likelihoods",
    "likelihoods.families": "Families",
    "priors": "Priors of coordinates",
    "subspace": "Kinds of subspaces",
    "subspaces": "Ways to choose a subspace",
    "inference": "Inference",
    "draws": "Draws",
    "diagnostics": "Diagnostics, scores and calibration",
    "active": "Choice of the next rows",
    "training": "Training",
    "baselines": "Baselines",
    "models": "Fitted models",
    "networks.token_outputs": "Outputs of language models",
    "data": "Data",
    "curvature": "Curvature",
    "distributed": "Many processes",
    "plots": "Figures",
    "plots.effects": "Figures of effects",
    "reports": "Reports",
}


def tables() -> str:
    """A section with a table for each subject; a name is in the first one that has it."""
    seen: set[int] = set()
    return "\n\n".join(
        f"### {title}\n\n`{_path(room)}`\n\n| name | what it is |\n| --- | --- |\n"
        + "\n".join(f"| `{name}` | {line} |" for name, line in names(room, seen))
        for room, title in SUBJECTS.items()
    )


def names(room: str, seen: set[int]) -> Iterable[tuple[str, str]]:
    """The names of a room that are not in `seen`, which it adds to, with a line each."""
    module = importlib.import_module(_path(room))
    for name in module.__all__:
        value = getattr(module, name)
        if id(value) not in seen:
            seen.add(id(value))
            yield name, _line(value)


def _path(room: str) -> str:
    return f"subbayes.{room}".rstrip(".")


def _line(value: Any) -> str:
    """The first sentence of a docstring; the choices of a registry or of a type; or the value."""
    if callable(value) and (text := inspect.getdoc(value)) and not get_args(value):
        first = " ".join(re.split(r"\n\s*\n", text)[0].split())
        return re.split(r"(?<=\.)\s+(?=[A-Z])", first)[0].replace("|", "&#124;")
    choices = get_args(value) or (isinstance(value, Iterable) and not isinstance(value, str))
    if choices:
        return ", ".join(f"`{one}`" for one in (get_args(value) or value))
    return f"`{value}`"


if __name__ == "__main__":
    print(tables())
