"""What NCCL's RAS says of a job that hangs: by answers that people posted, from a server that speaks as NCCL's own does (no GPU here)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from holdfast.control.faults.rank_status import parse_rank_status
from holdfast.detectors.evidence import RankProgress
from holdfast.detectors.training.hang_analysis import explain
from holdfast.runtime.telemetry import nccl_ras
from holdfast.runtime.telemetry.nccl_ras import LaunchCounts, RasQuery, ask, launch_counts, parse
from tests.mentions import mentions
from tests.waiting import wait_until

MANY_BEHIND = """\
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
  Rank 3 -- GPU 3 managed by process 483075 on node 172.16.64.210
  Rank 4 -- GPU 4 managed by process 483076 on node 172.16.64.210
  Rank 5 -- GPU 5 managed by process 483077 on node 172.16.64.210
  Rank 7 -- GPU 7 managed by process 483079 on node 172.16.64.210
"""
"""From https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html."""
ONE_BEHIND = """\
Group     Comms      Nodes     Ranks     Ranks     Ranks   Status  Errors
    #  in group   per comm  per node  per comm  in group
    0         1          2         4         8         8  RUNNING  MISMATCH

Errors
======


Warnings
========

#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1
"""
"""From a public walkthrough of RAS with a rank that sleeps."""
HEALTHY = """\
Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         8         4         1         4        32   RUNNING      OK
"""


@contextmanager
def ras(text: str, *, ends: bool = True, may_answer: threading.Event | None = None) -> Iterator[str]:
    """Give the address of a RAS that answers with *text* once it *may_answer*, and ends the connection then as NCCL does, or not."""
    over = threading.Event()

    def serve() -> None:
        with suppress(OSError):
            while True:
                sock, _ = server.accept()
                with sock, sock.makefile("rb") as commands:
                    assert commands.readline().startswith(b"CLIENT PROTOCOL ")
                    sock.sendall(b"SERVER PROTOCOL 2\n")
                    assert commands.readline().startswith(b"TIMEOUT ")
                    sock.sendall(b"OK\n")
                    assert commands.readline() == b"VERBOSE STATUS\n"
                    if may_answer is not None:
                        may_answer.wait(60)
                    sock.sendall(text.encode())
                    if not ends:
                        over.wait(60)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_ranks_that_have_launched_fewer_operations_are_read_from_what_people_posted() -> None:
    """Both forms: one rank on the line of its number, several on lines of their own."""
    assert parse(ONE_BEHIND) == [LaunchCounts("AllReduce", 8, 64, {7: 60})]
    assert parse(MANY_BEHIND) == [LaunchCounts("collective", 32, 6650, dict.fromkeys((0, 2, 3, 4, 5, 7), 6649))]
    assert parse(MANY_BEHIND + "\n" + ONE_BEHIND) == parse(MANY_BEHIND) + parse(ONE_BEHIND)
    assert parse(HEALTHY) == parse("") == []
    ahead = ONE_BEHIND.replace("operation 60", "operation 65")
    assert parse(ahead) == [LaunchCounts("AllReduce", 8, 65, {})], "who is ahead waits for the others"
    never = ONE_BEHIND.replace("has launched up to operation 60", "has not launched any operations")
    assert parse(never) == [LaunchCounts("AllReduce", 8, 64, {7: 0})]


def test_ras_is_asked_as_nccls_own_client_asks_it_and_not_for_ever() -> None:
    """It ends the connection after its answer; one that does not is given up."""
    with ras(ONE_BEHIND) as address:
        assert ask(address) == ONE_BEHIND
    with ras(ONE_BEHIND, ends=False) as address, pytest.raises(TimeoutError):
        ask(address, seconds=0.5)


def test_a_query_returns_at_once_and_has_the_answer_at_the_next() -> None:
    """The thread that answers the controller must not wait for NCCL."""
    may_answer = threading.Event()
    with ras(ONE_BEHIND, may_answer=may_answer) as address:
        query = RasQuery({"NCCL_RAS_ADDR": address})
        assert query.poll() == []
        may_answer.set()
        wait_until(lambda: query.poll() == [{"name": "AllReduce", "ranks": 8, "most": 64, "behind": {7: 60}}], seconds=60)
    wait_until(lambda: query.poll() == [], seconds=60)  # nobody answers any more: what was true may not be


def test_without_nccl_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where there is no group yet."""
    monkeypatch.setattr(nccl_ras, "_query", None)
    assert launch_counts() == []


def test_the_rank_that_is_behind_is_named_where_holdfast_counts_no_operations() -> None:
    """Only by a communicator of all ranks: in a smaller one the numbers of ranks are others."""
    behind = [{"name": "AllReduce", "ranks": 8, "most": 64, "behind": {"7": 60, "3": 63}}]
    waiting = {"waits": "backward", "seconds": 9.0, "place": "train.py:40 in step"}
    said = dict.fromkeys(range(8), waiting) | {0: {**waiting, "launched": behind}}
    ranks = {rank: RankProgress(node=f"n{rank}", step=64, age=900.0, status=parse_rank_status(one)) for rank, one in said.items()}
    finding = explain(ranks)
    assert finding is not None
    assert (finding.kind, finding.rank) == ("", 7)
    assert mentions(finding.quote, "rank 7 on n7", "AllReduce", "#60", "#64", "rank 3 is behind too", "train.py:40 in step")
    assert explain(ranks | {8: ranks[1]}) is None
    assert parse_rank_status({"launched": [{"name": "x"}]}) is None, "an answer that is no answer is left out"
