"""A script forked from a warm starter behaves as one started by ``python script.py``: each is run both ways and compared."""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from holdfast.protocol import Message
from tests.agent.rig import ROOT, Flow, Node


class Both:
    """One agent with a warm starter, and a plain interpreter beside it."""

    def __init__(self, node: Node, flow: Flow) -> None:
        self.node, self.flow, self._numbers = node, flow, count(1)
        self.environment = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "OF_THE_JOB": "yes"}

    def warm(self, *argv: str) -> Message:
        """Run a script by the starter; return its end, with all that it printed."""
        generation = next(self._numbers)
        self.flow.prepare(self.node, argv, warm=True, environment=self.environment)
        self.flow.start(generation)
        end = self.flow.exited(generation=generation)
        mark = f"--- holdfast: rank 0, generation {generation} of job job\n"
        return {**end, "output": self.node.output().partition(mark)[2]}

    def plain(self, *argv: str) -> tuple[int, str]:
        """Run a script by a fresh interpreter; return its status and all that it printed."""
        ran = subprocess.run(
            [sys.executable, *argv],
            env={**os.environ, **self.environment},
            cwd=self.node.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return ran.returncode, ran.stdout.decode(errors="replace")

    def same(self, *argv: str) -> Message:
        """Run a script both ways and find no difference."""
        end, (status, output) = self.warm(*argv), self.plain(*argv)
        assert (end["code"] if end["signal"] is None else -end["signal"], end["output"]) == (status, output)
        return end


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Give one agent to all tests of this file; its starter imports nothing, so that it is there at once."""
    node = Node(tmp_path_factory.mktemp("n")).begin()
    with node.flow() as flow:
        yield Both(node, flow.attach(0))
        assert not any(event["event"] == "fork-server.exited" for event in flow.events)
    node.end()


SCRIPTS = {
    "facts": """
'''Doc.'''
import os, sys
print(__name__, __file__, __doc__, __package__, __spec__, __cached__, __annotations__, type(__loader__).__name__, __loader__.path)
print(sys.argv, sys.orig_argv, sys.path, os.getcwd(), type(__builtins__).__name__, sorted(globals()), sys.flags, sys.executable)
print(os.environ["OF_THE_JOB"], sys.modules["__main__"].__dict__ is globals(), sys.stdout.write_through, sys.stdin.read())
def where(): return sys._getframe().f_code.co_filename
print(where(), sys.getrecursionlimit(), sys.excepthook is sys.__excepthook__)
""",
    "no future of ours": "def f(x: 1 + 1): pass\nprint(f.__annotations__)",
    "a future of its own": "from __future__ import annotations\ndef f(x: 1 + 1): pass\nprint(f.__annotations__)",
    "guard": "print('before')\nif __name__ == '__main__':\n    print('main')",
    "exit 3": "import sys; sys.exit(3)",
    "exit with a text": "import sys; sys.exit('a text')",
    "exit with nothing": "raise SystemExit",
    "exit with a big number": "import sys; sys.exit(258)",
    "exit at once": "import os; print('x', end=''); os._exit(4)",
    "an exception": "def f():\n    raise ValueError('wrong')\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n    f()",
    "an exception group": "raise ExceptionGroup('many', [ValueError(1), OSError(2, 'x')])",
    "an exception that is no Exception": "class Odd(BaseException): pass\nraise Odd('odd')",
    "an exception that cannot be printed": "class Mute(Exception):\n    def __str__(self): raise RuntimeError\nraise Mute",
    "a hook of its own": "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno, trace.tb_next)\nx",
    "a keyboard interrupt": "raise KeyboardInterrupt",
    "a real interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)",
    "a handled termination": "import os, signal, sys\nsignal.signal(15, lambda *_: sys.exit(7))\nos.kill(os.getpid(), 15)",
    "recursion": "def f(): f()\ntry:\n    f()\nexcept RecursionError:\n    print('deep')",
    "a syntax error": "print('never')\ndef f(:\n",
    "bad indentation": "if True:\nprint(1)\n",
    "exit handlers": "import atexit, sys\natexit.register(print, 'bye')\nprint('hello')\nsys.exit(5)",
    "exit handlers after an error": "import atexit\natexit.register(print, 'bye')\nx = y",
    "a thread that goes on": """
import threading
main = threading.main_thread()
threading.Thread(target=lambda: (main.join(), print("late"))).start()
x = y
""",
    "a thread that fails": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()",
    "streams": "import sys\nprint('out', end='')\nprint('err', file=sys.stderr, end='')\nsys.stdout.buffer.write(b'\\xff\\0')",
    "warnings": "import warnings\nwarnings.warn('careful')\nimport logging\nlogging.warning('log')",
    "import of a neighbour": "import neighbour\nprint(neighbour.__file__)",
    "a pickled class": """
import multiprocessing as mp
class Thing:
    def __eq__(self, other): return type(self) is type(other)
def same(thing): return thing == Thing(), __name__
if __name__ == "__main__":
    for how in ("spawn", "fork", "forkserver"):
        with mp.get_context(how).Pool(1) as pool:
            print(how, pool.apply(same, (Thing(),)))
""",
    "children": """
import os, subprocess, sys
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True).stdout, flush=True)
if os.fork() == 0:
    print("child", flush=True)
    os._exit(0)
print(os.wait()[1])
""",
    "signals": "import signal; print([str(signal.getsignal(number))[:30] for number in range(1, 32)])",
    "annotations at the top": "x: int = 1\nprint(__annotations__)",
    "inspection": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getfile(f), inspect.getmodule(f))",
    "abort": "import os\nos.abort()",
    "a proxy, which is not asked what it is": """
import neighbour
class Proxy:
    @property
    def __class__(self): print('asked', flush=True)
neighbour.proxy = [Proxy()]
""",
    "finalizers": "class Last:\n    def __del__(self): print('gone', flush=True)\nlast = Last()\nlast.itself = last",
    "a daemon that goes on": "import threading, time\nx = 1\ndef f():\n    while True: x\nthreading.Thread(target=f, daemon=True).start()",
    "a file left open": "import os, neighbour\nneighbour.file = os.fdopen(os.dup(1), 'w')\nneighbour.file.write('kept')",
    "an output that is full": "import sys\nsys.stdout = open('/dev/full', 'w')\nprint('lost')",
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_runs_as_under_plain_python(both: Both, text: str) -> None:
    """Same output, same status, same order."""
    (both.node.work / "neighbour.py").write_text("")
    both.same(both.node.script(text), "an argument", "-v")


@pytest.mark.parametrize(
    "source",
    [
        "# coding: latin-1\nprint('caf\xe9' == 'caf\\u00e9')".encode("latin-1"),
        b"\xef\xbb\xbfprint('mark')",
        b"\r\nprint('dos')\r\n",
        b"",
    ],
    ids=["cookie", "byte order mark", "dos", "empty"],
)
def test_any_encoding_of_the_source_is_as_ever(both: Both, source: bytes) -> None:
    """Compiled from its bytes, as Python does."""
    path = both.node.work / "encoded.py"
    path.write_bytes(source)
    both.same(str(path))


@pytest.mark.parametrize("source", [b"print('caf\xe9')", b"print(1)\0\n"], ids=["not utf-8", "null"])
def test_a_source_that_cannot_be_read_is_a_syntax_error(both: Both, source: bytes) -> None:
    """Python words it in another way for a file than for its bytes."""
    path = both.node.work / "encoded.py"
    path.write_bytes(source)
    end, (status, output) = both.warm(str(path)), both.plain(str(path))
    assert end["code"] == status == 1
    assert "SyntaxError: " in end["output"]
    assert "SyntaxError: " in output
    assert end["raised"]["type"] == "SyntaxError"
    assert "fork_server" not in end["raised"]["traceback"], "the script was not even compiled: no frame is its own"


def test_a_missing_script_ends_as_ever_and_is_reported(both: Both) -> None:
    """Status 2, and its name."""
    end = both.same("missing.py")
    assert end["code"] == 2
    assert end["raised"]["errno"] == 2
    assert "missing.py" in end["raised"]["message"]
    assert 'File "' not in end["raised"]["traceback"], "no frame is the script's own"


@pytest.mark.parametrize("kind", ["folder", "archive", "bytecode", "link", "relative"])
def test_whatever_python_runs_is_run(both: Both, kind: str) -> None:
    """Folders, archives and bytecode get an interpreter of their own."""
    work = both.node.work
    place = work / kind
    place.mkdir()
    script = place / "__main__.py"
    script.write_text("import sys\nprint(__name__, __file__, sys.argv, sys.path[0])")
    argv = str(place)
    if kind == "archive":
        argv = str(work / "archive.pyz")
        with zipfile.ZipFile(argv, "w") as archive:
            archive.write(script, "__main__.py")
    elif kind == "bytecode":
        argv = str(py_compile.compile(str(script), cfile=str(work / "code.pyc")))
    elif kind == "link":
        argv = str(work / "link.py")
        Path(argv).symlink_to(script)
    elif kind == "relative":
        argv = "relative/../relative/__main__.py"
    end = both.same(argv, "x")
    assert end["code"] == 0


@pytest.mark.parametrize(("name", "status"), [("alone", 0), ("nest.inner", 3), ("nest", 0), ("missing", 1), ("nest.bare", 1)])
def test_a_module_runs_as_under_plain_python(both: Both, name: str, status: int) -> None:
    """A module, one in a package, a package with a main module; and what Python says where there is none."""
    work = both.node.work
    facts = """
import multiprocessing.spawn, os, pickle, sys
class Thing: pass
print(__name__, __file__, __package__, __spec__.name, sys.argv, sys.orig_argv, sys.path[:2], os.getcwd())
print(sys.modules["__main__"].__dict__ is globals())
print(pickle.dumps(Thing()), multiprocessing.spawn.get_preparation_data("x")["init_main_from_name"])
"""
    (work / "nest" / "bare").mkdir(parents=True, exist_ok=True)
    (work / "nest" / "__init__.py").write_text("here = 3")
    (work / "nest" / "bare" / "__init__.py").touch()
    (work / "nest" / "inner.py").write_text(f"{facts}\nfrom . import here\nsys.exit(here)")
    for path in (work / "alone.py", work / "nest" / "__main__.py"):
        path.write_text(facts)
    assert both.same("-m", name, "x", "-y")["code"] == status


def test_an_exception_of_a_module_is_shown_from_its_own_first_line_on(both: Both) -> None:
    """The lines of what started it are left out, in the log and in the report."""
    (both.node.work / "wrong.py").write_text("def wrong():\n    return 1 / 0\nwrong()\n")
    end = both.warm("-m", "wrong")
    assert (end["code"], end["raised"]["type"]) == (1, "ZeroDivisionError")
    for text in (end["output"], end["raised"]["traceback"]):
        assert re.findall(r'File "([^"]+)"', text) == [str(both.node.work / "wrong.py")] * 2, text


def test_an_exception_is_reported_with_its_text(both: Both) -> None:
    """Before its process ends, which may take a thread's time."""
    end = both.warm(both.node.script("def f():\n    raise OSError(28, 'No space left on device')\nf()\n"))
    raised = end["raised"]
    assert (raised["type"], raised["errno"], raised["peer_lost"]) == ("OSError", 28, False)
    assert raised["message"] == "[Errno 28] No space left on device"
    assert "in f" in raised["traceback"]
    assert both.flow.wait("worker.raised", generation=end["generation"])["seq"] < end["seq"]
    for text in ("raise SystemExit(1)", "raise KeyboardInterrupt", "pass"):
        assert both.warm(both.node.script(text))["raised"] is None


def test_a_syntax_error_is_reported_with_its_place(both: Both) -> None:
    """The user's error, and where."""
    raised = both.warm(both.node.script("def f(:\n"))["raised"]
    assert raised["type"] == "SyntaxError"
    assert "script.py, line 1" in raised["message"]


def test_an_environment_that_is_no_worker_of_ours_does_not_hide_the_error(both: Both) -> None:
    """The script may do with its environment what it likes."""
    text = "import os\nos.environ['RANK'] = 'x'\nraise ValueError('of the script')\n"
    both.same(both.node.script(text))


def test_each_worker_is_a_session_of_its_own_under_the_agent(both: Both) -> None:
    """So that its whole group can be signalled, and the agent sees its end."""
    end = both.warm(both.node.script("import os\nprint(os.getppid(), os.getsid(0) == os.getpid() == os.getpgid(0))"))
    assert end["output"] == f"{both.node.agent} True\n"


def test_nothing_of_the_fork_server_leaks(both: Both) -> None:
    """No descriptor and no module of ours but what it needs itself."""
    end = both.warm(both.node.script("import os\nprint(sorted(os.listdir('/proc/self/fd')))"))
    assert end["output"] == "['0', '1', '2', '3']\n", "3 is the one that listdir reads"


def test_what_one_worker_does_the_next_does_not_see(both: Both) -> None:
    """Each fork is of the starter, not of a worker."""
    both.warm(both.node.script("import sys, os, decimal\nsys.path.append('/x')\nos.environ['X'] = '1'\nsys.modules['fake'] = sys"))
    end = both.warm(
        both.node.script("import sys, os\nprint('/x' in sys.path, 'X' in os.environ, 'fake' in sys.modules, 'decimal' in sys.modules)")
    )
    assert end["output"] == "False False False False\n"
