"""Exact sums: against rational arithmetic and `math.fsum`, in every order and every division."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subbayes.distributed.exact_sum import LIMBS, LIMIT, MOST_TERMS, UNIT, decode, encode

FINITE = st.floats(-LIMIT, LIMIT, exclude_min=True, exclude_max=True)
LARGE = FINITE.filter(lambda x: x == 0 or abs(x) >= 2.0**-18)  # held exactly
ANY = st.one_of(FINITE, st.sampled_from([np.inf, -np.inf, np.nan, LIMIT, -LIMIT]))


def nearest(total: Fraction) -> float:
    """The double nearest to a rational number: division of integers is rounded correctly."""
    return total.numerator / total.denominator


def rounded(x: float) -> Fraction:
    """The multiple of the unit nearest to x, ties to even."""
    return round(Fraction(x) / Fraction(UNIT)) * Fraction(UNIT)


def total(terms) -> float:
    return float(decode(encode(np.array(terms, dtype=np.float64)).sum(1)))


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@given(st.lists(LARGE, min_size=1, max_size=30))
def test_sums_of_exact_terms_are_rounded_once(terms):
    assert total(terms) == math.fsum(terms)


@given(st.lists(FINITE, min_size=1, max_size=30))
def test_small_terms_are_rounded_to_the_unit_first(terms):
    expected = sum((rounded(x) for x in terms), Fraction(0))
    assert total(terms) == nearest(expected)
    error = abs(expected - sum((Fraction(x) for x in terms), Fraction(0)))
    assert error <= len(terms) * Fraction(UNIT) / 2


@given(st.lists(st.integers(-(2**30), 2**30), min_size=1, max_size=40), st.integers(-70, 40))
def test_cancellation_and_ties(numbers, exponent):
    terms = [math.ldexp(number, exponent) for number in numbers]
    terms += [-x for x in terms[1:]] + [2.0**-53, 1.0, 2.0**-70]
    assert total(terms) == nearest(sum((Fraction(x) for x in terms), Fraction(0)))


@given(st.lists(ANY, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_neither_the_order_nor_the_division_matters(terms, random):
    expected = total(terms)
    shuffled = list(terms)
    random.shuffle(shuffled)
    assert same(total(shuffled), expected)
    processes = random.randint(1, 8)
    parts = [shuffled[i::processes] for i in range(processes)]  # some are empty
    limbs = sum(encode(np.array(part, dtype=np.float64)).sum(1) for part in parts)
    assert same(float(decode(limbs)), expected)


@given(st.lists(ANY, min_size=1, max_size=10))
def test_nan_and_infinities_are_those_of_a_sum(terms):
    large = [math.copysign(np.inf, x) if abs(x) >= LIMIT else x for x in terms]
    infinite = {x for x in large if math.isinf(x)}
    found = total(terms)
    if any(math.isnan(x) for x in large) or len(infinite) == 2:
        assert math.isnan(found)
    elif infinite:
        assert found == infinite.pop()
    else:
        assert math.isfinite(found)


@pytest.mark.parametrize("sign", [1, -1])
def test_as_many_terms_as_are_allowed_do_not_overflow(sign):
    largest = np.nextafter(LIMIT, 0)
    terms = np.full(MOST_TERMS, sign * largest)
    assert decode(encode(terms).sum(1)) == sign * MOST_TERMS * largest
    every = np.array([np.nan, np.inf, -np.inf]).repeat(MOST_TERMS)
    counts = encode(every)[3].reshape(3, -1).sum(1)
    assert counts.tolist() == [MOST_TERMS, MOST_TERMS << 20, MOST_TERMS << 40]


def test_shapes_and_zeros():
    terms = np.array([[0.0, -0.0, 1.5], [5e-324, -1e-22, -2.5]])
    assert encode(terms).shape == (LIMBS, 2, 3)
    assert decode(encode(terms)).tolist() == [[0.0, 0.0, 1.5], [0.0, 0.0, -2.5]]
    assert decode(encode(np.zeros((0, 2))).sum(1)).tolist() == [0.0, 0.0]
