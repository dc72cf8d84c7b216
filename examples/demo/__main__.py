"""`python -m examples.demo`: five short studies of where a posterior pays, with one report.

Compares methods on small tables, improves a trained classifier, counts how often the interval of an
effect holds the truth, exports the small network of a sparse posterior, and updates a model by new
rows. It takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from sklearn.exceptions import ConvergenceWarning

from examples.demo import run
from subbayes.cli.console import print_error, print_json, print_line
from subbayes.utils.checks import InputError
from subbayes.utils.progress import STAGE_LISTENER


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        arguments: the words of the command line; by default those of the process.

    Returns:
        The exit code: 0, 2 for bad input, or 130 if the demo is interrupted.
    """
    options = _parser().parse_args(arguments)
    show = not (options.json or options.quiet)
    listener = STAGE_LISTENER.set(print_line)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the tables of the demo name them
            warnings.showwarning = lambda message, *_, **__: print_line(f"warning: {message}")
            result = run(options.out, options.seed, show=show)
    except (InputError, OSError) as error:
        print_error(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    finally:
        STAGE_LISTENER.reset(listener)
    if options.json:
        print_json(result.to_dict())
    elif options.quiet:
        print(result.to_text())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Show in five short studies where a posterior pays, and write a report.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        help="folder for models, scores, plots and report (default: runs/demo); only files that "
        "the demo wrote itself are overwritten",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same result (default: 0)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object to standard output and nothing else",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no steps and no hints")
    return parser


if __name__ == "__main__":
    sys.exit(main())
