"""What people and crashes leave in files: it is read or refused with words, and taken in as far as it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as some

from holdfast.agent.event_log import EventLog
from holdfast.errors import BadFile
from holdfast.history import History
from holdfast.history.changes import absorb
from holdfast.protocol import decode
from holdfast.spec.files.load import load_cluster, load_job
from holdfast.spec.policy import load_policy
from tests.fuzz.examples import ANYTHING, SOCKETS, mutated

JOB = b"""\
name: gpt-small
script: train.py
args: [--rate, 1e-3]
nnodes: 2
nproc_per_node: 2
spare_nodes: 1
checkpoint: {directory: c, interval: 20, keep: 2}
timeouts: {hang_min: 30s, lease: 2m}
policy: balanced
cluster: {kind: local, nodes: 3}
"""
CLUSTER = b"""\
kind: ssh
name: lab
hosts: ["gpu[001-008].example.org", {name: w9, address: 10.0.0.9, port: 2222}]
user: train
jump: [{address: gate.example.org}]
"""
POLICY = b"""\
based_on: balanced
max_restarts_in_place: 2
recovery_window: 1h
actions: [restart-workers, replace-node]
"""
FIELDS = (
    "name", "script", "command", "args", "nnodes", "checkpoint", "timeouts", "policy", "cluster", "hosts", "kind", "user", "env", "nodes",
    "interval", "based_on", "actions", "recovery_window",
)  # fmt: skip
FOLDED = some.dictionaries(some.sampled_from(FIELDS) | some.text(max_size=4), ANYTHING)


FILES = (
    some.binary(max_size=80) | some.sampled_from((JOB, CLUSTER, POLICY)).flatmap(mutated) | FOLDED.map(lambda one: json.dumps(one).encode())
)
DAMAGE = some.binary(max_size=60) | some.binary(max_size=12).map(lambda data: b'{"seq":3,' + data + b"}\n")


def refusal(load: Callable[[Path], object], path: Path) -> BadFile | None:
    """Return with what a file is refused, if it is."""
    try:
        load(path)
    except BadFile as refused:
        return refused
    return None


def test_the_files_that_are_mutated_are_good_ones(tmp_path: Path) -> None:
    """A file that is refused at once leads no mutation of it any further."""
    path = tmp_path / "given.yaml"
    for load, data in ((load_job, JOB), (load_cluster, CLUSTER), (load_policy, POLICY)):
        path.write_bytes(data)
        load(path)


@given(data=FILES)
@SOCKETS
def test_a_file_of_any_bytes_is_read_or_refused_with_words(tmp_path: Path, data: bytes) -> None:
    """As a job, as a cluster, as a policy."""
    path = tmp_path / "given.yaml"
    path.write_bytes(data)
    for load in (load_job, load_cluster, load_policy):
        refused = refusal(load, path)
        if refused is not None:
            assert refused.problems
            assert all(one.reason and one.cure for one in refused.problems)
            assert "Traceback" not in str(refused)


@given(change=DAMAGE, place=some.integers(0, 400))
@SOCKETS
def test_a_journal_that_the_disk_has_damaged_is_read_as_far_as_it_is_whole(tmp_path: Path, change: bytes, place: int) -> None:
    """Every line that is read is a message with its number; numbers grow; what is in memory is there in any case."""
    path = tmp_path / "event-log.jsonl"
    event_log = EventLog(path, max_recent=3)
    for number in range(8):
        event_log.add({"event": "steps", "number": number}, milestone=number == 1)
    data = path.read_bytes()
    path.write_bytes(data[:place] + change + data[place + len(change) :])
    lines = list(event_log.since(0))
    numbers = [number for number, _ in lines]
    assert numbers == sorted(set(numbers))
    assert {2, 6, 7, 8} <= set(numbers)
    assert all(decode(line)["seq"] == number for number, line in lines)


def test_what_a_crash_left_beside_a_job_is_taken_in_as_far_as_it_is_whole(tmp_path: Path) -> None:
    """Lines of any kind: those that are no change go to a file of their own, the history stays usable."""
    history = History.open(f"sqlite:///{tmp_path / 'history.db'}")
    outbox_path = tmp_path / "outbox.jsonl"

    @given(lines=some.lists(some.binary(max_size=40) | ANYTHING.map(lambda one: json.dumps(one).encode()), max_size=4))
    @SOCKETS
    def absorbed(lines: list[bytes]) -> None:
        outbox_path.write_bytes(b"\n".join(lines))
        assert absorb(history, outbox_path) == 0
        assert not outbox_path.exists()

    absorbed()
    history.close()
