"""One test for a whole table of cases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Do as `pytest.mark.parametrize` does, but in one test, which goes through all cases and then reports every one that failed.

    For tables of hundreds of cases that take microseconds each: as a test of its own, a case takes a hundred times as long.
    """
    parameters, listed = [name.strip() for name in names.split(",")], list(cases)
    assert listed, "a table without cases claims nothing"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def through_all(**fixtures: Any) -> None:
            failures = []
            for case in listed:
                values = case if len(parameters) > 1 else (case,)
                try:
                    test(**fixtures, **dict(zip(parameters, values, strict=True)))
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001 (each case is tried, whatever another came to)
                    failures.append(of_case(error, case))
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(listed)} cases failed", failures)

        given = inspect.signature(test)
        left = [one for name, one in given.parameters.items() if name not in parameters]
        through_all.__signature__ = given.replace(parameters=left)  # type: ignore[attr-defined]  # pytest takes the rest for fixtures
        return through_all

    return decorate


def each_named(name: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Do as `pytest.mark.parametrize` does, with the cases by the names that their tests have."""
    return pytest.mark.parametrize(name, cases.values(), ids=cases)


def of_case(error: BaseException, case: object) -> Exception:
    """Return the failure of one case: pytest's own outcomes are no `Exception`, and would end the test at this case."""
    if isinstance(error, pytest.skip.Exception):
        failure: Exception = AssertionError(f"a case may not be skipped, as nobody would see it: {error}. Leave it out of the table")
        failure.__cause__ = error
    elif isinstance(error, pytest.fail.Exception):
        failure = AssertionError(str(error)).with_traceback(error.__traceback__)
    else:
        assert isinstance(error, Exception)
        failure = error
    failure.add_note(f"in the case {case!r:.500}")
    return failure
