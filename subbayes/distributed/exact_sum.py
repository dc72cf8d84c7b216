r"""Sums of floating-point numbers that do not depend on the order of their terms.

A finite term x with $|x| < 2^{71}$ is rounded to a multiple of $2^{-70}$ and held as three digits
in base $2^{50}$, each with the sign of x,

$$ x \approx 2^{30} h + 2^{-20} m + 2^{-70} l, \qquad
   |h| < 2^{41}, \quad |m| < 2^{50}, \quad |l| \le 2^{50}, $$

one 64-bit integer (a *limb*) a digit. Integers add without rounding, so the digits of a sum are the
same in every order and for every division of the terms among processes.

*Resolution.* Terms of at least $2^{-18}$ in size are held exactly, since the last bit of a double
is then at least $2^{-70} \approx 8.5 \cdot 10^{-22}$. Smaller ones are rounded to nearest, each by
at most half of that, before anything is added.

*Carries.* Digits of a sum grow beyond 50 bits. $2^{12}$ terms, the most that are allowed, reach
$2^{62} + 2^{12}$, which 64 bits hold, so that carries wait until the sum is complete.

*Overflow.* Terms of $2^{71} \approx 2.4 \cdot 10^{21}$ or more in size count as infinite. Sums of
the others stay below $2^{83}$ and cannot overflow.

*NaN and infinities.* A fourth limb counts them in three fields of 20 bits: NaN, plus and minus
infinity. A sum with NaN, or with both infinities, is NaN; one with an infinity is that infinity.

*Result.* `decode` returns the double nearest to the sum of the rounded terms, ties to even. After
carries of the absolute value, h, m and l have at most 53, 50 and 50 bits and are exact doubles, and
three doubles are added with one rounding by rounding the middle sum to odd (Boldo and Melquiond
2008, Emulation of a FMA and correctly rounded sums, algorithm 5).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

LIMBS = 4
"""64-bit integers for one number."""

MOST_TERMS = 2**12
"""Terms of a sum that cannot overflow."""

UNIT = 2.0**-70
"""Terms are rounded to multiples of this."""

LIMIT = 2.0**71
"""Terms of this size or more count as infinite."""

_BITS = 50
_HIGH, _MIDDLE = 2.0**30, 2.0**-20  # units of the first two limbs
_FIELD = 20  # bits of each count
_MASK = 2**_FIELD - 1
_PIECE = 2**12  # numbers that are decoded together: their arrays stay in the cache


def encode(terms: Float[np.ndarray, "*S"]) -> Int[np.ndarray, "4 *S"]:
    """The limbs of each number; those of at most `MOST_TERMS` numbers may be added.

    Args:
        terms: numbers in float64, of any shape.

    Example:
        >>> limbs = encode(np.array([1e16, 1.0, -1e16]))
        >>> float(decode(limbs.sum(1)))
        1.0
    """
    terms = np.asarray(terms, dtype=np.float64)
    limbs = np.zeros((LIMBS, *terms.shape), dtype=np.int64)
    held = np.abs(terms) < LIMIT  # False for NaN
    rest = terms.copy()
    if not held.all():
        rest[~held] = 0.0
        plus, minus = ~held & (terms > 0), ~held & (terms < 0)
        limbs[3] = np.isnan(terms)
        limbs[3] += (plus.astype(np.int64) << _FIELD) + (minus.astype(np.int64) << 2 * _FIELD)
    for limb, unit in zip(limbs, (_HIGH, _MIDDLE), strict=False):
        digit = np.trunc(rest * (1 / unit))  # in place of a division: units are powers of two
        limb[...] = digit
        digit *= unit
        rest -= digit
    rest *= 1 / UNIT
    limbs[2] = np.rint(rest)
    return limbs


def decode(limbs: Int[np.ndarray, "4 *S"]) -> Float[np.ndarray, "*S"]:
    """The double nearest to each sum.

    Args:
        limbs: sums of what `encode` returns.

    Example:
        >>> decode(encode(np.array([np.inf, 2.5])))
        array([inf, 2.5])
    """
    flat = limbs.reshape(LIMBS, -1)
    total = np.empty(flat.shape[1])
    for start in range(0, len(total), _PIECE):
        piece = slice(start, start + _PIECE)
        total[piece] = _decoded(flat[:, piece])
    return total.reshape(limbs.shape[1:])


def _decoded(limbs: Int[np.ndarray, "4 s"]) -> Float[np.ndarray, "s"]:
    high, middle, low, counts = limbs
    high, middle, low = _carry(high, middle, low)
    sign = (high >> 63) | 1  # -1 or 1
    high, middle, low = _carry(sign * high, sign * middle, sign * low)
    total = sign * _rounded_sum(high * _HIGH, middle * _MIDDLE, low * UNIT)
    if counts.any():
        nan, plus, minus = (counts >> (i * _FIELD) & _MASK for i in range(3))
        total = np.where(plus > 0, np.inf, np.where(minus > 0, -np.inf, total))
        total = np.where((nan > 0) | ((plus > 0) & (minus > 0)), np.nan, total)
    return total


def _carry(
    high: Int[np.ndarray, "s"], middle: Int[np.ndarray, "s"], low: Int[np.ndarray, "s"]
) -> tuple[Int[np.ndarray, "s"], Int[np.ndarray, "s"], Int[np.ndarray, "s"]]:
    """The same number with lower digits from 0 to 2**50 - 1; the first digit has the sign."""
    middle = middle + (low >> _BITS)
    high = high + (middle >> _BITS)
    mask = (1 << _BITS) - 1
    return high, middle & mask, low & mask


def _rounded_sum(
    a: Float[np.ndarray, "s"], b: Float[np.ndarray, "s"], c: Float[np.ndarray, "s"]
) -> Float[np.ndarray, "s"]:
    """The double nearest to a + b + c."""
    above, below = _two_sum(b, c)
    first, second = _two_sum(a, above)
    value, error = _two_sum(second, below)
    if error.any():
        odd = np.flatnonzero((error != 0) & ((value.view(np.int64) & 1) == 0))
        value[odd] = np.nextafter(value[odd], np.where(error[odd] > 0, np.inf, -np.inf))
    return first + value


def _two_sum(
    x: Float[np.ndarray, "s"], y: Float[np.ndarray, "s"]
) -> tuple[Float[np.ndarray, "s"], Float[np.ndarray, "s"]]:
    """The rounded sum of two doubles and its error (Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)
