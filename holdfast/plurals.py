"""Count things and name ranks in texts for people: ``1 rank``, ``2 ranks``, ``ranks 0–3``. Standard library only."""  # noqa: RUF002 (a range)

from __future__ import annotations

from collections.abc import Iterable


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return *number* with the noun in singular or plural; with *many* the words may go on: ``1 rank runs``, ``2 ranks run``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def all_of(number: int, one: str, many: str | None = None) -> str:
    """Return `plural` of the *number* that there are: ``all 2 ranks``, but ``1 rank``."""
    return ("all " if number > 1 else "") + plural(number, one, many)


def ranges(numbers: Iterable[int]) -> str:
    """Return a set of numbers as ranges, such as ``0–3, 7``; empty where there are none."""  # noqa: RUF002 (a range)
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)  # noqa: RUF001 (a range)


def named_ranks(numbers: Iterable[int]) -> str:
    """Return ranks with their noun: ``rank 3``, ``ranks 0–3``; empty where there are none."""  # noqa: RUF002 (a range)
    found = set(numbers)
    return f"{'rank' if len(found) == 1 else 'ranks'} {ranges(found)}" if found else ""
