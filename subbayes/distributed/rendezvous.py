"""A store of the processes of one attempt, which none of an earlier attempt has written to.

`torchrun --max-restarts` starts all processes again after a failure and may keep the store in which
they exchange their addresses. A process that reads an address of the failed attempt there cannot
connect. So the processes agree on a session first: each writes a random word, process 0 publishes
all words as the session, and publishes it again when one of them changes, until all have confirmed
it. Words of an earlier attempt are never confirmed.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from subbayes.utils.checks import fail

_PAUSE = 0.01  # seconds between two looks


def session_store(store: Store, rank: int, count: int, timeout: float) -> Store:
    """The part of a store that belongs to this attempt.

    Args:
        store: shared by all processes, with keys of earlier attempts perhaps.
        rank: number of this process.
        count: number of processes.
        timeout: seconds to wait for the others.

    Raises:
        InputError: a process that does not answer in time.
    """
    root, word = PrefixStore("subbayes", store), secrets.token_hex(16)
    root.set(f"word/{rank}", word)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        session = _lead(root, count) if rank == 0 else _follow(root, rank, word)
        if session is not None:
            return PrefixStore(session, root)
        time.sleep(_PAUSE)
    remedy = "See the first error of the others; an interrupted run with checkpoint= resumes"
    fail(
        "processes",
        f"answers of all {count}",
        f"none from another one, for which rank {rank} waited",
        remedy,
    )


def _lead(root: Any, count: int) -> str | None:
    """Publish the words of all processes, and return them once all have confirmed them."""
    words = [_get(root, f"word/{rank}") for rank in range(count)]
    if "" in words:
        return None
    session = json.dumps(words)
    if _get(root, "session") != session:
        root.set("session", session)
    if any(_get(root, f"confirmed/{rank}") != session for rank in range(1, count)):
        return None
    root.set("complete", session)
    return session


def _follow(root: Any, rank: int, word: str) -> str | None:
    """Confirm a session with the word of this process, and return it once it is complete."""
    session = _get(root, "session")
    if not session or json.loads(session)[rank] != word:
        return None
    if _get(root, f"confirmed/{rank}") != session:
        root.set(f"confirmed/{rank}", session)
    return session if _get(root, "complete") == session else None


def _get(root: Any, key: str) -> str:
    return root.get(key).decode() if root.check([key]) else ""
