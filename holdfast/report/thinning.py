"""Fewer points, the same picture.

For each pixel column the first, the last, the lowest and the highest point stay (M4: Jugel et al., VLDB 2014). A line drawn
through these covers exactly the pixels that a line through all points covers, so a spike one step long is never lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
NEAR: Final = 24
"""Points on either side of an incident that are drawn, however many there are."""
NEAR_MOST: Final = 3000


def thin(x: Floats, y: Floats, columns: int, keep: Places | None = None) -> Places:
    """Return the ascending places of the points to draw: M4 over *columns*, all of *keep*, and one gap a column where *y* has any.

    *x* ascends; at most ``5 * columns + len(keep)`` places come back.
    """
    if len(x) <= 5 * columns:
        return np.arange(len(x), dtype=np.int64)
    column = _columns(x, columns)
    whole = np.isfinite(y)
    finite, gaps = np.flatnonzero(whole), np.flatnonzero(~whole)
    chosen = [_corners(column[finite], y[finite], finite), gaps[_firsts(column[gaps])]]
    if keep is not None:
        chosen.append(keep)
    found: Places = np.unique(np.concatenate(chosen)).astype(np.int64)
    return found


def _columns(x: Floats, columns: int) -> Places:
    """Return the pixel column, of *columns*, that each *x* falls into."""
    span = float(x[-1] - x[0]) or 1.0
    places: Places = np.minimum((x - x[0]) / span * columns, columns - 1).astype(np.int64)
    return places


def _firsts(column: Places) -> Places:
    """Return the place of the first point of each column; *column* ascends."""
    return np.flatnonzero(np.diff(column, prepend=-1)).astype(np.int64)


def _corners(column: Places, y: Floats, places: Places) -> Places:
    """Return the places of the first, last, lowest and highest point of each column."""
    if not len(places):
        return places
    starts = _firsts(column)
    ends = np.append(starts[1:], len(column)) - 1
    by_height = places[np.lexsort((y, column))]
    return np.concatenate([places[starts], places[ends], by_height[starts], by_height[ends]])


def thin_pieces(pieces: Sequence[tuple[Floats, Floats]], columns: int, faults: Floats) -> tuple[Floats, Floats]:
    """Return one line through all *pieces* of ascending x, each thinned to its part of the *columns*, with a gap after each.

    What lies near *faults* is drawn point by point, unless that were more than `NEAR_MOST` points.
    """
    if len(faults) * (2 * NEAR + 1) > NEAR_MOST:
        faults = faults[:0]
    whole = sum(float(x[-1] - x[0]) for x, _ in pieces if len(x)) or 1.0
    xs, ys = [], []
    for x, y in pieces:
        if len(x):
            part = 1 + int(columns * float(x[-1] - x[0]) / whole)
            places = thin(x, y, part, around(x, faults, NEAR, NEAR_MOST))
            xs += [x[places], x[-1:]]
            ys += [y[places], np.array([np.nan])]
    return (np.concatenate(xs), np.concatenate(ys)) if xs else (np.empty(0), np.empty(0))


def around(x: Floats, centres: Floats, reach: int, most: int) -> Places:
    """Return the places within *reach* points of each of *centres* in ascending *x*, or none when they would be more than *most*."""
    if not len(x) or not len(centres):
        return np.empty(0, dtype=np.int64)
    middle = np.searchsorted(x, centres)
    near = np.unique((middle[:, None] + np.arange(-reach, reach + 1)[None, :]).ravel())
    near = near[(near >= 0) & (near < len(x))]
    return near.astype(np.int64) if len(near) <= most else np.empty(0, dtype=np.int64)


def smoothed(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """Return one point a column, the mean place and the median height of its finite points, with a gap where columns are empty."""
    whole = np.isfinite(y)
    x, y = x[whole], y[whole]
    if not len(x):
        return x, y
    column = _columns(x, columns)
    starts = _firsts(column)
    middles = np.array([piece.mean() for piece in np.split(x, starts[1:])])
    heights = np.array([np.median(piece) for piece in np.split(y, starts[1:])])
    empty = np.flatnonzero(np.diff(column[starts]) > 2) + 1  # noqa: PLR2004 (one empty column may be chance)
    return np.insert(middles, empty, middles[empty]), np.insert(heights, empty, np.nan)
