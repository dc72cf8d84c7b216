"""`python -m experiments NAME [--json] [options]`: run an experiment, or go on with it.

Results are kept under `experiments/results/NAME/` and survive an interruption; the last line
printed is one JSON object. `python -m experiments NAME --help` lists the options.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import store
from subbayes.utils.checks import InputError

_HARNESS = (
    "batched",
    "corruptions",
    "images",
    "laplace_subspaces",
    "sparse_networks",
    "store",
    "uci",
)


def names() -> list[str]:
    """The experiments there are, one file each (and a file of its tables or page beside)."""
    files = Path(__file__).parent.glob("[a-z]*.py")
    return sorted(
        f.stem
        for f in files
        if f.stem not in _HARNESS and not f.stem.endswith(("_tables", "_page"))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment; the exit status is 0, or 2 for arguments that do not fit."""
    first = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, add_help=False
    )
    first.add_argument("name", choices=names())
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = first.parse_args(given[:1]).name
    experiment = importlib.import_module(f"experiments.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments {name}", description=experiment.__doc__
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument(
        "--results",
        default=str(store.RESULTS / name),
        help="folder of the results (default: experiments/results/NAME)",
    )
    parser.add_argument("--data-dir", default=None, help="folder of the real data sets")
    experiment.add_options(parser)
    options = parser.parse_args(given[1:])
    say = (lambda *_: None) if options.json else (lambda *line: print(*line, flush=True))
    try:
        results = experiment.run(options, say)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"name": name, "versions": store.versions(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
