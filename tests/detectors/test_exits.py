"""How a worker ended, stopped or could not start: what each end is called."""

from __future__ import annotations

import errno
import signal
from typing import Any

import pytest

from holdfast.detectors.evidence import HangLimits, StartFailure, Unknown, WorkerException, WorkerStop
from holdfast.detectors.training.exceptions import ABORT_ERROR
from holdfast.runtime.groups.device_library import AbortTimedOut
from tests.detectors.evidence_of import an_echo, an_end, an_error, seen, the_fault
from tests.mentions import mentions

TRACEBACK = """Traceback (most recent call last):
  File "/job/train.py", line 12, in <module>
    main()
  File "/job/train.py", line 7, in main
    step()
ValueError: bad shape
"""


def test_an_end_after_the_last_step_is_no_fault() -> None:
    """Status 0 and all steps done."""
    assert seen(an_end(code=0, finished=True)) == []


def test_status_0_before_the_last_step_is_a_fault() -> None:
    """A loop left early would pass for a trained model."""
    assert the_fault(an_end(code=0)).kind == "worker-exit-early"
    assert "after step 7" in the_fault(an_end(code=0)).quote
    assert "None" not in the_fault(an_end(code=0, step=None)).quote


def test_a_finished_report_does_not_hide_a_bad_status() -> None:
    """What came after the last step may have been the save."""
    assert the_fault(an_end(code=1, finished=True)).kind == "worker-exit-code"


def test_an_unknown_exit_is_no_success() -> None:
    """Neither status nor signal: it is not taken for done."""
    assert the_fault(an_end(finished=True)).kind == "worker-exit-code"


def test_an_exception_that_was_reported_beats_the_one_in_the_output() -> None:
    """The report is whole, the tail of a log may belong to another thread."""
    fault = the_fault(an_error(type="KeyError", output=TRACEBACK))
    assert (fault.kind, fault.signature) == ("worker-exception", "KeyError at train.py:3")


def test_an_exception_in_the_output_speaks_where_no_report_does() -> None:
    """A script that knows nothing of Holdfast prints its traceback."""
    fault = the_fault(an_end(code=1, output=f"step 6\n{TRACEBACK}"))
    assert (fault.kind, fault.signature, fault.quote) == ("worker-exception", "ValueError at /job/train.py:7", "ValueError: bad shape")
    assert fault.detail == TRACEBACK.strip()


def test_the_same_failure_has_one_signature_however_it_was_learned() -> None:
    """A worker started warm reports what one started cold prints, and Python leaves ``__main__`` away when it prints."""
    exception = WorkerException(type="__main__.Boom", message="x", traceback=TRACEBACK.replace("ValueError", "Boom"))
    printed = the_fault(an_end(code=1, output=TRACEBACK.replace("ValueError", "Boom")))
    assert the_fault(an_end(code=1, raised=exception)).signature == printed.signature


def test_a_traceback_does_not_explain_a_good_end() -> None:
    """A script may print what it survived."""
    assert seen(an_end(code=0, finished=True, output=TRACEBACK)) == []
    assert the_fault(an_end(code=0, output=TRACEBACK)).kind == "worker-exit-early"


def test_an_abort_on_the_way_out_does_not_hide_the_exception() -> None:
    """Threads of torch that are torn down often abort after the report; other signals came from outside."""
    raised = WorkerException(type="ValueError", message="bad shape")
    assert the_fault(an_end(signal=int(signal.SIGABRT), raised=raised)).kind == "worker-exception"
    assert the_fault(an_end(signal=int(signal.SIGKILL), raised=raised)).kind == "worker-sigkill"


def test_a_watchdogs_abort_is_a_secondary_failure() -> None:
    """NCCL gives up a process whose peer is gone; the peer is the one to look for."""
    thrown = "terminate called after throwing an instance of 'c10::DistBackendError'"
    words = f"{thrown}\n  what():  Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
    assert the_fault(an_end(signal=6, output=words)).kind == "worker-peer-lost"
    assert the_fault(an_end(signal=6, output="free(): invalid pointer")).kind == "worker-sigabrt"
    assert the_fault(an_end(signal=9, output=words)).kind == "worker-sigkill"


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"type": "torch.OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2 GiB"}, "worker-gpu-out-of-memory"),
        ({"type": "RuntimeError", "message": "CUDA error: out of memory"}, "worker-gpu-out-of-memory"),
        ({"type": "torch.cuda.OutOfMemoryError", "message": ""}, "worker-gpu-out-of-memory"),
        ({"type": "MemoryError", "message": ""}, "worker-exception"),
        ({"type": "OSError", "errno": errno.ENOSPC}, "worker-disk-full"),
        ({"type": "OSError", "errno": errno.EDQUOT}, "worker-disk-full"),
        ({"type": "RuntimeError", "message": "write failed: No space left on device"}, "worker-disk-full"),
        ({"type": "OSError", "errno": errno.EIO}, "worker-storage-failed"),
        ({"type": "OSError", "errno": errno.ESTALE}, "worker-storage-failed"),
        ({"type": "ConnectionRefusedError", "errno": errno.ECONNREFUSED}, "worker-service-unreachable"),
        ({"type": "socket.gaierror", "errno": -3}, "worker-service-unreachable"),
        ({"type": "FileNotFoundError", "errno": errno.ENOENT}, "worker-exception"),
        ({"type": "PermissionError", "errno": errno.EACCES}, "worker-exception"),
        ({"type": "KeyboardInterrupt", "message": ""}, "worker-sigint"),
        ({"type": "SyntaxError", "message": "invalid syntax"}, "worker-exception"),
        ({"type": "OSError", "errno": errno.ECONNRESET, "peer_lost": True}, "worker-peer-lost"),
        ({"type": ABORT_ERROR, "message": "1 of 3 communicators of this rank did not abort within 10 s"}, "worker-abort-timed-out"),
    ],
)
def test_the_kind_of_an_exception_depends_on_its_subject(facts: dict[str, Any], kind: str) -> None:
    """The disk, the network and the memory of a GPU are nobody's typing error."""
    assert the_fault(an_error(**facts)).kind == kind


def test_the_error_of_an_abort_that_does_not_end_is_recognised_by_the_name_of_its_class() -> None:
    """The detectors cannot import it."""
    assert f"{AbortTimedOut.__module__}.{AbortTimedOut.__name__}" == ABORT_ERROR


def test_a_quote_is_one_line_and_short() -> None:
    """It goes into a sentence; the whole text is in the detail."""
    fault = the_fault(an_error(message="x" * 5000 + "\nsecond line"))
    assert len(fault.quote) == 300
    assert "\n" not in fault.quote
    assert the_fault(an_error(type="AssertionError", message=" \n ")).quote == "AssertionError"


def test_an_exception_without_a_traceback_is_still_one() -> None:
    """Its place is not known, its output is the detail."""
    fault = the_fault(an_end(code=1, raised=WorkerException(type="ValueError", message="x"), output="the tail"))
    assert (fault.signature, fault.detail) == ("ValueError at ?", "the tail")


def test_failures_of_one_type_differ_by_the_innermost_location() -> None:
    """Messages hold numbers that differ from rank to rank; places do not."""
    assert the_fault(an_error(message="shape 3")).signature == the_fault(an_error(message="shape 4")).signature
    assert the_fault(an_error(line=3)).signature != the_fault(an_error(line=4)).signature


def test_an_exit_status_without_a_reason_quotes_the_last_output() -> None:
    """A command that prints why it ends says it in the diagnosis."""
    assert the_fault(an_end(code=2, output="usage: train.py\ntrain.py: error: no such argument\n\n")).quote.endswith("no such argument")
    assert the_fault(an_end(code=2, output="\x1b[2J\0\x07")).quote == "exited with status 2"
    assert len(the_fault(an_end(code=2, output="x" * 100_000)).quote) < 300


@pytest.mark.parametrize(
    ("status", "kind"), [(137, "worker-sigkill"), (139, "worker-sigsegv"), (143, "worker-sigterm"), (130, "worker-sigint")]
)
def test_a_shell_that_passes_a_signal_on_is_understood(status: int, kind: str) -> None:
    """``bash run.sh`` ends with 128 and the number; two of those at one step are not the user's error."""
    fault = the_fault(an_end(code=status))
    assert fault.kind == kind
    assert f"status {status}" in fault.quote


@pytest.mark.parametrize("status", [1, 2, 7, 127, 128, 160, 255])
def test_other_statuses_are_statuses(status: int) -> None:
    """128 alone, a real-time signal's number and -1 are a program's own words."""
    assert the_fault(an_end(code=status)).kind == "worker-exit-code"


def test_a_traceback_beats_the_shells_reading() -> None:
    """A script that ends with 130 after an exception says why."""
    assert the_fault(an_end(code=143, output=TRACEBACK)).kind == "worker-exception"


LINE = "Out of memory: Killed process 4711 (python)"


def test_an_out_of_memory_kill_is_identified_by_the_kernel_log() -> None:
    """The line itself is the quote."""
    fault = the_fault(an_end(signal=9, oom=LINE))
    assert (fault.kind, fault.quote) == ("worker-oom-killed", LINE)


def test_a_kill_with_no_trace_in_the_kernels_log_is_a_kill_from_outside() -> None:
    """Looked for and not found."""
    fault = the_fault(an_end(signal=9, oom=None))
    assert fault.kind == "worker-sigkill"
    assert "memory" not in fault.quote


def test_an_unreadable_kernel_log_is_reported_as_unknown() -> None:
    """Blind is neither an out-of-memory kill nor the proof that there was none."""
    fault = the_fault(an_end(signal=9, oom=Unknown("/dev/kmsg: Operation not permitted")))
    assert fault.kind == "worker-sigkill"
    assert mentions(fault.quote, "unknown", "/dev/kmsg: Operation not permitted")


def test_only_a_kill_can_be_for_want_of_memory() -> None:
    """A line about the same process number does not explain a segmentation fault."""
    assert the_fault(an_end(signal=11, oom=LINE)).kind == "worker-sigsegv"


@pytest.mark.parametrize(("seconds", "kinds"), [(0.99, []), (1.0, ["worker-stopped"]), (60.0, ["worker-stopped"])])
def test_a_stopped_worker_is_a_fault_from_its_grace_on(seconds: float, kinds: list[str]) -> None:
    """A debugger that attaches stops one for a moment."""
    stop = WorkerStop(node="n0", rank=0, at=5.0, signal=int(signal.SIGSTOP), seconds=seconds, step=7)
    assert [fault.kind for fault in seen(stop, stopped_process=1.0)] == kinds
    assert all("SIGSTOP" in fault.quote and fault.at == 5.0 for fault in seen(stop))


@pytest.mark.parametrize(
    ("number", "why", "kind"),
    [
        (errno.EAGAIN, "fork: Resource temporarily unavailable", "worker-start-failed"),
        (errno.ENOMEM, "fork: Cannot allocate memory", "worker-start-failed"),
        (None, "no answer within 30 s", "worker-start-failed"),
        (errno.ENOENT, "No such file or directory: 'trian'", "worker-command-not-runnable"),
        (errno.EACCES, "Permission denied: 'train.sh'", "worker-command-not-runnable"),
        (None, "start refused: [Errno 2] No such file or directory: 'trian'", "worker-command-not-runnable"),
        (None, "start refused: [Errno 12] Cannot allocate memory", "worker-start-failed"),
    ],
)
def test_a_broken_command_differs_from_a_node_that_cannot_start_it(number: int | None, why: str, kind: str) -> None:
    """One is mended in the job or in a mount, the other by leaving the node."""
    fault = the_fault(StartFailure(node="n0", at=1.0, why=why, errno=number))
    assert (fault.kind, fault.quote, fault.target) == (kind, why, "node n0")


def test_an_end_keeps_rank_node_step_and_time() -> None:
    """Diagnosis compares them, history shows them."""
    for end in (
        an_end("n3", 5, 9.5, code=2),
        an_end("n3", 5, 9.5, signal=9),
        an_echo("n3", 5, 9.5),
        an_end("n3", 5, 9.5, signal=9, oom=LINE),
    ):
        fault = the_fault(end)
        assert (fault.node, fault.rank, fault.at, fault.step) == ("n3", 5, 9.5, 7)


def test_the_grace_of_a_stopped_worker_is_a_second_unless_the_job_says_otherwise() -> None:
    """The default of the limits that a user reads about."""
    assert HangLimits().stopped_process == 1.0


def test_the_last_line_of_a_rank_is_no_evidence_of_who_killed_it() -> None:
    """Unless it reports trouble, or the rank ended by itself."""
    notice = "step 12 loss 3.1\nreplica-lag: /dev/shm/x: 10 snapshots were left out by step 110"
    assert the_fault(an_end(signal=9, output=notice)).detail == ""
    assert the_fault(an_end(signal=15, output=notice)).detail == ""
    assert the_fault(an_end(signal=9, output="slurmstepd: error: Exceeded job memory limit")).detail
    assert the_fault(an_end(signal=11, output=notice)).detail == notice
