"""Draw fewer points with the same result.

For each pixel column the first, the last, the lowest and the highest point are kept (M4: Jugel et al., VLDB 2014). A line through these
covers exactly the pixels of a line through all points, so that a spike of a single step is never lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
NEAR: Final = 24
"""Points on either side of an incident that are always drawn."""
NEAR_MOST: Final = 3000


def thin(x: Floats, y: Floats, columns: int, keep: Places | None = None) -> Places:
    """Return the ascending positions of the points to draw: M4 over *columns*, all of *keep*, and one gap per column in which *y* has any.

    *x* is ascending; at most ``5 * columns + len(keep)`` positions are returned.
    """
    if len(x) <= 5 * columns:
        return np.arange(len(x), dtype=np.int64)
    column = _columns(x, columns)
    is_finite = np.isfinite(y)
    finite, gaps = np.flatnonzero(is_finite), np.flatnonzero(~is_finite)
    chosen = [_corners(column[finite], y[finite], finite), gaps[_firsts(column[gaps])]]
    if keep is not None:
        chosen.append(keep)
    found: Places = np.unique(np.concatenate(chosen)).astype(np.int64)
    return found


def _columns(x: Floats, columns: int) -> Places:
    """Return the pixel column, of *columns*, that each *x* falls into."""
    span = float(x[-1] - x[0]) or 1.0
    positions: Places = np.minimum((x - x[0]) / span * columns, columns - 1).astype(np.int64)
    return positions


def _firsts(column: Places) -> Places:
    """Return the position of the first point of each column; *column* is ascending."""
    return np.flatnonzero(np.diff(column, prepend=-1)).astype(np.int64)


def _corners(column: Places, y: Floats, positions: Places) -> Places:
    """Return the positions of the first, last, lowest and highest point of each column."""
    if not len(positions):
        return positions
    starts = _firsts(column)
    ends = np.append(starts[1:], len(column)) - 1
    by_height = positions[np.lexsort((y, column))]
    return np.concatenate([positions[starts], positions[ends], by_height[starts], by_height[ends]])


def thin_pieces(pieces: Sequence[tuple[Floats, Floats]], columns: int, faults: Floats) -> tuple[Floats, Floats]:
    """Return one line through all *pieces* of ascending x, each thinned to its part of the *columns*, with a gap after each.

    Points near *faults* are all kept, unless they are more than `NEAR_MOST`.
    """
    if len(faults) * (2 * NEAR + 1) > NEAR_MOST:
        faults = faults[:0]
    span = sum(float(x[-1] - x[0]) for x, _ in pieces if len(x)) or 1.0
    xs, ys = [], []
    for x, y in pieces:
        if len(x):
            part = 1 + int(columns * float(x[-1] - x[0]) / span)
            positions = thin(x, y, part, around(x, faults, NEAR, NEAR_MOST))
            xs += [x[positions], x[-1:]]
            ys += [y[positions], np.array([np.nan])]
    return (np.concatenate(xs), np.concatenate(ys)) if xs else (np.empty(0), np.empty(0))


def around(x: Floats, centres: Floats, reach: int, most: int) -> Places:
    """Return the positions within *reach* points of each of *centres* in ascending *x*, or none if they are more than *most*."""
    if not len(x) or not len(centres):
        return np.empty(0, dtype=np.int64)
    middle = np.searchsorted(x, centres)
    near = np.unique((middle[:, None] + np.arange(-reach, reach + 1)[None, :]).ravel())
    near = near[(near >= 0) & (near < len(x))]
    return near.astype(np.int64) if len(near) <= most else np.empty(0, dtype=np.int64)


def smoothed(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """Return one point per column, the mean x and the median y of its finite points, with a gap at empty columns."""
    is_finite = np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    if not len(x):
        return x, y
    column = _columns(x, columns)
    starts = _firsts(column)
    middles = np.array([piece.mean() for piece in np.split(x, starts[1:])])
    heights = np.array([np.median(piece) for piece in np.split(y, starts[1:])])
    empty = np.flatnonzero(np.diff(column[starts]) > 2) + 1  # noqa: PLR2004 (one empty column may be chance)
    return np.insert(middles, empty, middles[empty]), np.insert(heights, empty, np.nan)
