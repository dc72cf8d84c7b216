"""The one place where frames and columns of other libraries come in; pandas is not imported."""

from __future__ import annotations

from typing import Any

from subbayes.utils.checks import error_text, fail


def to_pandas(argument: str, value: Any) -> Any:
    """A frame or a column of another library, such as polars or pyarrow, in pandas.

    Other values, such as arrays, lists, and what is in pandas already, are returned as they are.

    Args:
        argument: name of the argument in errors.
        value: a frame, a column, or anything else.

    Raises:
        InputError: a lazy frame; or one whose library needs pyarrow, which is not installed.

    Example:
        >>> to_pandas("X", [1, 2])
        [1, 2]
    """
    kind = type(value)  # and not the value, which may have columns of any names as attributes
    if not hasattr(kind, "to_pandas"):
        if hasattr(kind, "collect"):
            remedy = "Call its .collect() first"
            fail(argument, "a data frame in memory", f"a {kind.__name__}", remedy)
        return value
    if getattr(value, "ndim", 0) > 2:  # an array with names of its axes, such as one of xarray
        return value
    try:
        return value.to_pandas()
    except ImportError as error:
        remedy = "Install pyarrow: pip install 'subbayes[parquet]'"
        got = f"a {kind.__name__}: {error_text(error)}"
        fail(argument, "a data frame that pandas can take over", got, remedy)
