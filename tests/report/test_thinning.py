"""Fewer points, the same picture: claims on any curve."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.report.pages.charts.thinning import Floats, around, smoothed, thin, thin_pieces

heights = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=400)
columns = st.integers(min_value=1, max_value=30)


def _curve(values: list[float], seed: int) -> tuple[Floats, Floats]:
    """Return ascending x with gaps of chance, and *values* over it."""
    x = np.cumsum(np.random.default_rng(seed).choice([0.0, 0.1, 1.0, 50.0], size=len(values)))
    y = np.array(values)
    return x, np.where(np.isfinite(y), y, np.nan)


@settings(deadline=None)
@given(values=heights, columns=columns, seed=st.integers(0, 5))
def test_the_extremes_and_both_ends_of_every_curve_are_kept(values: list[float], columns: int, seed: int) -> None:
    """No spike is lost, however few points are drawn, and nothing is drawn twice or out of order."""
    x, y = _curve(values, seed)
    places = thin(x, y, columns)
    assert len(places) <= max(len(x), 1)
    assert len(places) <= 5 * columns
    assert (np.diff(places) > 0).all()
    assume(np.isfinite(y).any())
    finite = np.flatnonzero(np.isfinite(y))
    drawn = y[places][np.isfinite(y[places])]
    assert drawn.min() == np.nanmin(y)
    assert drawn.max() == np.nanmax(y)
    assert {int(finite[0]), int(finite[-1])} <= set(places.tolist())


@settings(deadline=None)
@given(values=heights, columns=columns, seed=st.integers(0, 5))
def test_every_pixel_column_keeps_its_own_extremes(values: list[float], columns: int, seed: int) -> None:
    """That is what makes the thinned line cover the same pixels."""
    x, y = _curve(values, seed)
    assume(x[-1] > x[0])
    places = thin(x, y, columns)
    column = np.minimum((x - x[0]) / (x[-1] - x[0]) * columns, columns - 1).astype(int)
    for one in np.unique(column):
        whole, kept = y[column == one], y[places][column[places] == one]
        assert np.isnan(kept).any() == np.isnan(whole).any() or len(x) <= 5 * columns
        if np.isfinite(whole).any():
            assert (np.nanmin(kept), np.nanmax(kept)) == (np.nanmin(whole), np.nanmax(whole))


@given(keep=st.lists(st.integers(0, 999), max_size=30))
def test_what_must_be_kept_is_kept(keep: list[int]) -> None:
    """The neighbourhood of an incident is drawn point by point."""
    x = np.arange(1000.0)
    places = thin(x, np.sin(x), 10, np.array(keep, dtype=np.int64))
    assert set(keep) <= set(places.tolist())
    assert len(places) <= 50 + len(keep)


def test_the_neighbourhood_of_an_incident_is_whole_even_among_a_million_steps() -> None:
    """Each step within reach of the fault is there, and the whole is still small."""
    x = np.arange(1_000_000.0)
    y = 1 / (x + 1)
    y[123_456] = 9.0
    drawn, heights = thin_pieces([(x, y)], 900, np.array([500_000.0]))
    assert len(drawn) < 5000
    assert set(np.arange(499_980.0, 500_020.0)) <= set(drawn.tolist())
    assert np.nanmax(heights) == 9.0


def test_the_neighbourhoods_of_too_many_incidents_are_left_to_the_columns() -> None:
    """A page has its size, whatever happened to the job."""
    x = np.arange(100_000.0)
    assert len(around(x, np.arange(0.0, 100_000.0, 50), 24, 3000)) == 0
    assert len(around(x, np.array([-5.0, 0.0, 2e5]), 3, 3000)) == 3 + 1 + 3


def test_a_line_through_several_pieces_has_a_gap_after_each() -> None:
    """What lies between two generations is no step."""
    one, none, other = (np.array([0.0, 1.0]), np.array([5.0, 4.0])), (np.empty(0), np.empty(0)), (np.array([9.0]), np.array([3.0]))
    x, y = thin_pieces([one, none, other], 100, np.empty(0))
    assert x.tolist() == [0.0, 1.0, 1.0, 9.0, 9.0]
    assert [None if math.isnan(height) else height for height in y] == [5.0, 4.0, None, 3.0, None]


def test_medians_are_not_moved_by_a_spike_and_leave_long_silences_empty() -> None:
    """The strong line shows where the loss goes; the pale one behind it shows the spike."""
    x = np.concatenate([np.arange(0.0, 100.0), np.arange(900.0, 1000.0)])
    y = np.full(200, 2.0)
    y[50] = 1e6
    _, heights = smoothed(x, y, 50)
    assert set(heights[np.isfinite(heights)].tolist()) == {2.0}
    assert np.isnan(heights).sum() == 1
