"""Notes that come again are one line with a count; what differs in more than its measured values stays apart."""

from __future__ import annotations

from holdfast.history.models import JobEvent
from holdfast.report.notes import Note, cause_of, collapsed

WATCHED = "rank {rank} on node-{rank} (host-overloaded): watched; staying costs {ms} ms a step x {left:,} steps = {ms} s"


def notes(*texts: str, nodes: tuple[str, ...] = ()) -> list[Note]:
    """Return what is left of these texts, one a second."""
    return collapsed([JobEvent(job_id="j", at=float(at), text=text) for at, text in enumerate(texts)], nodes)


def test_a_note_that_came_again_with_other_numbers_is_counted() -> None:
    """It keeps its first text, and says when it came last."""
    eleven = [WATCHED.format(rank=1, ms=15 + number, left=5739 - number) for number in range(11)]
    (note,) = notes(*eleven)
    assert (note.text, note.times, note.at, note.last, note.repeated) == (eleven[0], 11, 0.0, 10.0, "11 times")


def test_a_note_about_another_node_is_the_same_cause_and_names_it() -> None:
    """Where the nodes are known; without them it is a note of its own."""
    three = [WATCHED.format(rank=rank, ms=15, left=5000) for rank in range(3)]
    assert len(notes(*three)) == 3
    (note,) = notes(*three, nodes=("node-0", "node-1", "node-2"))
    assert note.repeated == "3 times, also of node-1, node-2"


def test_notes_that_differ_in_words_or_in_whom_they_name_stay_apart() -> None:
    """Numbers of ranks, questions and incidents are names."""
    assert len(notes("approval 1: may n1 be isolated?", "approval 2: may n1 be isolated?", "spare n3 is gone", "spare n3 is released")) == 4
    assert cause_of("rank 3 waited 1.5 s") == cause_of("rank 3 waited 20 ms") != cause_of("rank 4 waited 20 ms")
