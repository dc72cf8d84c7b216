"""Isokinetic dynamics: the closed form of a turn, energy errors, and what is conserved."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from densities import Banana, Toy
from scipy.integrate import solve_ivp

from subbayes.inference.samplers.microcanonical import (
    isokinetic_step,
    partial_refreshment,
    turn,
    unit_vectors,
)


@pytest.mark.parametrize("d", [2, 3, 50])
@pytest.mark.parametrize("time", [1e-3, 0.7, 6.0])
def test_a_turn_solves_the_differential_equation(d, time):
    """u' = (I - u u') g / (d - 1) and K' = u'g under a constant gradient g."""
    rng = np.random.default_rng(d)
    u, g = unit_vectors(rng.standard_normal((1, d))), 3 * rng.standard_normal((1, d))

    def flow(_, y):
        v = y[:-1]
        return np.append((g[0] - v * (v @ g[0])) / (d - 1), v @ g[0])

    end = solve_ivp(flow, (0, time), np.append(u[0], 0.0), rtol=1e-11, atol=1e-12).y[:, -1]
    kinetic = turn(u, g, np.array([time]))
    np.testing.assert_allclose(u[0], end[:-1], atol=1e-8)
    np.testing.assert_allclose(kinetic[0], end[-1], rtol=1e-7)


@pytest.mark.parametrize("cosine", [-1.0, -1 + 1e-12, -0.3, 0.0, 1.0])
@pytest.mark.parametrize("delta", [0.0, 1e-9, 1.0, 40.0, 800.0, 1e12])
def test_turns_of_any_size(delta, cosine):
    """Against 60 digits; sinh and cosh overflow at 710, and e^-delta underflows at 746."""
    u, g = np.array([[cosine, np.sqrt(1 - cosine**2), 0.0]]), np.array([[2.0, 0.0, 0.0]])
    kinetic = turn(u, g, np.array([delta]))  # delta = time |g| / (d - 1)
    assert abs(np.linalg.norm(u) - 1) < 1e-6
    assert np.isfinite(kinetic).all()
    if cosine > -1 + 1e-6:
        with mpmath.workdps(60):
            zeta = mpmath.exp(-mpmath.mpf(delta))
            scale = 1 + cosine + (1 - cosine) * zeta**2
            expected = 2 * (delta - mpmath.log(2) + mpmath.log(scale))
        np.testing.assert_allclose(kinetic[0], float(expected), rtol=1e-7, atol=1e-14)


def test_no_gradient_no_turn():
    u = unit_vectors(np.ones((2, 4)))
    before = u.copy()
    assert (turn(u, np.zeros((2, 4)), np.ones(2)) == 0).all()
    np.testing.assert_array_equal(u, before)


def trajectory(density, step, time=1.0, factor=None):
    """The end points of trajectories, with the sum of their energy errors."""
    rng = np.random.default_rng(0)
    z, u = rng.standard_normal((2, 20, density.rank)) * 0.5
    factor = np.ones_like(z) if factor is None else np.broadcast_to(factor, z.shape)
    value, gradient = density.value_and_grad(z)
    u, h, error = unit_vectors(u), gradient * factor, np.zeros(len(z))
    for _ in range(round(time / step)):
        new = isokinetic_step(density, z, u, value, h, factor, np.full(len(z), step))
        z, u, value, h = new.z, new.u, new.value, new.h
        error += new.error
    return z, u, value, h, error


def test_energy_errors_are_of_second_order():
    errors = [np.abs(trajectory(Banana(2), 2.0**-n)[-1]).mean() for n in (5, 6, 7)]
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert coarse / fine == pytest.approx(4, rel=0.15)


def test_trajectories_are_reversible():
    density, rng = Banana(2), np.random.default_rng(0)
    start = rng.standard_normal((2, 20, 2))[0] * 0.5
    z, u, value, h, error = trajectory(density, 0.25)
    back, step = -u, np.full(len(z), 0.25)
    for _ in range(4):
        new = isokinetic_step(density, z, back, value, h, np.ones_like(z), step)
        z, back, value, h = new.z, new.u, new.value, new.h
        error += new.error
    np.testing.assert_allclose(z, start, atol=1e-9)
    np.testing.assert_allclose(error, 0, atol=1e-9)


def test_the_flow_against_a_solver():
    """Fine steps follow dz = u, du = (I - u u') grad log p / (d - 1)."""
    density = Banana(2)
    z, u, *_ = trajectory(density, 2.0**-10)
    first, direction = np.random.default_rng(0).standard_normal((2, 20, 2)) * 0.5
    unit_vectors(direction)

    def flow(_, y):
        v, (_, g) = y[2:], density.value_and_grad(y[None, :2])
        return np.concatenate([v, g[0] - v * (v @ g[0])])

    for c in range(3):
        y = np.concatenate([first[c], direction[c]])
        end = solve_ivp(flow, (0, 1), y, rtol=1e-10, atol=1e-11).y[:, -1]
        np.testing.assert_allclose(np.append(z[c], u[c]), end, atol=1e-5)


def test_a_mass_matrix_is_a_change_of_coordinates():
    """Steps in z with a factor are those of the density of L^-1 z."""
    scale = np.array([0.3, 2.0])

    class Scaled(Banana):
        def value_and_grad(self, x):
            value, gradient = super().value_and_grad(x * scale)
            return value, gradient * scale

    rng = np.random.default_rng(1)
    z, u = rng.standard_normal((2, 5, 2))
    unit_vectors(u)
    value, gradient = Banana(2).value_and_grad(z)
    h, step = gradient * scale, np.full(5, 0.2)
    diagonal = np.broadcast_to(scale, z.shape)
    dense = np.broadcast_to(np.diag(scale), (5, 2, 2))
    one = isokinetic_step(Scaled(2), z / scale, u, value, h, np.ones_like(z), step)
    for factor in (diagonal, dense):
        other = isokinetic_step(Banana(2), z, u, value, h, factor, step)
        np.testing.assert_allclose(other.z, one.z * scale, rtol=1e-12)
        np.testing.assert_allclose(other.error, one.error, atol=1e-12)


def test_points_without_density_have_an_infinite_error():
    class Broken(Toy):
        def value_and_grad(self, z):
            value, gradient = super().value_and_grad(z)
            gradient[0] = np.nan
            value[1] = -np.inf
            return value, gradient

    z, u = np.zeros((3, 2)), unit_vectors(np.ones((3, 2)))
    new = isokinetic_step(Broken(2), z, u, np.zeros(3), z, z + 1, np.ones(3))
    assert (new.value[:2] == -np.inf).all()
    assert (new.error[:2] == np.inf).all()
    assert np.isfinite(new.gradient).all()
    assert np.isfinite(new.error[2])


def test_directions_are_forgotten_over_the_length():
    """The mean cosine after a distance L is about 1 / e, for any step size."""
    rng = np.random.default_rng(0)
    for share in (0.05, 0.5):
        u = unit_vectors(rng.standard_normal((4000, 100)))
        first = u.copy()
        for _ in range(round(1 / share)):
            partial_refreshment(u, rng.standard_normal(u.shape), np.full(4000, share))
        assert (u * first).sum(1).mean() == pytest.approx(np.exp(-1), abs=0.01)
        np.testing.assert_allclose(np.linalg.norm(u, axis=1), 1.0, rtol=1e-12)


def test_a_turn_changes_volume_by_the_kinetic_energy():
    """On a circle, from differences of the angle: the factor of MAMS's acceptance."""
    angle, step, g = 0.7, 1e-6, np.array([[1.3, 0.4]])

    def turned(start):
        u = np.array([[np.cos(start), np.sin(start)]])
        kinetic = turn(u, g, np.array([0.8]))
        return np.arctan2(u[0, 1], u[0, 0]), kinetic[0]

    change = (turned(angle + step)[0] - turned(angle - step)[0]) / (2 * step)
    np.testing.assert_allclose(change, np.exp(-turned(angle)[1]), rtol=1e-8)
