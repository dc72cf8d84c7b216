"""Filters of warnings that threads share, and warnings that are left out."""

from __future__ import annotations

import threading
import warnings

import pytest

from subbayes.utils.warning import filtered_warnings, unsaid_warnings, warn_user


def test_filters_of_threads_that_overlap_leave_none_behind():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        first, second = threading.Event(), threading.Event()

        def within():
            with filtered_warnings("ignore", FutureWarning):
                first.set()
                second.wait(10)

        thread = threading.Thread(target=within)
        thread.start()
        first.wait(10)
        with filtered_warnings("ignore", FutureWarning):
            second.set()
            thread.join()
            warnings.warn("still ignored", FutureWarning, stacklevel=1)
        assert warnings.filters == before
        with pytest.raises(FutureWarning):
            warnings.warn("said again", FutureWarning, stacklevel=1)


def test_a_filter_is_taken_out_of_a_copy_that_another_thread_put_in_place():
    with warnings.catch_warnings():
        before = list(warnings.filters)
        mine = filtered_warnings("ignore", FutureWarning)
        mine.__enter__()
        theirs = warnings.catch_warnings()
        theirs.__enter__()
        mine.__exit__(None, None, None)
        assert warnings.filters == before
        theirs.__exit__(None, None, None)
        assert warnings.filters == before


def test_only_the_named_warnings_are_filtered():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with filtered_warnings("ignore", UserWarning, "Glyph .* missing"):
            warnings.warn("Glyph 1 missing from font", UserWarning, stacklevel=1)
            for text, kind in (("another", UserWarning), ("Glyph 1 missing", RuntimeWarning)):
                with pytest.raises(kind):
                    warnings.warn(text, kind, stacklevel=1)
        with filtered_warnings("error", DeprecationWarning), pytest.raises(DeprecationWarning):
            warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_warnings_are_unsaid_in_one_thread_only():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with unsaid_warnings():
            warn_user("of this thread")
            thread = threading.Thread(target=warn_user, args=("of the other thread",))
            thread.start()
            thread.join()
        warn_user("afterwards")
    assert [str(w.message) for w in caught] == ["of the other thread", "afterwards"]
