"""The version of the package, from its metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("subbayes")
except PackageNotFoundError:  # run from sources that are not installed
    __version__ = "0+unknown"
