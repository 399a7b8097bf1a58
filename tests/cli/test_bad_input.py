"""Any user error gives one message with the cure and the right exit status, without a traceback, and starts nothing."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.flow_process import StartLock
from holdfast.errors import UnknownJob
from holdfast.history import LeaseRenewer, acquire
from holdfast.history.models import Job, JobTransition
from holdfast.history.store import History
from tests.cli.conftest import PROGRAM, ROOT, Command, environment, refused
from tests.cli.written_history import Author
from tests.mentions import mentions

JOB = "name: a\nscript: train.py\n"
READERS = [
    ["status"],
    ["status", "a"],
    ["ps", "-a"],
    ["incidents", "show", "1"],
    ["report", "a"],
    ["checkpoint", "advise", "a"],
    ["checkpoint", "ls", "a"],
    ["report", "a", "--profile"],
    ["stop", "a"],
    ["node", "ls"],
    ["ps"],
]


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """Write a job file and its script into one folder; return the job file's name."""
    (tmp_path / "train.py").write_text("print('trained')\n")

    def write(text: str) -> str:
        (tmp_path / "job.yaml").write_text(text)
        return "job.yaml"

    return write


CASES = {
    "unknown field": (JOB + "nnode: 2\n", ("nnode", "line 3", "'nnodes'")),
    "missing field": ("script: train.py\n", ("name", "missing")),
    "script that does not exist": ("name: a\nscript: trian.py\n", ("script", "trian.py", "workdir")),
    "script with its arguments": ("name: a\nscript: train.py --lr 1\n", ("`script: train.py`", 'args: ["--lr", "1"]')),
    "script with its interpreter": ("name: a\nscript: python3 train.py\n", ("script", "`script: train.py`")),
    "variables as a list": ("name: a\nscript: train.py\nenv: [NCCL_DEBUG=INFO]\n", ("env", '`NCCL_DEBUG: "INFO"`')),
    "folder as checkpoint": ("name: a\nscript: train.py\ncheckpoint: ./ckpt\n", ("checkpoint", "`directory: ./ckpt`")),
    "command that does not exist": ("name: a\ncommand: [no-such-program, x]\n", ("command", "'no-such-program'", "PATH")),
    "checkpoints that cannot be written": (JOB + "checkpoint: {directory: /proc/x}\n", ("checkpoint.directory", "/proc/x", "written")),
    "checkpoints where a file is": (JOB + "checkpoint: {directory: train.py}\n", ("checkpoint.directory", "train.py", "not a directory")),
    "interval that is none": (JOB + "checkpoint: {interval: often}\n", ("checkpoint.interval", "line 3", "'often'", "`auto`")),
    "crossed limits of the interval": (
        JOB + "checkpoint: {interval: auto, min_interval: 50, max_interval: 20}\n", ("checkpoint", "line 3", "50", "max_interval"),
    ),
    "more nodes than there are": (JOB + "nnodes: 9\n", ("nnodes", 9, "'local'", 4)),
    "no YAML": ("name: [a\n", ("line 2", "YAML")),
    "binary": ("\x00\x01\x02", ("job.yaml", "text", "UTF-8")),
    "empty": ("", ("job.yaml", "empty", "name")),
    "a cluster's file": ("kind: ssh\nhosts: [a, b]\n", ("cluster", "`--cluster job.yaml`")),
    "a cluster by the name of its file": (JOB + "cluster: gpus.yaml\n", ("cluster", "line 3", "'gpus.yaml'", "--cluster gpus.yaml")),
}  # fmt: skip


def test_a_refusal_is_the_same_from_a_shell(holdfast: Command, files: Any) -> None:
    """A message on stderr, status 2, nothing on stdout, no traceback."""
    done = holdfast("run", files(JOB + "nnode: 2\n"))
    assert (done.returncode, done.stdout) == (2, "")
    assert mentions(done.stderr, "job.yaml", "nnode", "line 3", "nnodes")


REFUSED = [(verb, case) for case in CASES for verb in ("validate", "run") if (verb, case) != ("validate", "a cluster's file")]
"""A cluster's file is valid, and nothing that can be run."""


@pytest.mark.parametrize(("verb", "case"), REFUSED)
def test_a_bad_job_file_is_refused_before_anything_starts(verb: str, case: str, here: Command, files: Any, holdfast_home: Path) -> None:
    """Field, reason and cure on stderr, status 2; no job, no folder, no process."""
    text, named = CASES[case]
    done = here(verb, files(text))
    assert done.returncode == 2
    assert mentions(done.stderr, "job.yaml", "1 problem", *named)
    assert done.stdout == ""
    assert list(holdfast_home.iterdir()) == []


def test_all_problems_come_at_once_and_for_programs_too(here: Command, files: Any) -> None:
    """As JSON: field, reason, cure of each."""
    name = files("nam: a\nscript: gone.py\nnnodes: many\n")
    done = here("validate", name, "--json")
    output = json.loads(done.stdout)
    assert done.returncode == 2
    assert output["ok"] is False
    assert {problem["field"] for problem in output["problems"]} == {"name", "nam", "script", "nnodes"}
    assert all(set(problem) == {"field", "reason", "cure"} and all(problem.values()) for problem in output["problems"])


@pytest.mark.parametrize(
    ("own", "words", "more", "wrong"),
    [
        ("", [], {}, ["nnodes"]),
        ("", [], {"HOLDFAST_CLUSTER": "big.yaml"}, []),
        ("cluster: {nodes: 2}\n", [], {"HOLDFAST_CLUSTER": "big.yaml"}, ["nnodes"]),
        ("cluster: {node: 2}\n", [], {"HOLDFAST_CLUSTER": "big.yaml"}, ["cluster.node", "nnodes"]),
        ("cluster: {nodes: 2}\n", ["--cluster", "big.yaml"], {}, []),
        ("cluster: {nodes: 9}\n", ["--cluster", "small.yaml"], {"HOLDFAST_CLUSTER": "big.yaml"}, ["nnodes"]),
    ],
)
def test_the_environment_names_the_cluster_only_of_a_job_without_one(  # noqa: PLR0917 (a table and fixtures)
    own: str, words: list[str], more: dict[str, str], wrong: list[str], here: Command, files: Any, tmp_path: Path
) -> None:
    """`--cluster` precedes the job's own cluster, and that HOLDFAST_CLUSTER."""
    (tmp_path / "big.yaml").write_text("nodes: 9\n")
    (tmp_path / "small.yaml").write_text("nodes: 3\n")
    done = here("validate", files(f"{JOB}nnodes: 9\n{own}"), "--json", *words, **more)
    assert [problem["field"] for problem in json.loads(done.stdout)["problems"]] == wrong


def test_hosts_are_inspected_for_a_job_where_the_job_says(here: Command, files: Any, tmp_path: Path) -> None:
    """Not where the environment says; those of a cluster that is not reached by SSH cannot be."""
    (tmp_path / "hosts.yaml").write_text("kind: ssh\nhosts: [a.invalid]\n")
    done = here("node", "preflight", "--job", files(f"{JOB}cluster: {{name: here, nodes: 2}}\n"), HOLDFAST_CLUSTER="hosts.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'here'" in done.stderr


def test_a_valid_job_file_is_summarized(here: Command, files: Any) -> None:
    """Status 0, and what would run."""
    done = here("validate", files(JOB + "nnodes: 2\nspare_nodes: 1\nnproc_per_node: 2\n"))
    assert done.returncode == 0
    assert mentions(done.stdout, "job.yaml", "'a'", "train.py", "2 nodes", "1 spare", "(this machine)", "2 ranks")


@pytest.mark.parametrize(("words", "kinds"), [([], ".html"), (["--profile"], ".png")], ids=["page", "profile"])
def test_a_report_is_not_written_under_a_suffix_of_another_kind(words: list[str], kinds: str, here: Command, running: Author) -> None:
    """A page that is called .pdf opens nowhere."""
    done = here("report", "gpt", "-o", "report.pdf", *words)
    assert (done.returncode, Path("report.pdf").exists()) == (2, False)
    assert mentions(done.stderr, "--output", "report.pdf", kinds)


@pytest.mark.parametrize("arguments", [*READERS, ["run", "job.yaml"]], ids=" ".join)
def test_a_corrupt_history_is_reported_and_not_changed(arguments: list[str], here: Command, files: Any, holdfast_home: Path) -> None:
    """The file keeps every byte."""
    files(JOB)
    history = holdfast_home / "history.db"
    history.write_bytes(b"this is no database" * 1000)
    done = here(*arguments)
    assert done.returncode == 2
    assert "is damaged" in done.stderr
    assert "Move the file away" in done.stderr
    assert history.read_bytes() == b"this is no database" * 1000


def test_a_locked_history_is_reported(here: Command, files: Any, book: History, holdfast_home: Path) -> None:
    """Another program keeps it locked."""
    files(JOB)
    book.close()
    with sqlite3.connect(holdfast_home / "history.db", isolation_level=None) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        done = here("run", "job.yaml")
        other.execute("ROLLBACK")
    other.close()
    assert done.returncode == 2
    assert "is locked by another program" in done.stderr
    assert "End that program" in done.stderr


def test_an_unreachable_database_server_is_reported(here: Command) -> None:
    """And its password is not."""
    done = here("status", HOLDFAST_HISTORY="postgresql://me:secret@127.0.0.1:9/none")
    assert done.returncode == 2
    assert "cannot be reached" in done.stderr
    assert "secret" not in done.stderr


def test_a_job_name_that_runs_already_is_refused(
    here: Command, files: Any, book: History, holdfast_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease decides; the message says who holds it and what to do."""
    monkeypatch.setattr("holdfast.history.lease.LEASE_SECONDS", 600.0)  # longer than this process may wait for its turn
    job = Job(name="a", spec={}, cluster={}, directory="/", at=time.time())
    keeper = LeaseRenewer(book, acquire(book, job, holder="another flow"), lambda _: None)
    done = here("run", files(JOB))
    keeper.release()
    assert (done.returncode, done.stdout) == (2, "")
    assert mentions(done.stderr, "job 'a'", "another flow", "`holdfast stop a`")
    assert not (holdfast_home / "jobs" / "a" / "flow.log").exists()


def test_a_home_that_is_not_writable_is_reported(here: Command, files: Any, tmp_path: Path) -> None:
    """A file where the folder should be."""
    done = here("run", files(JOB), HOLDFAST_HOME=str(tmp_path / "train.py"))
    assert done.returncode == 2
    assert "train.py is not a folder" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "gpt-smal"],
        ["status", "gpt-smal", "--events"],
        ["stop", "gpt-smal"],
        ["report", "gpt-smal"],
        ["checkpoint", "advise", "gpt-smal"],
        ["report", "gpt-smal", "--profile"],
    ],
    ids=" ".join,
)
def test_an_unknown_job_suggests_a_similar_one(arguments: list[str], here: Command, running: Author) -> None:
    """Status 2."""
    assert refused(here(*arguments), UnknownJob("gpt-smal", ("gpt-small",)))


NO_TEXT = os.fsdecode(b"\xff")
"""What a shell hands on for a byte that is no UTF-8."""
ODD = [
    *([verb, NO_TEXT] for verb in ("status", "logs", "stop", "report", "incidents", "cost", "detach")),
    *(["checkpoint", verb, NO_TEXT] for verb in ("ls", "verify", "advise")),
    ["admin", "support-bundle", NO_TEXT],
    ["run", f"{NO_TEXT}.yaml"],
    ["node", "approve", "99999999999999999999"],
    ["node", "approve", "9223372036854775808"],
    ["ps", "-a", "--limit", "99999999999999999999"],
    ["report", "a", "--output", "/"],
    ["admin", "support-bundle", "--output", "/"],
    ["admin", "support-bundle", "/"],
    ["admin", "support-bundle", "../../.."],
    ["admin", "metrics", "--output", "/"],
    ["policy", "check", "/"],
]


@pytest.mark.parametrize("arguments", ODD, ids=ascii)
def test_malformed_arguments_are_refused_with_a_message(arguments: list[str], here: Command, running: Author) -> None:
    """Bytes that are no text, numbers that no database holds, folders for files, names that lead elsewhere."""
    done = here(*[running.job.name if word == "a" else word for word in arguments])
    assert done.returncode == 2
    assert len(done.stderr + done.stdout) < 1000
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("words", [["status"], ["incidents", "show"], ["policy", "show"], ["faults"], ["logs"]], ids=" ".join)
def test_a_name_of_thousands_of_letters_is_not_repeated_in_full(words: list[str], here: Command, running: Author) -> None:
    """The message is to be read."""
    done = here(*words, "x" * 5000)
    assert (done.returncode, "x" * 100 in done.stderr) == (2, True)
    assert len(done.stderr) < 1000


@pytest.mark.parametrize("home", ["/dev/null", "~nosuchuser/x", NO_TEXT, "relative/\x01"])
def test_every_command_reports_an_invalid_home(home: str, here: Command, tmp_path: Path) -> None:
    """No command claims that no job runs if it could not read the history."""
    done = here("ps", HOLDFAST_HOME=home)
    if home.startswith("relative"):
        assert done.returncode == 0
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert "HOLDFAST_HOME" in done.stderr


def test_a_job_file_that_exits_is_reported(here: Command, tmp_path: Path) -> None:
    """The result is a problem with its line, not the exit status of the file."""
    (tmp_path / "job.py").write_text("import os\nfrom holdfast.spec import TrainingJob\njob = 1\nos._exit(9)\n")
    done = here("validate", "job.py")
    assert (done.returncode, mentions(done.stdout + done.stderr, "line 4", "os._exit(9)")) == (2, True), done
    forks = "import os\npid = os.fork()\nif not pid: os._exit(7)\nassert os.waitpid(pid, 0)[1] == 7 << 8\njob = 1\n"
    (tmp_path / "job.py").write_text(forks)
    done = here("validate", "job.py")
    assert "`job` is a int" in done.stderr + done.stdout


@pytest.mark.parametrize("name", ["A B", "A\tB", " ", "A=B", ""])
def test_a_variable_that_no_shell_could_name_is_refused(name: str, here: Command, files: Any) -> None:
    """Nor could anybody read it."""
    done = here("validate", files(JOB + f"env: {json.dumps({name: 'x'})}\n"), "--json")
    (problem,) = json.loads(done.stdout)["problems"]
    assert (done.returncode, problem["field"]) == (2, "env." + name.replace("\t", "\\t"))


@pytest.mark.parametrize("arguments", [["report"], ["status", "--follow"]], ids=" ".join)
def test_without_a_job_the_message_says_how_to_start_one(arguments: list[str], here: Command) -> None:
    """Status 2: no job was named, and none can be guessed."""
    done = here(*arguments)
    assert done.returncode == 2
    assert "`holdfast run JOB_FILE`" in done.stderr


def test_a_job_file_in_place_of_a_cluster_file_is_reported(here: Command, files: Any) -> None:
    """One problem, and not one for each of its fields."""
    done = here("node", "ls", "--cluster", files(JOB + "nnodes: 2\n"))
    assert done.returncode == 2
    assert "describes a job, not a cluster" in done.stderr
    assert "1 problem" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["incidents", "show", "99"], ["incidents", "show", "99", "--job", "gpt-small"], ["incidents", "show", "../x"]],
    ids=" ".join,
)
def test_an_unknown_incident_is_reported(arguments: list[str], here: Command, running: Author) -> None:
    """Status 2."""
    done = here(*arguments)
    assert done.returncode == 2
    assert f"no incident '{arguments[2]}" in done.stderr


def test_a_report_that_cannot_be_written_is_refused(here: Command, running: Author) -> None:
    """Status 2, nothing half written."""
    done = here("report", "gpt-small", "-o", "/proc/report.html")
    assert (done.returncode, done.stdout) == (2, "")
    assert mentions(done.stderr, "/proc/report.html", os.strerror(errno.ENOENT))


def test_an_output_on_a_full_disk_is_reported(running: Author) -> None:
    """Status 2 and one line."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "ps", "-a", "--json"], env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == f"holdfast: {os.strerror(errno.ENOSPC)}\n"


def test_a_closed_pipe_causes_no_message(running: Author) -> None:
    """`holdfast ps -a | head -0` is silent."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*PROGRAM, "ps", "-a"], env=environment(), stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_output_without_unicode_shows_question_marks(holdfast: Command, running: Author) -> None:
    """Dashes and blocks are not worth a traceback."""
    done = holdfast("incidents", "show", "1", "--job", "gpt-small", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "rank 1 on n0" in done.stdout


def test_control_characters_in_recorded_text_are_made_visible(here: Command, running: Author) -> None:
    """An escape sequence in a traceback or a reason is shown, not obeyed."""
    running.move("RUNNING", "\x1b]0;owned\x07\x1b[2J", seconds=44)
    running.incident(4, "evil\x1b[31m", "rank\r0", seconds=44, detail="line\n\x1b[2Jline")
    for arguments in (
        ["status"],
        ["status", "gpt-small"],
        ["ps", "-a"],
        ["status", "gpt-small", "--events"],
        ["incidents", "show", "4", "--job", "gpt-small"],
    ):
        done = here(*arguments)
        assert done.returncode == 0
        assert "\x1b" not in done.stdout
        assert "\r" not in done.stdout


def test_a_full_disk_is_reported_before_the_flow_starts(files: Any, tmp_path: Path) -> None:
    """On a small disk of its own, where the kernel lets us make one."""
    files(JOB)
    fill = "mount -t tmpfs -o size=64k none disk && head -c 60000 /dev/zero > disk/fill"
    inside = f"{fill}; HOLDFAST_HOME=$PWD/disk {' '.join(PROGRAM)} run job.yaml"
    (tmp_path / "disk").mkdir()
    probe = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this kernel gives no user namespaces")
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", inside], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "space" in done.stderr.lower() or "full" in done.stderr.lower()


def test_two_commands_at_once_wait_for_each_other(holdfast_home: Path) -> None:
    """The second waits until the history has the job of the first, and then sees that it runs."""
    entered = threading.Event()

    def enter() -> None:
        with StartLock("a"):
            entered.set()

    with StartLock("a") as first:
        other = threading.Thread(target=enter)
        other.start()
        assert not entered.wait(0.3)
        first.release()
        assert entered.wait(60)
        other.join()


def test_unknown_transitions_are_shown_as_recorded(here: Command, running: Author, book: History) -> None:
    """A newer Holdfast may have written them."""
    running.write(
        JobTransition(job_id=running.job.id, at=time.time(), before="X", event="y", after="TELEPORTING", reason="why not", generation=1)
    )
    done = here("status")
    assert done.returncode == 0
    assert "TELEPORTING" in done.stdout


def test_nothing_of_the_checkout_is_needed(tmp_path: Path) -> None:
    """`python -m holdfast` is the same program."""
    done = subprocess.run([*PROGRAM, "--version"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("holdfast ")
    assert ROOT.is_dir()


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("cluster.yaml", "kind: ssh\nhosts: [a, b]\n", "cluster"),
        ("local.yaml", "kind: local\nnodes: 3\n", "cluster"),
        ("policy.yaml", "based_on: patient\n", "policy"),
        ("cluster.py", "from holdfast.spec import LocalCluster\ncluster = LocalCluster(nodes=2)\n", "cluster"),
    ],
)
def test_a_cluster_or_policy_file_is_validated_too(name: str, text: str, kind: str, here: Command, tmp_path: Path) -> None:
    """With the exit status of a job file, as `policy check` has it."""
    (tmp_path / name).write_text(text)
    done = here("validate", name, "--json")
    output = json.loads(done.stdout)
    assert (done.returncode, output["kind"], output["ok"]) == (0, kind, True)
    assert output[kind] is not None
    if name.endswith(".yaml"):
        (tmp_path / name).write_text(f"{text}nonsense: 1\n")
        done = here("validate", name, "--json")
        assert (done.returncode, json.loads(done.stdout)["problems"][0]["field"]) == (2, "nonsense")
        assert here("validate", name).returncode == 2
    if kind == "policy":
        assert here("policy", "check", name).returncode == 2
