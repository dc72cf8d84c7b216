"""Loads artifacts that a parent names on standard input, under limits on memory.

Each line of input is a list of the name of a model and the path of an artifact; each line of
output has the outcome and a text. A crash or a hang is seen by the parent.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch

from fuzz.models import MODELS
from subbayes.utils.checks import InputError, InputTypeError

MEMORY = 512 * 2**20  # bytes that a case may take
_RUN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect",
        "pickle.find_class", "ctypes.dlopen", "cpython.run_")  # fmt: skip
_events: list[str] = []


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event.startswith(_RUN):
        caller = traceback.extract_stack(limit=3)[0]
        _events.append(f"{event} {arguments[:1]} of {caller.filename}:{caller.lineno}")


def _outcome(name: str, path: Path, expected: list[np.ndarray]) -> tuple[str, str]:
    """What comes of loading an artifact and predicting with it."""
    _events.clear()
    try:
        found = MODELS[name].use(path)
    except (InputError, InputTypeError) as error:
        text = str(error)
        if "\n" in text:
            return "several lines", text
        if "allocate" in text or "MemoryError" in text:
            return "memory", text
        outcome = "refused", text
    except MemoryError as error:
        return "memory", repr(error)
    except Exception as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = "" if where is None else f" at {where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
        text = f"{type(error).__name__}: {error}"[:300] + at
        return ("memory" if "allocate" in text else "raw error"), text
    else:
        same = len(found) == len(expected) and all(map(np.array_equal, found, expected))
        outcome = "same" if same else "other", ""
    if _events or Path("fuzz-was-here").exists():
        return "code", "; ".join(dict.fromkeys(_events)) or "a file was made"
    return outcome


def main(folder: Path) -> None:
    """Serve until the input ends."""
    import resource

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    originals = {}
    for name in json.loads(sys.stdin.readline()):
        originals[name] = MODELS[name].use(folder / name / name)
    sys.addaudithook(_audit)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps(["ready", ""]), flush=True)
    for line in sys.stdin:
        name, path = json.loads(line)
        print(json.dumps(_outcome(name, Path(path), originals[name])), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
