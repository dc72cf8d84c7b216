"""The command line. `subbayes --help` describes it; nothing heavy is imported before it is used."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from subbayes.cli import compare, demo, evaluate, export, fit, predict, report
from subbayes.cli.console import COMMAND, complain, in_one_line, in_their_words, say
from subbayes.utils.progress import STAGE_LISTENER
from subbayes.utils.version import __version__

__all__ = ["app", "main", "run"]

EXIT_CODES = """Exit codes: 0 done; 1 an unexpected error; 2 a wrong option or bad input, with one
line that says what to do; 130 interrupted (143 by SIGTERM)."""

app = typer.Typer(
    name="subbayes",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
for room in (demo, fit, predict, evaluate, compare, report, export):
    app.command(room.NAME, epilog=f"Example: {room.EXAMPLE}")(getattr(room, room.NAME))


def _show_version(asked: bool) -> bool:
    if asked:
        print(f"subbayes {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and stop.",
        callback=_show_version,
        is_eager=True,
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show the stack of an error; may stand anywhere."
    ),
) -> None:
    """Bayesian inference over the part of a neural network that matters.

    From a table to predictions that say how sure they are: fit, then predict, evaluate, report.
    Tables are CSV, TSV (also gzipped) or Parquet. Results go to standard output, progress and
    messages to standard error; --json prints one JSON object. No file is overwritten unless
    --overwrite says so.
    """


def main() -> None:
    """Run the command line and exit."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    sys.exit(run(sys.argv[1:]))


def _terminated(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; see `subbayes --help`.

    Args:
        arguments: the words after `subbayes`.

    Example:
        >>> run(["--version"])
        subbayes 0...0
        0
    """
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            COMMAND.set(f"subbayes {shlex.join(words)}")
            STAGE_LISTENER.set(say)
            code = app(words, prog_name="subbayes", standalone_mode=False)
            sys.stdout.flush()
        return _interrupted() if code == 130 else int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stdout = None
        return 0
    except Exception as error:
        if debug:
            raise
        return complain(error)


def _interrupted() -> int:
    say("interrupted")
    return 130


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    if issubclass(category, UserWarning):
        say(f"warning: {in_their_words(in_one_line(str(message)))}")
