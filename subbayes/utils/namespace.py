"""The version, and names of a package that are imported on first use, so that importing is fast."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("subbayes")
except PackageNotFoundError:  # run from sources that are not installed
    __version__ = "0+unknown"


def lazy_imports(
    package: str, names: Mapping[str, str], rooms: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package.

    Args:
        package: its dotted name.
        names: public names, each with the module of the package that defines it.
        rooms: modules of the package that are attributes too.
    """

    def get(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted([*names, *rooms])
