"""Types of facts."""

from __future__ import annotations

import math

import pytest
from msgspec import ValidationError

from subbayes.artifacts.facts import Count, Finite, Line, Positive, Probability, Size, as_facts


@pytest.mark.parametrize(
    "text", ["a\n", "\n", "a\x1b[31m", "a\rb", "a\u202eb", "a\u2028", "x" * 1001]
)
def test_lines_have_no_control_characters(text):
    with pytest.raises(ValidationError):
        as_facts(text, Line)
    assert as_facts("größe → 3 %", Line) == "größe → 3 %"


WRONG = {
    Positive: (0.0, -1.0, math.nan, math.inf, True, "1"),
    Probability: (0.0, 1.0, math.nan),
    Finite: (math.nan, math.inf, -math.inf),
    Size: (-1, 2**63, 1.5, True),
    Count: (0, 2**63),
}


@pytest.mark.parametrize("kind", WRONG)
def test_numbers_out_of_range_are_refused(kind):
    for value in WRONG[kind]:
        with pytest.raises(ValidationError):
            as_facts(value, kind)
    assert as_facts(0.5 if kind in (Positive, Probability, Finite) else 5, kind) in (0.5, 5)
