"""Checks of facts and tensors whose names are as long as a file allows."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from subbayes.utils.schema import Schema, SchemaError, array, dict_of, list_of, record


def test_places_of_facts_stay_short_whatever_the_keys():
    """They are made for each item, so that a long key would be copied as often."""
    places = []

    def remember(value, where, sizes):
        places.append(where)

    name = "a" * 1000
    rule = record(history=dict_of(dict_of(list_of(remember))))
    Schema(rule).check({}, {"history": {name: {name: [1, 2]}}})
    assert {len(place) for place in places} == {len("facts['history'][0]") + 2 * 63 - 0}
    assert places[1].endswith("…'][1]")
    with pytest.raises(SchemaError, match="history.*keys of at most 1000 characters"):
        Schema(rule).check({}, {"history": {name + "a": {}}})


def test_a_name_of_many_dots_takes_no_memory():
    name = "network." + 20_000 * "."
    rules = {"network.*": array(None), "network.mask.*": array(None), "*": array("never")}
    tracemalloc.start()
    Schema(record(), rules).check({name: torch.zeros(2)}, {})
    Schema(record(), {"state.*": array(None), "*": array(None)}).check({name: torch.zeros(2)}, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_tensors_have_the_rule_of_their_longest_prefix():
    rules = {
        "a.*": array("one"),
        "a.b.*": array("two", "two"),
        "a.b.c": array("three"),
        "d?": array("four"),
        "*": array("other", "other", "other"),
    }
    shapes = {"a.x": (1,), "a.b.x": (2, 2), "a.b.x.y": (2, 2), "a.b.c": (3,), "d": (4,)}
    shapes |= {"a": (5, 5, 5), "ab.c": (5, 5, 5), ".x": (5, 5, 5)}
    Schema(record(), rules).check({name: torch.zeros(shape) for name, shape in shapes.items()}, {})
