"""What Python prints about an exception is read back, whatever stands around it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.detectors.evidence import WorkerException
from holdfast.detectors.training.tracebacks import aborted_for_lost_peer, is_lost_peer, places_in, raised_in
from holdfast.peer_error_patterns import PEER_LOST_ERROR
from holdfast.runtime import peer_errors
from holdfast.runtime.groups.control_tree import PeerConnectionLost

PLAIN = """Traceback (most recent call last):
  File "/job/train.py", line 12, in <module>
    main()
  File "/job/train.py", line 7, in main
    loss = model(batch)
           ^^^^^^^^^^^^
ValueError: bad shape
"""


def read(output: str) -> WorkerException:
    """Return the exception in *output*."""
    found = raised_in(output)
    assert found is not None
    return found


def ranked(text: str, rank: int = 3) -> str:
    """Return *text* as torch prints it once there is a process group."""
    return "".join(f"[rank{rank}]: {line}" if line.strip() else line for line in text.splitlines(keepends=True))


def printed_by(tmp_path: Path, source: str) -> str:
    """Return what a real interpreter prints when it runs *source*."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("raise ValueError('two\\nlines')", "ValueError", "two\nlines"),
        ("assert 1 > 2", "AssertionError", ""),
        ("import no_such_module", "ModuleNotFoundError", "No module named 'no_such_module'"),
        ("a b", "SyntaxError", "invalid syntax"),
        ("eval('a b')", "SyntaxError", "invalid syntax"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("raise StopAsyncIteration('x')", "StopAsyncIteration", "x"),
        ("import queue\nqueue.Queue().get_nowait()", "_queue.Empty", ""),
        ("def f():\n  class Boom(Exception): pass\n  raise Boom('x')\nf()", "f.<locals>.Boom", "x"),
        ("def f(): f()\nf()", "RecursionError", "maximum recursion depth exceeded"),
        ("open('/no/such/file')", "FileNotFoundError", "[Errno 2] No such file or directory: '/no/such/file'"),
    ],
)
def test_what_a_real_interpreter_prints_is_read_back(tmp_path: Path, source: str, name: str, message: str) -> None:
    """With or without a message, with or without a head, one line or many."""
    found = read(printed_by(tmp_path, source))
    assert (found.type, found.message.split(" while ")[0]) == (name, message)
    assert "line " in found.traceback


def test_a_group_of_exceptions_is_named_with_what_is_in_it(tmp_path: Path) -> None:
    """Its bars are seen through."""
    found = read(printed_by(tmp_path, "raise ExceptionGroup('many', [ValueError(1), KeyError('x')])"))
    assert found.type == "ExceptionGroup"
    assert found.message.startswith("many (2 sub-exceptions)\n")
    assert "ValueError: 1\n" in found.message
    assert places_in(found.traceback) == [f"{tmp_path}/train.py:1"]


def test_the_outermost_of_chained_exceptions_is_named_and_the_chain_is_shown(tmp_path: Path) -> None:
    """The cause stays in the traceback: that is what a person has to read."""
    source = """
        def load():
            raise OSError(28, "No space left on device")
        try:
            load()
        except OSError as error:
            raise RuntimeError("cannot log") from error
    """
    found = read(printed_by(tmp_path, source))
    assert (found.type, found.message, found.errno) == ("RuntimeError", "cannot log", 28)
    assert "No space left" in found.traceback
    assert places_in(found.traceback)[-1].endswith("train.py:7")


def test_two_tracebacks_that_have_nothing_to_do_with_each_other_are_not_chained() -> None:
    """A handled error that was logged hours ago is no cause of this one."""
    found = read(PLAIN.replace("ValueError: bad shape", "OSError: [Errno 28] No space left on device") + "going on\n" + PLAIN)
    assert (found.type, found.errno) == ("ValueError", None)
    assert found.traceback.count("Traceback") == 1


@pytest.mark.parametrize(
    "after",
    [
        "Exception ignored in: <function Loader.__del__ at 0x7f>\n" + PLAIN.replace("ValueError: bad shape", "TypeError: gone"),
        "Exception in thread Thread-7 (pump):\n" + PLAIN.replace("ValueError: bad shape", "EOFError"),
        "--- Logging error ---\n" + PLAIN.replace("ValueError: bad shape", "BrokenPipeError: [Errno 32] Broken pipe"),
        "[W1121 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called\n",
    ],
)
def test_what_python_passes_over_does_not_hide_what_ended_it(after: str) -> None:
    """Interpreters print more tracebacks on their way out than the one that matters."""
    found = read(PLAIN + after)
    assert (found.type, found.message) == ("ValueError", "bad shape")
    assert places_in(found.traceback)[-1] == "/job/train.py:7"


def test_an_exception_of_a_thread_counts_when_there_is_no_other() -> None:
    """It is the best guess at why the process then ended."""
    assert read("Exception in thread Thread-7 (pump):\n" + PLAIN).type == "ValueError"


def test_the_marks_that_torch_puts_before_each_line_are_seen_through() -> None:
    """A script started cold in a process group prints nothing without them."""
    assert read(ranked(PLAIN)) == read(PLAIN)


def test_a_message_of_many_lines_ends_where_another_rank_or_a_log_line_begins() -> None:
    """Words of a neighbour must not be put into this exception's mouth."""
    found = read(ranked(PLAIN + "first hint\nsecond hint\n") + "[rank4]: RuntimeError: NCCL Connection reset by peer\n")
    assert found.message == "bad shape\nfirst hint\nsecond hint"
    assert not found.peer_lost


@pytest.mark.parametrize(
    "output",
    [
        " 45%|####5     | 9/20 [00:01<00:01, 6.5it/s]" + PLAIN,
        PLAIN.replace("\n", "\r\n"),
        PLAIN.partition("\n")[2],
        "\0\ufffd\x1b[31m" * 2000 + "\n" + PLAIN + "\ufffd\ufffd",
        'Fatal Python error: Aborted\n\nCurrent thread 0x00 (most recent call first):\n  File "x.py", line 3 in f\n\n' + PLAIN,
    ],
)
def test_neither_bars_nor_bytes_nor_a_lost_head_hide_an_exception(output: str) -> None:
    """The tail of a log begins and ends anywhere."""
    found = read(output)
    assert (found.type, found.message.strip("\ufffd\n")) == ("ValueError", "bad shape")


@pytest.mark.parametrize(
    "output",
    [
        "",
        "step 3: loss 0.1\nValueError: only printed\n",
        PLAIN.rpartition("ValueError")[0],
        PLAIN.rpartition("ValueError")[0] + "a log line\n" * 40 + "loss: 0.1\n",
    ],
)
def test_no_traceback_no_exception(output: str) -> None:
    """A line that looks like an error is none without frames above it, and frames are none without it."""
    assert raised_in(output) is None


@given(st.lists(st.sampled_from([*PLAIN.splitlines(), *ranked(PLAIN).splitlines(), "", "some noise", "\x00\xff", "  | x y", "[rank1]: "])))
def test_no_output_whatever_makes_the_reader_fail(lines: list[str]) -> None:
    """Lines of several processes come mixed, cut and doubled."""
    found = raised_in("\n".join(lines))
    assert found is None or found.type == "ValueError"


@pytest.mark.parametrize(
    "long",
    [
        "x" * 4_000_000,
        " " * 4_000_000,
        "a." * 2_000_000,
        "[" * 4_000_000,
        "  File " * 500_000,
        '  File "' * 500_000,
        "terminate called " * 200_000,
        PLAIN * 20_000,
        "Traceback (most recent call last):\n" * 100_000,
        PLAIN.partition("Value")[0] * 10_000,
    ],
    ids=range(10),
)
def test_the_time_to_read_grows_with_the_length_and_no_faster(long: str) -> None:
    """A quadratic pattern needs hours for these, and meets the limit that every test has."""
    assert read(PLAIN[:-1] + long).type == "ValueError"
    assert raised_in(long) in (None, read(PLAIN), read(PLAIN + PLAIN))
    assert not aborted_for_lost_peer(long)
    assert len(places_in(long)) == long.count('", line ')


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18864. GLHF!"
NCCL = "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.5"
LOST = [
    ("RuntimeError", GLOO),
    ("RuntimeError", "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to complete"),
    ("torch.distributed.DistBackendError", NCCL),
    ("torch.distributed.DistBackendError", "NCCL error: unhandled system error\nncclRemoteError: A call failed"),
    ("torch.distributed.DistNetworkError", "The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500)."),
    ("torch.distributed.DistStoreError", "Timed out after 61 seconds waiting for clients. 1/2 clients joined."),
]
OWN = [
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("RuntimeError", "Connection reset by peer"),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (gloo)"),
    ("ValueError", GLOO),
    ("torch.distributed.DistNetworkError", "The server socket has failed to listen on any local network address. port: 29500 EADDRINUSE"),
]


@pytest.mark.parametrize(("name", "message", "lost"), [(*one, True) for one in LOST] + [(*one, False) for one in OWN])
def test_a_lost_peer_is_distinguished_from_an_own_error(name: str, message: str, lost: bool) -> None:  # noqa: FBT001
    """By type and words together: a user's own broken download is no peer."""
    assert is_lost_peer(name, message) is lost
    output = PLAIN.replace("ValueError: bad shape", f"{name}: {message}")
    assert read(output).peer_lost is lost
    assert read(ranked(output)).peer_lost is lost


@pytest.mark.parametrize(("name", "message"), [*LOST, *OWN])
def test_what_was_printed_is_judged_as_the_runtime_judges_what_was_raised(name: str, message: str) -> None:
    """A worker with a runtime and one without must not end in different diagnoses."""
    base = OSError if name.endswith(("ResetError", "PipeError")) else ValueError if name == "ValueError" else RuntimeError
    module, _, plain = name.rpartition(".")
    error = type(plain, (base,), {"__module__": module or "builtins"})(message)
    assert peer_errors.describe(error)["peer_lost"] is is_lost_peer(name, message)


def test_the_error_of_our_own_groups_is_a_lost_peer_raised_or_printed() -> None:
    """It is recognised by its name alone, which must be the one that the class has."""
    assert f"{PeerConnectionLost.__module__}.{PeerConnectionLost.__name__}" == PEER_LOST_ERROR
    assert peer_errors.is_peer_loss(PeerConnectionLost(1, "no connection came about within 20 s"))
    assert is_lost_peer(PEER_LOST_ERROR, "the connection to rank 1 ended")


def test_an_error_that_was_raised_from_a_lost_peer_is_one() -> None:
    """A trainer that wraps what it catches hides nothing."""
    cause = PLAIN.replace("ValueError: bad shape", f"RuntimeError: {GLOO}")
    wrapped = cause + "\nThe above exception was the direct cause of the following exception:\n\n" + PLAIN
    assert read(wrapped).type == "ValueError"
    assert read(wrapped).peer_lost


UNHANDLED = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:"
)


@pytest.mark.parametrize(
    "device",
    [
        "torch.AcceleratorError: CUDA error: an illegal memory access",
        "RuntimeError: CUDA error: device-side assert",
        f"{UNHANDLED}\nsocketProgress: Connection closed by remote peer node-b<47268>",
        f"{UNHANDLED}\nCuda failure 214 'uncorrectable ECC error encountered'",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, internal error\nLast error:\nCuda failure 214 'ECC error'",
    ],
)
def test_an_error_of_the_workers_own_gpu_is_no_secondary_failure_whoever_else_was_lost(device: str) -> None:
    """It came while a lost peer was dealt with, or the other way round: this process can do nothing more on its GPU."""
    first = PLAIN.replace("ValueError: bad shape", f"RuntimeError: {GLOO}")
    second = PLAIN.replace("ValueError: bad shape", device)
    for one, other in ((first, second), (second, first)):
        whole = one + "\nDuring handling of the above exception, another exception occurred:\n\n" + other
        assert not read(whole).peer_lost


@pytest.mark.parametrize(
    ("thrown", "words", "lost"),
    [
        ("c10::DistBackendError", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", True),
        ("gloo::IoException", GLOO, True),
        ("std::bad_alloc", "std::bad_alloc", False),
        ("c10::Error", "CUDA error: an illegal memory access was encountered", False),
        ("std::runtime_error", f"not torch's: {GLOO}", False),
    ],
)
def test_a_watchdog_abort_is_distinguished_from_an_own_abort(thrown: str, words: str, lost: bool) -> None:  # noqa: FBT001
    """NCCL gives up its process when a peer is gone."""
    output = f"step 9\nterminate called after throwing an instance of '{thrown}'\n  what():  {words}\n"
    assert aborted_for_lost_peer(output) is lost


def test_an_abort_that_says_nothing_is_ones_own() -> None:
    """The heap check of glibc names no exception."""
    assert not aborted_for_lost_peer(f"{GLOO}\nfree(): invalid pointer\n")
