"""What the processes of a generation know about each other."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.config.worker_env import rank_environments, seat_environment
from holdfast.control.state.rank_table import RankTable, SpareLocalRanks

FIRST = RankTable.fresh(3, {"a": [0, 1], "b": [2, 3]}, ("10.0.0.1", 4711))


def test_a_fresh_table_has_only_new_processes_which_have_all_joined() -> None:
    """They start together, so none waits for the state of another."""
    assert FIRST.incarnations == {0: 3, 1: 3, 2: 3, 3: 3}
    assert FIRST.places == {0: 0, 1: 1, 2: 0, 3: 1}
    assert (FIRST.serve, FIRST.joined, FIRST.changed, FIRST.kept) == (0, 3, [], ())


def test_a_replaced_rank_takes_the_free_local_rank_on_its_node() -> None:
    """Running processes keep theirs: two processes must not share a device."""
    after = FIRST.after(4, {"a": [1, 2], "b": [3]}, frozenset({2}))
    assert after.places == {1: 1, 2: 0, 3: 1}
    moved = FIRST.after(4, {"b": [2, 3, 0], "a": [1]}, frozenset({0}))
    assert moved.places[0] == 2
    back = moved.after(5, {"a": [1, 0], "b": [2, 3]}, frozenset({0}))
    assert back.places[0] == 0


def test_a_hot_spare_keeps_its_local_rank_in_the_rank_that_it_takes() -> None:
    """Its GPU is that of its local rank: with another one a fresh process would start on the GPU of another hot spare."""
    spares = SpareLocalRanks(taking={2: 1, 3: 0}, per_node=2)
    assert FIRST.after(4, {"a": [0, 1], "s": [2, 3]}, frozenset({2, 3}), spares).places == {0: 0, 1: 1, 2: 1, 3: 0}
    mixed = FIRST.after(4, {"a": [0, 1], "s": [2, 3]}, frozenset({2, 3}), SpareLocalRanks(taking={3: 0}, per_node=2))
    assert mixed.places == {0: 0, 1: 1, 2: 1, 3: 0}, "a fresh process takes what is left"
    held = FIRST.after(4, {"a": [0, 1], "b": [2, 3]}, frozenset({3}), SpareLocalRanks(taking={3: 0}, per_node=2))
    assert held.places[3] == 1, "a rank that stays has it"


def test_a_fresh_process_takes_no_local_rank_of_a_waiting_hot_spare_where_another_is_free() -> None:
    """One that waits has a model and a context on its GPU."""
    spares = SpareLocalRanks(parked={"s": frozenset({0}), "b": frozenset({1})}, per_node=4)
    assert FIRST.after(4, {"a": [0, 1], "s": [2, 3]}, frozenset({2, 3}), spares).places == {0: 0, 1: 1, 2: 1, 3: 2}
    full = SpareLocalRanks(parked={"s": frozenset({0})}, per_node=2)
    assert FIRST.after(4, {"a": [0, 1], "s": [2, 3]}, frozenset({2, 3}), full).places == {0: 0, 1: 1, 2: 1, 3: 0}


def test_a_process_that_joined_in_a_failed_generation_is_still_new_in_the_next() -> None:
    """It may hold no state; once a generation has run, all its processes do."""
    second = FIRST.after(4, {"a": [0, 1], "b": [2, 3]}, frozenset({1}))
    third = second.after(5, {"a": [0, 1], "b": [2, 3]}, frozenset({3}))
    assert (second.changed, second.kept) == ([1], (0, 2, 3))
    assert (third.changed, third.kept, third.incarnations) == ([1, 3], (0, 1, 2), {0: 3, 1: 4, 2: 3, 3: 5})
    assert replace(third, joined=5).after(6, {"a": [0, 1], "b": [2, 3]}, frozenset({0})).changed == [0]


def test_ranks_without_a_process_are_vacant_until_one_takes_them() -> None:
    """A later process is built for the same world size as the others."""
    fewer = FIRST.after(4, {"a": [0, 1]}, frozenset())
    assert (fewer.incarnations, fewer.places, fewer.kept, fewer.width) == ({0: 3, 1: 3}, {0: 0, 1: 1}, (0, 1), 4)
    assert seat_environment(2, fewer, generation=4, ranks_per_node=2, job="j")["WORLD_SIZE"] == "4"
    again = replace(fewer, joined=4).after(5, {"a": [0, 1], "s": [2, 3]}, frozenset({2, 3}))
    assert (again.incarnations, again.changed, again.kept) == ({0: 3, 1: 3, 2: 5, 3: 5}, [2, 3], (0, 1))


def test_a_table_survives_the_history() -> None:
    """The next controller reads what this one wrote."""
    second = FIRST.after(4, {"a": [0, 1], "s": [2, 3]}, frozenset({2, 3}))
    assert RankTable.from_record(second.as_record()) == second
    paced = replace(second, every=250)
    assert RankTable.from_record(paced.as_record()) == paced
    before = {name: value for name, value in second.as_record().items() if name != "every"}
    assert RankTable.from_record(before) == second  # written by a Holdfast that left the cadence alone


def test_kept_processes_keep_their_checkpoint_interval_until_they_get_another() -> None:
    """And one that joins them gets theirs."""
    paced = replace(FIRST, every=250)
    after = paced.after(4, {"a": [0, 1], "b": [2, 3]}, frozenset({1}))
    assert after.every == 250
    seat = seat_environment(1, after, generation=4, ranks_per_node=2, job="j")
    workers = rank_environments({"a": [0, 1]}, generation=4, rank_table=paced, job="j")["a"]
    assert {seat["HOLDFAST_SAVE_EVERY"], *(one["environment"]["HOLDFAST_SAVE_EVERY"] for one in workers)} == {"250"}
    assert "HOLDFAST_SAVE_EVERY" not in seat_environment(1, FIRST, generation=4, ranks_per_node=2, job="j")
