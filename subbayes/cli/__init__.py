"""The command line; heavy packages are imported when a command needs them."""

from __future__ import annotations

import errno
import io
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import copy_context
from typing import Any

import typer

from subbayes.cli import calibrate, compare, evaluate, export, fit, predict, regress, report, update
from subbayes.cli.console import COMMAND, print_error, print_line, report_error
from subbayes.cli.options import ALL_OPTIONS, ShortHelp, expand_groups
from subbayes.utils.progress import STAGE_LISTENER
from subbayes.utils.registry import __version__
from subbayes.utils.warning import is_first_process

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

__all__ = ["app", "main", "run"]

EXIT_CODES = """Exit codes: 0 done; 1 an unexpected error; 2 a wrong option or bad input, with one
line that names the remedy; 130 interrupted (143 by SIGTERM)."""

app = typer.Typer(
    name="subbayes",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help", ALL_OPTIONS]},
    epilog=EXIT_CODES,
)
for module in (fit, predict, evaluate, calibrate, update, compare, regress, report, export):
    app.command(module.NAME, cls=ShortHelp, epilog=f"Example: {module.EXAMPLE}")(
        expand_groups(getattr(module, module.NAME))
    )


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
        False, "--debug", help="Show the stack trace of an error; may follow the command too."
    ),
) -> None:
    """Bayesian inference over the part of a neural network that matters.

    From a table to predictions with their uncertainty: fit, then predict, evaluate, report.
    Tables are CSV, TSV (also gzipped) or Parquet. Results go to standard output, progress and
    messages to standard error; --json prints one JSON object. Files are only overwritten with
    --overwrite.
    """


def main() -> None:
    """Run the command line and exit."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit_on_signal)
    sys.exit(run(sys.argv[1:]))


def _exit_on_signal(number: int, _: Any) -> None:
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
    return copy_context().run(_run, arguments)  # so that later commands start afresh


def _run(arguments: Sequence[str]) -> int:
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    if sys.stdout is None:
        print_error("error: standard output is closed. Redirect it to a file or to /dev/null.")
        return 2
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            COMMAND.set(f"subbayes {shlex.join(words)}")
            STAGE_LISTENER.set(print_line)
            with _joined_processes():
                code = app(words, prog_name="subbayes", standalone_mode=False)
                sys.stdout.flush()
        return _interrupted() if code == 130 else int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BrokenPipeError:  # the reader of the output has closed it
        sys.stdout = None
        return 0
    except SystemExit as stop:  # click's, for the same reason
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        sys.stdout = None
        return 0
    except Exception as error:
        unwritten = _unwritten_output(error)
        if unwritten is not None:
            sys.stdout = None
            print_error(f"error: standard output: {unwritten.strerror}. Redirect it elsewhere.")
            return 2
        if debug:
            raise
        return report_error(error)


@contextmanager
def _joined_processes() -> Iterator[None]:
    """Join the processes that torchrun has started, of which only the first prints results."""
    if not (os.environ.get("RANK") or os.environ.get("WORLD_SIZE")):
        yield
        return
    from subbayes.distributed.processes import join, leave

    join(required=False)
    try:
        with nullcontext() if is_first_process() else redirect_stdout(io.StringIO()):
            yield
    finally:
        leave()


def _unwritten_output(error: Exception) -> OSError | None:
    """The error of writing to standard output, or what is still buffered for it, if it is one."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITABLE:
        return error
    try:
        sys.stdout.flush()
    except OSError as later:
        return later
    return None


def _interrupted() -> int:
    print_line("interrupted")
    return 130


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    from sklearn.exceptions import ConvergenceWarning

    if issubclass(category, ConvergenceWarning):
        return  # commands print these with their results
    if issubclass(category, UserWarning):
        print_line(f"warning: {message}")
