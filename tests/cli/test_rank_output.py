"""What ranks write, on its way to the terminal of `holdfast run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli.arguments import ranks_in
from holdfast.cli.rank_output import CHUNK, MAX_LAG, MAX_LINES, Line, RankOutput
from holdfast.errors import UnknownOptionValue
from holdfast.history.models import Job
from holdfast.paths import job_directory
from tests.mentions import mentions
from tests.waiting import wait_until

MEMBERS = {"node-0": [0, 1], "node-1": [2, 3]}


class Read:
    """A job whose ranks write into real logs, and all that was shown of them."""

    def __init__(self, name: str = "shown") -> None:
        self.job = Job(id="this", name=name, spec={}, cluster={"kind": "local"}, directory="/x", at=0.0)
        self.folder = job_directory(name) / "logs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lines: list[Line] = []
        self.output = RankOutput(frozenset({0}))

    def log(self, rank: int = 0) -> Path:
        """Return the log of a rank."""
        return self.folder / f"rank-{rank}.log"

    def begin(self, rank: int = 0, *, generation: int = 1, job: str = "this") -> None:
        """Write what an agent writes where a worker's output begins."""
        self.write(f"--- holdfast: rank {rank}, generation {generation} of job {job}\n", rank)

    def write(self, text: str, rank: int = 0) -> None:
        """Have a rank write."""
        with self.log(rank).open("a") as file:
            file.write(text)

    def until(self, done: Callable[[], bool]) -> None:
        """Take lines until *done*."""

        def look() -> bool:
            self.lines += self.output.take()
            return done()

        wait_until(look, seconds=60, explain=lambda: str(self.lines[-20:]))

    def end(self) -> list[Line]:
        """End the job; return all that was shown."""
        for lines in self.output.last():
            self.lines += lines
        return self.lines


@pytest.fixture
def read(holdfast_home: Path) -> Iterator[Read]:
    """Give a job and a reader of it."""
    one = Read()
    yield one
    one.end()


def test_lines_of_this_job_are_shown_once_wherever_the_rank_goes(read: Read) -> None:
    """Not those of an earlier job of the same name, nor Holdfast's own; an unfinished line is shown when the job ends."""
    read.begin(job="before")
    read.write("old\n")
    read.output.follow(read.job, MEMBERS)
    read.begin()
    read.write("--- holdfast: this script has no holdfast.session\n")
    read.write("one\ntw")
    read.until(lambda: read.lines == [(0, "one")])
    read.begin(rank=1)
    read.write("not asked for\n", rank=1)
    read.write("o\n")
    read.until(lambda: read.lines[-1] == (0, "two"))
    read.output.follow(read.job, {"node-1": [0]})
    read.begin(generation=2)
    read.write("10%\r20%\r30%\nred \x1b[31m")
    assert read.end() == [(0, "one"), (0, "two"), (0, "30%"), (0, "red ␛[31m")]


def test_output_before_the_first_poll_is_shown(read: Read) -> None:
    """Of a rank that writes much at its start, after a long log of an earlier job."""
    read.begin(job="before")
    read.write("old\n" * 200_000)
    read.begin()
    read.write("".join(f"{number}\n" for number in range(1000)))
    read.begin(generation=2)
    read.write("again\n")
    read.output.follow(read.job, MEMBERS)
    read.until(lambda: bool(read.lines) and read.lines[-1] == (0, "again"))
    assert read.end() == [*((0, str(number)) for number in range(1000)), (0, "again")]


def test_after_reattaching_only_new_output_is_shown(read: Read) -> None:
    """Its past is in `holdfast logs`."""
    read.begin()
    read.write("long ago\n")
    read.output = RankOutput(None, from_now=True)
    read.output.follow(read.job, {"node-0": [0]})

    def spoken() -> bool:
        read.write("now\n")
        return (0, "now") in read.lines

    read.until(spoken)
    assert {line for _, line in read.end()} == {"now"}


def test_too_much_output_is_cut_and_delays_nothing(read: Read) -> None:
    """Thirty megabytes at once without a reader: a bounded number of lines waits, the last ones arrive, the gap is shown."""
    read.output.follow(read.job, MEMBERS)
    read.begin()
    read.write("first\n")
    read.until(lambda: read.lines == [(0, "first")])
    read.write("".join(f"{number} {'x' * 60}\n" for number in range(450_000)))
    wait_until(lambda: len(read.output._lines) > 100, seconds=60)
    assert len(read.output._lines) <= MAX_LINES + 1
    read.write("the end\n")
    shown = read.end()
    assert shown[-1] == (0, "the end")
    assert any(mentions(line, "left out", "`holdfast logs shown --rank 0`") for _, line in shown)
    assert sum(len(line) for _, line in shown) < 2 * MAX_LAG + 4 * CHUNK


def test_an_endless_line_takes_bounded_memory(read: Read) -> None:
    """Of what is written over itself only the last state counts."""
    read.output.follow(read.job, MEMBERS)
    read.begin()
    read.write("go\n")
    read.until(lambda: read.lines == [(0, "go")])
    read.write("".join(f"{number} of 99999\r" for number in range(100_000)))
    assert read.end()[-1] == (0, "99999 of 99999")


def test_no_rank_is_read_if_none_is_requested(read: Read) -> None:
    """And no thread is started."""
    read.output = RankOutput(frozenset())
    read.begin()
    read.write("line\n")
    read.output.follow(read.job, MEMBERS)
    assert read.end() == []


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0", {0}), ("0,2-3", {0, 2, 3}), (" 1 , 1-2", {1, 2}), ("none", set()), ("NONE", set()), ("all", None), ("3-3", {3})],
)
def test_ranks_are_parsed(text: str, ranks: set[int] | None) -> None:
    """Single ones, ranges, all or none."""
    assert ranks_in(text, 4) == ranks


@pytest.mark.parametrize("text", ["", "4", "-1", "1-", "3-2", "one", "0,,1", "0-99999999999999999999999999", "²", "0x1"])
def test_invalid_ranks_are_refused_with_the_valid_forms(text: str) -> None:
    """Those that the job has are named."""
    with pytest.raises(UnknownOptionValue, match="ranks from 0 to 3"):
        ranks_in(text, 4)


def test_unreachable_nodes_cause_a_single_message(read: Read) -> None:
    """The job is watched all the same."""
    read.job.cluster = {"kind": "ssh", "hosts": ["nowhere.invalid"], "key": "/no/such/key"}
    read.output.follow(read.job, {"nowhere.invalid": [0]})
    read.until(lambda: bool(read.lines))
    (line,) = read.end()
    assert line[0] is None
    assert line[1].startswith("the output of ranks")
