"""Sessions of processes that share a store with an earlier attempt."""

import json
import threading
import time

import pytest
from torch.distributed import HashStore

from subbayes import InputError
from subbayes.distributed.rendezvous import session_store


def attempt(store, count, delays=None):
    """What each process of an attempt, a thread each, writes and reads in its session."""
    found = [None] * count

    def run(rank):
        time.sleep((delays or {}).get(rank, 0))
        own = session_store(store, rank, count, timeout=20)
        own.set(f"address/{rank}", f"{rank} of this attempt")
        found[rank] = [own.get(f"address/{other}").decode() for other in range(count)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("late", [{}, {0: 0.3}, {2: 0.3}, {1: 0.2, 2: 0.4}])
def test_keys_of_earlier_attempts_are_not_read(late):
    store = HashStore()
    for number in range(3):
        for other in range(3):  # what a failed attempt leaves outside of sessions
            store.set(f"address/{other}", "stale")
        found = attempt(store, 3, late if number else None)
        assert found == [[f"{rank} of this attempt" for rank in range(3)]] * 3


def test_an_attempt_that_failed_halfway_is_no_part_of_the_next():
    store = HashStore()
    for rank, word in enumerate(("old", "older", "oldest")):
        store.set(f"subbayes/word/{rank}", word)
    session = json.dumps(["old", "older", "oldest"])
    for key in ("session", "complete", "confirmed/1", "confirmed/2"):
        store.set(f"subbayes/{key}", session)
    assert attempt(store, 3, {1: 0.2}) == [[f"{rank} of this attempt" for rank in range(3)]] * 3


def test_a_process_that_does_not_answer():
    with pytest.raises(InputError, match="processes: expected answers of all 2, got none from"):
        session_store(HashStore(), 1, 2, timeout=0.1)
