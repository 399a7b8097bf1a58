"""How an agent comes up, whom it refuses, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.agent.server import PREEMPTION_SECONDS, SAME_SIGNAL_SECONDS
from holdfast.agent.workers.subreaper import PASSED_ON
from holdfast.host.process import NODE_MARK, is_alive, mark_of, state_of
from holdfast.protocol import PROTOCOL, connect
from tests.agent.rig import CLIENT, ROOT, Flow, Node
from tests.mentions import mentions
from tests.waiting import wait_until


def test_an_agent_imports_neither_torch_nor_prefect_nor_pydantic() -> None:
    """It has to be up in a fraction of a second, on a node with few packages."""
    code = "import json, sys, holdfast.agent.__main__; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    came = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"torch", "prefect", "pydantic", "numpy", "asyncio"} & set(json.loads(came))


def test_no_other_user_may_read_a_nodes_folder_or_open_its_socket(node: Node) -> None:
    """Whoever can connect can have commands run."""
    assert stat.S_IMODE(node.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((node.folder / "agent.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((node.folder / "event-log.jsonl").stat().st_mode) == 0o600


def test_a_folder_that_was_open_to_all_is_closed(new_node: Node) -> None:
    """The agent does not rely on who made the folder."""
    new_node.folder.mkdir(mode=0o755)
    new_node.begin()
    assert stat.S_IMODE(new_node.folder.stat().st_mode) == 0o700


def test_a_folder_longer_than_a_socket_address_serves_controllers_and_workers(tmp_path: Path) -> None:
    """The kernel allows 107 bytes for a socket's path; homes and temporary folders are longer than that."""
    deep = Node(tmp_path / ("d" * 60) / ("e" * 60), "n" * 60).begin()
    try:
        with deep.flow().attach(0) as flow:
            script = deep.script("from holdfast.runtime.agent_client import link\nlink().mark('group', 1.5)\nlink().flush(5)\n")
            flow.prepare(deep, [sys.executable, script], environment={"PYTHONPATH": str(ROOT)})
            flow.start(1)
            flow.wait("mark", name="group", seconds=1.5)
            assert flow.exited()["code"] == 0
    finally:
        deep.end()


def test_a_second_agent_for_a_node_is_refused_and_the_first_one_goes_on(node: Node, flow: Flow, tmp_path: Path) -> None:
    """Two jobs that pick the same free node at the same time must not kill each other's workers."""
    flow.prepare(node, [sys.executable, "-c", "import time; time.sleep(600)"])
    flow.start(1)
    pid = flow.pid()
    second = Node(tmp_path).begin()
    assert second.said["ready"] is False
    assert mentions(second.said["why"], f"pid {node.subreaper_pid}")
    assert second.ended() == 2
    assert is_alive(pid, None)
    flow.ok("ping")


def test_an_agent_takes_over_from_one_that_is_ending(node: Node, tmp_path: Path) -> None:
    """A node can be used again at once."""
    for _ in range(5):
        with node.flow() as flow:
            flow.ok("end")
        successor = Node(tmp_path).begin()
        assert successor.said["ready"], successor.log.read_text()
        node.ended()
        node.subreaper, node.said = successor.subreaper, successor.said


def test_a_new_agent_replays_events_that_a_killed_one_may_not_have_sent(node: Node, tmp_path: Path) -> None:
    """The flow may have been away just then. Not of another job, nor after an end in order; and not lost when it is killed as well."""
    code = "hello()\nfor step in range(1, 31):\n    say(t='beat', step=step, seconds=0.1, loss=step / 2, until=900)\ntime.sleep(600)\n"
    with node.flow() as flow:
        flow.attach(0)
        flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
        flow.start(1)
        flow.until(lambda: any(step[0] == 30 for event in flow.events for step in event.get("steps", ())), "step 30")
    for job, expected in (("job", 30), ("job", 30), ("another", 0), ("another", 0)):
        os.kill(node.agent, signal.SIGKILL)
        node.ended()
        successor = Node(tmp_path).begin()
        node.subreaper, node.said = successor.subreaper, successor.said
        with node.flow() as flow:
            flow.attach()
            flow.job = job
            flow.prepare(node, ["true"], job=job)
            flow.ok("ping")
            replayed = [inner for event in flow.events if event["event"] == "replay" for inner in event["events"]]
            steps = [step for inner in replayed for step in inner["steps"]]
            assert [step[0] for step in steps] == list(range(1, expected + 1))
            assert [step[3] for step in steps] == [step / 2 for step in range(1, expected + 1)]
            assert {inner["generation"] for inner in replayed} <= {1}


def test_a_new_agent_ends_what_an_earlier_one_left(new_node: Node) -> None:
    """Whatever carries the node's mark was started on it."""
    nap = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        subprocess.Popen(nap, env={NODE_MARK: mark_of(new_node.folder)}) as ours,
        subprocess.Popen(nap, env={NODE_MARK: "/other"}) as other,
    ):
        new_node.begin()
        assert new_node.said["ready"]
        assert ours.wait(60) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


def test_an_agent_started_by_hand_carries_the_mark_too(new_node: Node) -> None:
    """The environment of its first instruction is what others can read."""
    new_node.begin(HOLDFAST_NODE_MARK="/elsewhere")
    assert {new_node.subreaper_pid, new_node.agent} <= set(new_node.remains())


def test_an_agent_without_its_folder_reports_why(tmp_path: Path) -> None:
    """The words reach whoever started it."""
    (tmp_path / "node").write_text("in the way")
    refused = Node(tmp_path).begin()
    assert refused.said["ready"] is False
    assert "File exists" in refused.said["why"]
    assert refused.ended() == 2


@pytest.mark.parametrize("name", ["agent.sock", "agent.json", "event-log.jsonl", "agent.lock"])
def test_an_agent_whose_files_cannot_be_written_reports_why(new_node: Node, name: str) -> None:
    """A folder in a file's place stands for everything that can be wrong with it."""
    for place in (name, "event-log.before" if name == "event-log.jsonl" else name):
        (new_node.folder / place / "full").mkdir(parents=True, exist_ok=True)
    new_node.begin()
    assert new_node.said["ready"] is False
    assert "directory" in new_node.said["why"].lower()
    assert new_node.ended() == 2


def test_an_agent_resets_ignored_and_blocked_signals(new_node: Node) -> None:
    """Both go through exec: a caller that ignores SIGCHLD or blocks SIGTERM must not make an agent that never learns of a worker's end."""
    code = (
        "import os, signal, sys\n"
        "for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'holdfast.agent', *sys.argv[1:]])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), NODE_MARK: mark_of(new_node.folder)}
    arguments = ["--directory", str(new_node.folder), "--node", "node"]
    new_node.subreaper = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment)
    wait_until((new_node.folder / "agent.json").exists, seconds=60)
    with new_node.flow().attach(0) as flow:
        flow.prepare(new_node, [sys.executable, new_node.script("import signal; signal.raise_signal(signal.SIGHUP)")])
        flow.start(1)
        assert flow.exited()["signal"] == signal.SIGHUP
        new_node.subreaper.send_signal(signal.SIGTERM)
        event = flow.until(
            lambda: next((one["event"] for one in flow.events if one["event"] in {"agent.preemption-notice", "agent.ended"}), None)
        )
        if event == "agent.preemption-notice":  # its worker has just ended: by the same signal, for all it knows
            flow.ok("end")
    assert new_node.ended() == 0


def test_without_a_command_for_its_lease_an_agent_ends_with_its_workers(node: Node) -> None:
    """No controller is left: the node must not stay occupied for ever."""
    nap = [sys.executable, "-c", "import time; time.sleep(600)"]
    with node.flow().attach(0) as flow:
        flow.prepare(node, nap)
        flow.start(1)
        pid = flow.pid()
        assert is_alive(pid, None)
        flow.prepare(node, nap, lease=0.5)
        flow.wait("lease.ended")
        assert flow.exited()["ordered"] is True
        flow.wait("agent.ended")
    assert node.ended() == 0
    assert not is_alive(pid, None)
    assert not (node.folder / "agent.sock").exists()
    assert not (node.folder / "agent.json").exists()


def test_refused_commands_do_not_renew_the_lease(node: Node) -> None:
    """A flow that lost its job and goes on asking must not keep it alive."""
    with node.flow(epoch=5) as control_job, node.flow(epoch=4) as deposed:
        control_job.attach(0)
        control_job.prepare(node, [sys.executable, "-c", ""])
        assert deposed.order("ping")["ok"] is False
        control_job.prepare(node, [sys.executable, "-c", ""], lease=0.5)

        def is_over() -> bool:
            with suppress(OSError):  # the agent may have ended already
                deposed.raw(b'{"id":7,"do":"ping","epoch":4}\n')
            deposed.receive(0.01)
            control_job.receive(0.01)
            return any(event["event"] == "lease.ended" for event in control_job.events)

        wait_until(is_over, seconds=60)


@pytest.mark.parametrize("how", ["by the flow", "by a second signal"])
def test_sigterm_to_the_subreaper_gives_the_controller_time(node: Node, flow: Flow, how: str) -> None:
    """What systemd does to a unit, and a shutdown to a node: the controller learns of it while the workers still work."""
    flow.prepare(node, [sys.executable, node.script(CLIENT + "hello(); time.sleep(600)")])
    flow.start(1)
    flow.wait("worker.hello")
    os.kill(node.subreaper_pid, signal.SIGTERM)
    assert flow.wait("agent.preemption-notice")["seconds"] == PREEMPTION_SECONDS
    assert flow.ok("about", protocol=PROTOCOL)["workers"]
    if how == "by the flow":
        flow.ok("end")
    else:
        signal_again(node, flow)
    flow.wait("agent.ended")
    assert node.ended() == 0
    assert not node.remains()


def test_sigterm_to_all_processes_gives_the_controller_time(node: Node, flow: Flow) -> None:
    """As a batch system sends it to what it is about to take away: only the rank ends, by its own wish, and the agent waits for orders."""
    ends = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); hello(); time.sleep(600)"
    flow.prepare(node, [sys.executable, node.script(CLIENT + ends)])
    flow.start(1)
    flow.wait("worker.hello")
    before = set(node.remains()) - {flow.pid()}
    for pid in node.remains():
        os.kill(pid, signal.SIGTERM)
    assert flow.wait("agent.preemption-notice")["seconds"] == PREEMPTION_SECONDS
    assert flow.exited()["code"] == 143
    assert flow.ok("about", protocol=PROTOCOL)["workers"] == {}
    assert before <= set(node.remains()), "helpers work for the agent, and it has work for them still"
    flow.ok("end")
    assert node.ended() == 0


def test_the_same_sigterm_passed_on_late_is_no_second_one(node: Node, flow: Flow) -> None:
    """The agent has its own at once; a stopped subreaper passes it on long after. Only a second one of its own ends it."""
    flow.prepare(node, [sys.executable, node.script(CLIENT + "hello(); time.sleep(600)")])
    flow.start(1)
    flow.wait("worker.hello")
    os.kill(node.subreaper_pid, signal.SIGSTOP)
    os.kill(node.agent, signal.SIGTERM)
    at = flow.wait("agent.preemption-notice")["at"]
    wait_until(lambda: time.time() > at + 2 * SAME_SIGNAL_SECONDS, seconds=60)
    os.kill(node.subreaper_pid, signal.SIGTERM)
    os.kill(node.subreaper_pid, signal.SIGCONT)
    wait_until(lambda: not pending(node.subreaper_pid, signal.SIGTERM) and not pending(node.agent, PASSED_ON), seconds=60)
    for _ in range(3):
        assert flow.ok("about", protocol=PROTOCOL)["workers"], "the rank goes on, and the controller still has its time"
    os.kill(node.agent, signal.SIGTERM)
    flow.exited()
    assert node.ended() == 0


def pending(pid: int, number: int) -> bool:
    """Return whether a process has still to take a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) & 1 << (number - 1) for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))


@pytest.mark.parametrize("when", ["at the same moment", "while the agent waits for it"])
def test_a_controller_that_goes_is_not_waited_for(node: Node, tmp_path: Path, when: str) -> None:
    """Its connection ends in the same round of the agent's loop, or later: the ranks are stopped, and may save, instead of being killed."""
    saved = tmp_path / "saved"
    saves = f"import signal\ndef save(*_):\n    open({str(saved)!r}, 'w').close()\n    os._exit(0)\nsignal.signal(signal.SIGTERM, save)\n"
    with node.flow() as flow:
        flow.attach(0)
        flow.prepare(node, [sys.executable, node.script(CLIENT + saves + "hello()\ntime.sleep(600)")])
        flow.start(1)
        flow.wait("worker.hello")
        if when == "at the same moment":
            os.kill(node.agent, signal.SIGSTOP)
            wait_until(lambda: state_of(node.agent) == "T", seconds=60)
        os.kill(node.agent, signal.SIGTERM)
        if when == "while the agent waits for it":
            flow.wait("agent.preemption-notice")
    os.kill(node.agent, signal.SIGCONT)
    assert node.ended() == 0
    assert saved.exists()


def signal_again(node: Node, flow: Flow) -> None:
    """Repeat the signal until the agent takes it for another one, and ends its ranks."""

    def is_over() -> bool:
        os.kill(node.subreaper_pid, signal.SIGTERM)
        flow.receive(0.2)
        return any(event["event"] == "worker.exited" for event in flow.events)

    wait_until(is_over, seconds=60)


def test_sigterm_ends_a_node_without_an_attached_controller(node: Node) -> None:
    """There is nobody to wait for."""
    with node.flow() as flow:
        flow.attach(0)
        flow.prepare(node, [sys.executable, node.script(CLIENT + "hello(); time.sleep(600)")])
        flow.start(1)
        flow.wait("worker.hello")
    os.kill(node.subreaper_pid, signal.SIGTERM)
    assert node.ended() == 0
    assert not node.remains()


def test_ranks_without_an_attached_controller_are_stopped_and_may_save(node: Node, tmp_path: Path) -> None:
    """The agent waits for them, and no longer."""
    saves = f"""
import signal
def saved(*_):
    time.sleep(0.2)
    open({str(tmp_path / "saved")!r}, "w").write("all of it")
    os._exit(0)
signal.signal(signal.SIGTERM, saved)
hello()
time.sleep(600)
"""
    with node.flow() as flow:
        flow.attach(0)
        flow.prepare(node, [sys.executable, node.script(CLIENT + saves)])
        flow.start(1)
        flow.wait("worker.hello")
    os.kill(node.subreaper_pid, signal.SIGTERM)
    assert node.ended() == 0
    assert (tmp_path / "saved").read_text() == "all of it"
    assert not node.remains()


def test_a_lease_of_months_works(node: Node, flow: Flow) -> None:
    """The kernel's timeout has 32 bits of milliseconds."""
    flow.prepare(node, [sys.executable, "-c", ""], lease=86400.0 * 365)
    for _ in range(3):
        flow.ok("ping")


def test_the_socket_can_be_reached_from_anywhere(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative path of a folder means the caller's folder, for agent and flow alike."""
    monkeypatch.chdir(tmp_path)
    connect(Path("node/agent.sock")).close()
