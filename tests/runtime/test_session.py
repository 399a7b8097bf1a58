"""The session as a user meets it: the loop, its messages, and what goes wrong in plain words."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.runtime import agent_client as link_module
from tests.runtime.agent_double import AgentDouble
from tests.runtime.damage import names
from tests.runtime.ranks import ROOT, Ranks


@pytest.fixture
def listening(agent: AgentDouble, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentDouble]:
    """Provide an agent to which this process is connected."""
    for name, value in agent.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(link_module, "_of_this_process", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield agent
    link_module.link().mute()


def train(until: int | None = 5, **options: Any) -> Any:
    """Train a model that learns nothing; return the session."""
    with holdfast.session(**({"model": nn.Linear(2, 2)} | options)) as session:
        for step in session.steps(until=until):
            step.end(step.number / 10)
    return session


def test_a_worker_reports_everything_to_its_agent(listening: AgentDouble, tmp_path: Path) -> None:
    """From hello to bye: both marks, where it begins, each step, each save as a section."""
    train(until=3, checkpoint_dir=tmp_path, save_every=2)
    listening.wait_for("finished")
    kinds = [message["t"] for message in listening.received]
    save = ["section", "commit-request", "saved", "section"]
    assert kinds == ["hello", "mark", "mark", "resumed", "beat", "beat", *save, "beat", *save, "finished"]
    assert [mark["name"] for mark in listening.of("mark")] == ["group", "load"]
    assert [(beat["step"], beat["loss"], beat["until"]) for beat in listening.of("beat")] == [(1, 0.1, 3), (2, 0.2, 3), (3, 0.3, 3)]
    train(until=4, checkpoint_dir=tmp_path, save_every=0)
    resumed = listening.wait_for("resumed", 2)[1]
    assert resumed == {"t": "resumed", "step": 3, "path": str(tmp_path / "step-00000003"), "generation": 1}


def test_the_environment_sets_directory_and_interval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The agent's variables are the default; arguments of the script take precedence."""
    for name, value in {"CHECKPOINT_DIR": str(tmp_path / "a"), "SAVE_EVERY": "2", "KEEP": "3"}.items():
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    train(until=9)
    assert names(tmp_path / "a") == ["step-00000006", "step-00000008", "step-00000009"]
    train(until=9, checkpoint_dir=tmp_path / "b", save_every=9, keep=1)
    assert names(tmp_path / "b") == ["step-00000009"]


def test_without_a_directory_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither agent nor directory: the script trains as if it knew nothing of Holdfast."""
    monkeypatch.chdir(tmp_path)
    assert train().steps_done == 5
    assert names(tmp_path) == []


@pytest.mark.parametrize("loss", [1, 0.1, math.nan, torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64), torch.tensor(2), None])
def test_a_loss_is_stored_bit_for_bit(loss: Any) -> None:
    """Numbers and tensors of one element, of any type."""
    with holdfast.session(model=nn.Linear(1, 1)) as session:
        for step in session.steps(until=1):
            step.end(loss)
    expected = None if loss is None else float(loss)
    assert session.loss == expected or math.isnan(expected or 0)


def test_leaving_the_loop_early_saves_the_last_step(tmp_path: Path) -> None:
    """Early stopping is a clean end."""
    with holdfast.session(model=nn.Linear(1, 1), checkpoint_dir=tmp_path) as session:
        for step in session.steps():
            step.end()
            if step.number == 7:
                break
    assert (names(tmp_path), session.saved) == (["step-00000007"], 7)


def test_extra_state_is_restored(tmp_path: Path) -> None:
    """Extras with a state, plain values, a tensor in them, several optimizers, a scheduler, and a model in parts."""

    def things() -> dict[str, Any]:
        model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 2, bias=False)})
        optimizers = [torch.optim.Adam(model["g"].parameters()), torch.optim.SGD(model["d"].parameters(), lr=0.1, momentum=0.9)]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
        extra = {"ema": nn.Linear(2, 2), "best": 9.0, "seen": [1, (2, "x")], "mean": torch.zeros(3)}
        return {"model": model, "optimizer": optimizers, "schedulers": scheduler, "extra": extra}

    before = things()
    with holdfast.session(**before, checkpoint_dir=tmp_path) as session:
        for step in session.steps(until=3):
            before["model"]["g"](torch.randn(1, 2)).sum().backward()
            before["model"]["d"](torch.randn(1, 2)).sum().backward()
            for optimizer in before["optimizer"]:
                optimizer.step()
            before["schedulers"].step()
            session.extra["best"] = step.number / 7
            session.extra["mean"] = torch.full((3,), 0.3)
            step.end()
    after = things()
    with holdfast.session(**after, checkpoint_dir=tmp_path) as session:
        assert session.steps_done == 3
    for name in ("model", "schedulers"):
        assert str(after[name].state_dict()) == str(before[name].state_dict())
    assert [str(one.state_dict()) for one in after["optimizer"]] == [str(one.state_dict()) for one in before["optimizer"]]
    assert str(after["extra"]["ema"].state_dict()) == str(before["extra"]["ema"].state_dict())
    assert (after["extra"]["best"], after["extra"]["seen"]) == (3 / 7, [1, (2, "x")])
    assert after["extra"]["mean"].tolist() == torch.full((3,), 0.3).tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": 3}, r"session\(model=...\) got a int, but must be a Module"),
        ({"optimizer": nn.Linear(1, 1)}, r"session\(optimizer=...\) got a Linear, but must be a Optimizer"),
        ({"schedulers": [3]}, r"session\(schedulers=...\) got a int, but must be something with state_dict"),
        ({"data": [1, 2]}, r"session\(data=...\) got a list, but must be something with state_dict"),
        ({"extra": [1]}, r"session\(extra=...\) got a list"),
        ({"save_every": -1}, "save_every is -1, but must be an integer of at least 0"),
        ({"save_every": "often"}, "save_every is 'often', but must be an integer"),
        ({"keep": 0}, "keep is 0, but must be an integer of at least 1"),
    ],
)
def test_a_wrong_argument_is_reported_with_what_is_expected(options: dict[str, Any], words: str) -> None:
    """At the call, before anything has happened."""
    with pytest.raises((TypeError, ValueError), match=words):
        holdfast.session(**({"model": nn.Linear(1, 1)} | options))


def test_wrong_use_of_steps_is_reported_at_once() -> None:
    """A step committed twice or not at all, a loss that is no number, a negative end."""
    with holdfast.session(model=nn.Linear(1, 1)) as session:
        step = next(session.steps())
        with pytest.raises(TypeError, match=r"tensor of shape \(2,\).*loss.mean"):
            step.end(torch.ones(2))
        with pytest.raises(TypeError, match="got a str"):
            step.end("low")  # type: ignore[arg-type]
        step.end()
        with pytest.raises(RuntimeError, match=r"step 1 has ended already.*step\.end\(\) once"):
            step.end()
        with pytest.raises(RuntimeError, match=r"has not begun: use `with holdfast\.session\("):
            next(holdfast.session(model=nn.Linear(1, 1)).steps())
        with pytest.raises(ValueError, match="cannot be negative"):
            next(session.steps(until=-1))
        with pytest.raises(RuntimeError, match=r"step 2 was not ended.*step\.end\(loss\)"):
            for _ in session.steps(until=5):
                pass
    with pytest.raises(ValueError, match=r"'x'.*\b0\b"), holdfast.section("x", limit=0):
        pass


def test_a_section_is_declared_also_outside_of_a_session(listening: AgentDouble) -> None:
    """A compile before the session, with a limit as seconds or timedelta, and an end also when it fails."""
    with pytest.raises(KeyError), holdfast.section("compile", limit=timedelta(minutes=2)):
        raise KeyError
    messages = listening.wait_for("section", 2)
    assert [(one["name"], one["limit_s"], one["begin"]) for one in messages] == [("compile", 120.0, True), ("compile", 120.0, False)]


def test_a_model_is_stored_under_its_own_names_however_it_is_wrapped(tmp_path: Path) -> None:
    """Compiling and DataParallel put prefixes before every name; a checkpoint has none."""
    model = nn.Linear(2, 2)
    train(until=1, model=nn.DataParallel(torch.compile(model, backend="eager")), checkpoint_dir=tmp_path)
    plain = nn.Linear(2, 2)
    train(until=1, model=plain, checkpoint_dir=tmp_path)
    assert plain.weight.tolist() == model.weight.tolist()


SCRIPT = """
import torch, holdfast
model = torch.nn.Linear(1, 1)
with holdfast.session(model=model) as session:
    for step in session.steps(until=9):
        if step.number == 4:
            raise ArithmeticError("the loss is gone")
        step.end(1.0)
"""


def test_an_uncaught_exception_is_sent_to_the_agent_with_its_step(agent: AgentDouble, tmp_path: Path) -> None:
    """Under a plain command, without the warm starter; it is printed as ever, and the exit status is Python's."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | agent.environment | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, tmp_path / "train.py"], env=environment, capture_output=True, text=True, check=False)
    report = agent.wait_for("exception")[0]
    assert (report["type"], report["message"], report["step"], report["peer_lost"]) == ("ArithmeticError", "the loss is gone", 4, False)
    assert "train.py" in report["traceback"]
    assert (ended.returncode, "ArithmeticError: the loss is gone" in ended.stderr) == (1, True)
    assert agent.of("finished") == []


def test_ranks_find_each_other_by_the_environment_alone(ranks: Ranks, agent: AgentDouble) -> None:
    """The session makes the group; each rank introduces itself to the agent."""
    results = ranks.run("train", 2, agent.environment, until=2)
    assert results[0]["model"] == results[1]["model"]
    assert sorted(one["rank"] for one in agent.wait_for("hello", 2)) == [0, 1]
    assert len(agent.wait_for("finished", 2)) == 2
