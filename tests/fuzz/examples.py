"""Which inputs are drawn: in the suite the same hundred or so in every run, by hand or at night ``FUZZ_EXAMPLES`` new ones.

A failure prints the input, and the line (`@reproduce_failure`) that tries it again.
"""

from __future__ import annotations

import os
from typing import Any, Final

from hypothesis import HealthCheck, settings
from hypothesis import strategies as some

WANTED: Final = int(os.environ.get("FUZZ_EXAMPLES") or 0)
SOCKETS: Final = settings(
    deadline=None,
    derandomize=not WANTED,  # a change that breaks nothing does not fail because of what another run has not drawn
    print_blob=True,
    max_examples=WANTED or 150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
SLOW: Final = settings(SOCKETS, max_examples=WANTED or 50)
"""Where one input takes a tenth of a second."""

ANYTHING: Final[some.SearchStrategy[Any]] = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=6),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
"""Whatever JSON holds, NaN and infinities too."""


@some.composite
def mutated(draw: some.DrawFn, whole: bytes) -> bytes:
    """Draw *whole* with some bytes changed, cut out, doubled or put in."""
    data = bytearray(whole)
    for _ in range(draw(some.integers(1, 4))):
        place = draw(some.integers(0, max(0, len(data) - 1)))
        end = min(len(data), place + draw(some.integers(1, 12)))
        match draw(some.sampled_from(("change", "cut", "double", "insert"))):
            case "change":
                data[place:end] = draw(some.binary(min_size=end - place, max_size=end - place))
            case "cut":
                del data[place:end]
            case "double":
                data[place:place] = data[place:end]
            case _:
                data[place:place] = draw(some.binary(min_size=1, max_size=8))
    return bytes(data)
