"""Corruptions of small grey images, after the fifteen kinds of MNIST-C (Mu and Gilmer 2019).

Implemented from their names, not with the code of that benchmark: kinds and approximate strengths
agree, pixels do not. Each corruption maps images in [0, 1], shape (n, h, w), and a generator to
images of the same shape in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import ndimage

__all__ = ["CORRUPTIONS", "jitter", "warp"]

Images = np.ndarray
Corruption = Callable[[Images, np.random.Generator], Images]


# --- shapes ---------------------------------------------------------------------------------------


def warp(images: Images, matrices: np.ndarray, shifts: np.ndarray | None = None) -> Images:
    """Apply an affine map around the centre of each image; pixels from outside are black.

    Args:
        images: (n, h, w).
        matrices: from positions in the new image to positions in the old one, (n, 2, 2).
        shifts: in pixels, added to positions in the old image, (n, 2).
    """
    center = (np.array(images.shape[1:]) - 1) / 2
    shifts = np.zeros((len(images), 2)) if shifts is None else shifts
    return np.stack(
        [
            ndimage.affine_transform(image, matrix, center - matrix @ center + shift, order=1)
            for image, matrix, shift in zip(images, matrices, shifts, strict=True)
        ]
    ).clip(0, 1)


def _rotations(angles: np.ndarray) -> np.ndarray:
    c, s = np.cos(angles), np.sin(angles)
    return np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], -2)


def _signs(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.choice([-1.0, 1.0], n)


def _rotate(images: Images, rng: np.random.Generator) -> Images:
    degrees = rng.uniform(20, 40, len(images)) * _signs(len(images), rng)
    return warp(images, _rotations(np.radians(degrees)))


def _scale(images: Images, rng: np.random.Generator) -> Images:
    factors = rng.uniform(1.4, 1.9, len(images))
    return warp(images, factors[:, None, None] * np.eye(2))


def _shear(images: Images, rng: np.random.Generator) -> Images:
    matrices = np.tile(np.eye(2), (len(images), 1, 1))
    matrices[:, 1, 0] = rng.uniform(0.4, 0.7, len(images)) * _signs(len(images), rng)
    return warp(images, matrices)


def _translate(images: Images, rng: np.random.Generator) -> Images:
    shifts = rng.uniform(3, 6, (len(images), 2)) * _signs(2 * len(images), rng).reshape(-1, 2)
    return warp(images, np.tile(np.eye(2), (len(images), 1, 1)), shifts)


def jitter(images: Images, rng: np.random.Generator) -> Images:
    """Rotate, scale, shift and dim images slightly and add noise, for augmentation."""
    n = len(images)
    matrices = (
        _rotations(np.radians(rng.uniform(-25, 25, n))) * rng.uniform(0.8, 1.3, n)[:, None, None]
    )
    found = warp(images, matrices, rng.uniform(-3, 3, (n, 2)))
    found = found * rng.uniform(0.6, 1, n)[:, None, None] + rng.uniform(0, 0.3, n)[:, None, None]
    noise = rng.normal(size=images.shape) * rng.uniform(0, 0.2, n)[:, None, None]
    return (found + noise).clip(0, 1)


# --- noise and blur -------------------------------------------------------------------------------


def _shot_noise(images: Images, rng: np.random.Generator) -> Images:
    return (rng.poisson(5 * images) / 5).clip(0, 1)


def _impulse_noise(images: Images, rng: np.random.Generator) -> Images:
    u = rng.random(images.shape)
    return np.where(u < 0.1, 0.0, np.where(u > 0.9, 1.0, images))


def _glass_blur(images: Images, rng: np.random.Generator) -> Images:
    """Swap neighbouring pixels between two blurs."""
    n, h, w = images.shape
    found = ndimage.gaussian_filter(images, (0, 0.7, 0.7))
    rows, columns = np.mgrid[:h, :w]
    for _ in range(2):
        near = rng.integers(-1, 2, (2, n, h, w))
        found = found[
            np.arange(n)[:, None, None],
            (rows + near[0]).clip(0, h - 1),
            (columns + near[1]).clip(0, w - 1),
        ]
    return ndimage.gaussian_filter(found, (0, 0.7, 0.7)).clip(0, 1)


def _motion_blur(images: Images, rng: np.random.Generator) -> Images:
    """Average along a short line in a random direction."""
    angles, offsets = rng.uniform(0, np.pi, len(images)), np.linspace(-4, 4, 9)
    return np.stack(
        [
            np.mean(
                [ndimage.shift(image, (r * np.sin(a), r * np.cos(a)), order=1) for r in offsets], 0
            )
            for image, a in zip(images, angles, strict=True)
        ]
    ).clip(0, 1)


# --- light and overlays ---------------------------------------------------------------------------


def _brightness(images: Images, rng: np.random.Generator) -> Images:
    return (images + rng.uniform(0.4, 0.7, (len(images), 1, 1))).clip(0, 1)


def _fog(images: Images, rng: np.random.Generator) -> Images:
    """Add clouds of several sizes."""
    clouds = sum(
        size * ndimage.gaussian_filter(rng.normal(size=images.shape), (0, size, size))
        for size in (2, 4, 8)
    )
    low, high = (f(clouds, axis=(1, 2), keepdims=True) for f in (np.min, np.max))
    return (0.5 * images + 0.7 * (clouds - low) / (high - low)).clip(0, 1)


def _spatter(images: Images, rng: np.random.Generator) -> Images:
    """Add bright drops."""
    drops = ndimage.gaussian_filter(rng.normal(size=images.shape), (0, 1, 1))
    return np.where(drops > np.quantile(drops, 0.9, axis=(1, 2), keepdims=True), 0.8, images)


def _stripe(images: Images, rng: np.random.Generator) -> Images:
    """Invert the middle of each image."""
    found, w = images.copy(), images.shape[2]
    found[:, :, w // 4 : 3 * w // 4] = 1 - found[:, :, w // 4 : 3 * w // 4]
    return found


def _canny_edges(images: Images, rng: np.random.Generator) -> Images:
    """Mark pixels where the gradient of a smoothed image has a local maximum."""
    smooth = ndimage.gaussian_filter(images, (0, 1, 1))
    dy, dx = np.gradient(smooth, axis=(1, 2))
    slope, along_y = np.hypot(dy, dx), np.abs(dy) > np.abs(dx)
    steps = {axis: np.maximum(np.roll(slope, 1, axis), np.roll(slope, -1, axis)) for axis in (1, 2)}
    ridge = slope >= np.where(along_y, steps[1], steps[2])
    return (ridge & (slope > 0.3 * slope.max((1, 2), keepdims=True))).astype(float)


def _lines(images: Images, points: np.ndarray, dotted: bool) -> Images:
    """Draw polygonal lines through points (n, k, 2) over the images."""
    found, (h, w) = images.copy(), images.shape[1:]
    t = np.linspace(0, 1, 2 * (h + w))
    for image, corners in zip(found, points, strict=True):
        for a, b in zip(corners[:-1], corners[1:], strict=True):
            line = a + t[:, None] * (b - a)
            if dotted:
                line = line[(np.linalg.norm(line - a, axis=1) % 4) < 2]
            y, x = np.rint(line).astype(int).T
            inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
            image[y[inside], x[inside]] = 1
    return found


def _dotted_line(images: Images, rng: np.random.Generator) -> Images:
    n, h, w = images.shape
    ends = np.stack([rng.uniform(0, h - 1, (n, 2)), np.tile([0.0, w - 1.0], (n, 1))], -1)
    return _lines(images, ends, True)


def _zigzag(images: Images, rng: np.random.Generator) -> Images:
    n, h, w = images.shape
    x = np.tile(np.linspace(0, w - 1, 8), (n, 1))
    y = rng.uniform(0.3, 0.7, (n, 1)) * h + 3 * (-1.0) ** np.arange(8)
    return _lines(images, np.stack([y, x], -1), False)


CORRUPTIONS: dict[str, Corruption] = {
    "brightness": _brightness,
    "canny edges": _canny_edges,
    "dotted line": _dotted_line,
    "fog": _fog,
    "glass blur": _glass_blur,
    "impulse noise": _impulse_noise,
    "motion blur": _motion_blur,
    "rotate": _rotate,
    "scale": _scale,
    "shear": _shear,
    "shot noise": _shot_noise,
    "spatter": _spatter,
    "stripe": _stripe,
    "translate": _translate,
    "zigzag": _zigzag,
}
"""Corruptions by name, in the order of MNIST-C."""
