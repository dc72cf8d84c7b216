"""`python -m experiments NAME [--json] [options]`: run or resume an experiment.

Results are saved in `experiments/results/NAME/` after each step, so that an interrupted run can be
resumed. The last line printed is a JSON object. `python -m experiments NAME --help` lists options.
`torchrun --nproc-per-node 2 -m experiments tables --methods posterior` divides the chains of a fit
among processes, of which the first writes and prints.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from experiments import store
from subbayes import distributed
from subbayes.utils.checks import InputError
from subbayes.utils.warning import is_first_process

EXPERIMENTS = (
    "active",
    "adapters",
    "cifar",
    "conformal",
    "defaults",
    "enough",
    "estimator_defaults",
    "fit_defaults",
    "laplace_images",
    "laplace_regression",
    "optimise",
    "recommend",
    "sparse_images",
    "sparse_phoneme",
    "sparse_tabular",
    "ssr_coverage",
    "ssr_lesions",
    "ssr_simulation",
    "ssr_toy",
    "ssr_uci",
    "subnetwork_selection",
    "summary",
    "table_defaults",
    "tables",
    "toy_regression",
    "uci_large",
    "uci_small",
    "update",
)
"""Modules with functions `add_options` and `run`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment; return exit status 0, or 2 for invalid arguments."""
    first = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, add_help=False
    )
    first.add_argument("name", choices=EXPERIMENTS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["-h"], ["--help"]):
        first.print_help()
        return 0
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
    try:
        distributed.join(required=False)
        quiet = options.json or not is_first_process()
        say = (lambda *_: None) if quiet else (lambda *line: print(*line, flush=True))
        results = experiment.run(options, say)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if is_first_process():
        print(json.dumps({"name": name, "versions": store.versions(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
