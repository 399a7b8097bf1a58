"""How numbers, times and strangers' texts are put into words."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.history.models import Incident
from holdfast.report.case import evidence_of
from holdfast.report.text import wording
from tests.mentions import mentions


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, wording.NOTHING), (math.nan, wording.NOTHING), (math.inf, wording.NOTHING), (0, "0 s"), (0.0004, "0.4 ms"),
        (0.0214, "21 ms"),
        (0.99, "990 ms"), (0.9996, "1.00 s"), (2.004, "2.00 s"), (9.996, "10.0 s"), (59.94, "59.9 s"), (59.96, "60.0 s"),
        (61, "1 min 01 s"),
        (3599.6, "1 h 00 min"), (7260, "2 h 01 min"), (86399.9, "1 d 00 h"), (90_000, "1 d 01 h"), (-2, "−2.00 s"),  # noqa: RUF001 (a minus)
    ],
)  # fmt: skip
def test_a_duration_has_the_unit_a_person_would_choose(seconds: float | None, words: str) -> None:
    """Never more digits than anybody reads."""
    assert wording.duration(seconds) == words


@pytest.mark.parametrize(
    ("part", "words"),
    [(None, wording.NOTHING), (0.0, "0.0%"), (0.7849, "78.5%"), (0.99951, "99.951%"), (0.9999999, "99.999%"), (1.0, "100.0%")],
)
def test_a_share_is_all_of_it_only_when_it_is(part: float | None, words: str) -> None:
    """A job that lost a minute in a month did not lose nothing."""
    assert wording.share(part) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [(None, wording.NOTHING), (0, "0 B"), (999, "999 B"), (13_654_021, "13.7 MB"), (2 * 10**12, "2 TB"), (10**16, "10,000 TB")],
)
def test_a_size_has_three_digits(number: int | None, words: str) -> None:
    """In decimal units, as disks are sold."""
    assert wording.size(number) == words


def test_what_a_recovery_did_is_described_in_sentences() -> None:
    """Groups, state, phases, and what the warm-up had not foreseen; nothing of a recovery that was none."""
    facts = {
        "source": "live", "seconds": {"meet": 0.012, "groups": 0.02, "load": 0.1, "step": 0.0},
        "rebuilt": 2, "kept": 5, "bytes": 113_000_000,
        "bandwidth": 1.2e9, "interfaces": ["10.0.0.1"],
        "coverage": {"3": {"calls": 9, "foreseen": 9, "first_met": []}, "7": {"calls": 4, "foreseen": 3, "first_met": ["0 barrier"]}},
    }  # fmt: skip
    groups, state, times, *warm_up = wording.recovery_details(facts)
    assert mentions(groups, "2 process groups", "5 kept")
    assert mentions(state, "113 MB", "surviving ranks", "1.2 GB/s", "10.0.0.1")
    assert mentions(times, "12 ms", "20 ms", "100 ms")
    for line, named in zip(warm_up, (("rank 3", "9 of 9 calls"), ("rank 7", "3 of 4 calls")), strict=True):
        assert mentions(line, *named)
    assert "checkpoint" in wording.recovery_details({**facts, "bytes": 0, "source": "checkpoint"})[1]
    assert wording.recovery_details(None) == []


@given(numbers=st.sets(st.integers(0, 40)))
def test_ranks_are_written_as_ranges_that_name_each_once(numbers: set[int]) -> None:
    """The ranges, read back, are the ranks."""
    words = wording.ranks(numbers)
    read = [int(end) for part in words.split(", ") for end in part.split("–") if end]  # noqa: RUF001 (a range)
    if not numbers:
        assert words == wording.NOTHING
    else:
        assert read == sorted(set(read))
        assert {number for number in numbers if number - 1 not in numbers or number + 1 not in numbers} == set(read)


@given(text=st.text())
def test_visible_text_has_nothing_hidden_and_is_left_alone_a_second_time(text: str) -> None:
    """No control, no override of direction, no lone surrogate: and it can be encoded."""
    shown = wording.visible(text)
    assert all(unicodedata.category(char) not in {"Cc", "Cf", "Cs"} or char in "\n\t\u200d" for char in shown)
    assert wording.visible(shown) == shown
    shown.encode("utf-8")


def test_ordinary_text_is_not_touched() -> None:
    """Words of any language, emoji and line breaks are no threat."""
    text = "Größe 步 нет\n\t👩‍🚀 fi ½"
    assert wording.visible(text) == text


@given(text=st.text(), limit=st.integers(4, 60))
def test_clipped_text_keeps_both_ends_and_says_how_much_is_missing(text: str, limit: int) -> None:
    """The last line of a traceback is the one that matters, the first says whose it is."""
    short = wording.clipped(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        assert short.startswith(text[: limit // 4])
        assert short.endswith(text[-(limit - limit // 4) :])
        assert f"{len(text) - limit:,} characters left out" in short


def test_evidence_is_shown_in_order_and_without_empty_values() -> None:
    """Short values stand in a line, tracebacks and lists of lines in a block."""
    evidence = {
        "quote": "gone",
        "signal": 9,
        "peer_lost": False,
        "step": None,
        "detail": "",
        "ranks": [1, 2],
        "lines": ["a", "b"],
        "more": {"x": 1},
    }
    found = {piece.name: (piece.text, piece.block) for piece in evidence_of(evidence)}
    assert found == {
        "quote": ("gone", False),
        "signal": ("9", False),
        "peer lost": ("no", False),
        "ranks": ("1, 2", False),
        "lines": ("a\nb", True),
        "more": ('{\n  "x": 1\n}', True),
    }


def test_a_fault_in_one_line_has_no_two_full_stops() -> None:
    """What was seen may be a sentence or not."""
    assert wording.fault_line("T", "q", "c") == wording.fault_line("T", "q.", "c") == "T: q. Cure: c"


@pytest.mark.parametrize(
    ("size", "facts", "words"),
    [
        (3, None, "3 ranks"),
        (1, {"roles": []}, "1 rank"),
        (3, {"width": 3}, "3 ranks"),
        (2, {"width": 3}, "2 of 3 ranks"),
        (3, {"width": 0}, "3 ranks"),
    ],
)
def test_missing_ranks_are_counted_with_the_present_ones(size: int, facts: dict[str, object] | None, words: str) -> None:
    """Whoever reads the width of a job sees at once that it is not its full one."""
    assert wording.rank_count(size, facts) == words


def test_ranks_that_keep_their_process_are_counted_not_named() -> None:
    """Rank 0 alone is one of them."""
    assert mentions(wording.kept_ranks({"kept": [0]}), 1, "same process")
    assert mentions(wording.kept_ranks({"kept": [3, 5, 7]}), 3, "same process")
    assert wording.kept_ranks({"kept": []}) == wording.kept_ranks(None) == ""


def test_an_incident_is_one_line_when_it_opens_and_one_when_it_closes() -> None:
    """With what was done and what it cost; one that failed the job claims no recovery."""
    one = Incident(
        job_id="j", number=2, kind="worker-sigkill", target="rank 1 on node-1", fault_at=10.0, detected_at=10.012, generation_before=1
    )
    assert mentions(wording.incident_opened(one), "incident 2", "worker-sigkill", "rank 1", "node-1", "12 ms")
    one.outcome, one.action, one.downtime_s, one.steps_lost, one.generation_after = "recovered", "replace-ranks", 0.259, 0, 2
    assert mentions(wording.incident_closed(one), "incident 2", "recovered", "replace-ranks", "259 ms", "no step", "generation 2")
    one.outcome, one.steps_lost, one.generation_after = "failed", None, None
    assert mentions(wording.incident_closed(one), "incident 2", "failed")
    assert "recovered" not in wording.incident_closed(one)
