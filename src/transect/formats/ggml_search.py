"""Search of scales for groups of numbers with small integer codes, minimizing the weighted error.

    symmetric:       x ~ scale * code               code in -half .. half - 1
    with a minimum:  x ~ scale * code + minimum     code in 0 .. top

Each candidate stretches the range of a group a little or cuts it a little, rounds, and then takes the scale (and the
minimum) that fit those codes best, which is linear least squares with one or two unknowns. The best candidate of each
group is kept. With the mean square of a matrix's inputs as weights the error is that of its product, were inputs
uncorrelated.

Shapes: n groups of g numbers, float32; weights ``[n, g]``, or ``[1, g]``, are at least 0.
"""

from __future__ import annotations

import numpy as np

_STRETCH = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)
"""Number of steps by which a candidate's range is larger (or smaller) than the group's."""


def inverse(scale: np.ndarray) -> np.ndarray:
    """Return 1 / scale, and 0 if that is not finite (all values of the group equal)."""
    with np.errstate(divide="ignore", over="ignore"):
        found = np.float32(1) / scale
    return np.where(np.isfinite(found), found, np.float32(0))


def symmetric_scale(x: np.ndarray, weight: np.ndarray, half: int, *, signed: bool = True) -> np.ndarray:
    """Find the scales ``[n, 1]`` of ``[n, g]`` numbers. A scale is negative if the number of largest magnitude is
    positive, which then becomes code -half; never unless ``signed``."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    peak = peak if signed else -np.abs(peak)
    best = peak / np.float32(-half)
    gain = np.full(best.shape, -1, np.float32)
    for stretch in _STRETCH:
        code = np.rint(x * (np.float32(-(half + stretch)) * inverse(peak))).clip(-half, half - 1)
        weighted = weight * code
        along = (weighted * x).sum(1, keepdims=True)
        squares = (weighted * code).sum(1, keepdims=True)
        fitted = along * inverse(squares)
        better = along * fitted > gain  # what the fit takes off the sum of weighted squares
        best = np.where(better & (squares > 0), fitted, best)
        gain = np.where(better, along * fitted, gain)
    return best


def affine_scale(x: np.ndarray, weight: np.ndarray, top: int, *, below: bool) -> tuple[np.ndarray, np.ndarray]:
    """Find (scale, minimum), both ``[n, 1]``, of ``[n, g]`` numbers. ``below``: the minimum is 0 or less, as in the K
    types."""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    if below:
        low = np.minimum(low, np.float32(0))
    span = high - low
    scale, minimum = span / np.float32(top), low
    least = np.full(low.shape, np.inf, np.float32)
    weight = np.broadcast_to(weight, x.shape)
    total, along_x = weight.sum(1, keepdims=True), (weight * x).sum(1, keepdims=True)
    for stretch in _STRETCH:
        code = np.rint((x - low) * (np.float32(top + stretch) * inverse(span))).clip(0, top)
        weighted = weight * code
        first, second = weighted.sum(1, keepdims=True), (weighted * code).sum(1, keepdims=True)
        product = (weighted * x).sum(1, keepdims=True)
        bend = total * second - first * first
        # Codes all alike leave nothing but rounding errors here, and any scale fits them with some minimum.
        bend = np.where(bend > 1e-5 * total * second, inverse(bend), np.float32(0))
        a = (total * product - first * along_x) * bend
        b = (second * along_x - first * product) * bend
        if below:
            above = b > 0
            a, b = np.where(above, product * inverse(second), a), np.where(above, np.float32(0), b)
        error = (weight * np.square(a * code + b - x)).sum(1, keepdims=True)
        better = (error < least) & (a > 0)
        scale, minimum = np.where(better, a, scale), np.where(better, b, minimum)
        least = np.where(better, error, least)
    return scale, minimum
