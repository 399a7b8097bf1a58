"""Megatron-LM's ``ft_integration`` by other means: a model of Megatron Core is restarted, and the module is replaced in Megatron-LM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks import needs
from tests.runtime.agent_double import AgentDouble
from tests.runtime.chaos import fault
from tests.runtime.flow_double import FlowDouble, Workers
from tests.runtime.test_heartbeat import run

TRAINING = """
from . import ft_integration, global_vars
from .checkpointing import save_checkpoint

def pretrain(steps):
    ft_integration.setup()
    ft_integration.maybe_setup_simulated_fault()
    args = global_vars._GLOBAL_ARGS
    iteration = args.iteration
    ft_integration.on_checkpoint_loaded(is_local_chkpt=False)
    while iteration < args.train_iters:
        ft_integration.on_checkpointing_start()
        ft_integration.on_checkpointing_end(is_async_finalization=True)
        args.curr_iteration = iteration
        ft_integration.on_training_step_start()
        ft_integration.on_training_step_end()
        iteration += 1
    ft_integration.on_eval_step_start()
    ft_integration.on_eval_step_end()
    save_checkpoint()
    ft_integration.shutdown()
"""
"""What of Megatron-LM's training loop concerns fault tolerance: `megatron.training` is in no package that can be installed."""
MEGATRON = {
    "training.py": TRAINING,
    "checkpointing.py": "from . import ft_integration\ndef save_checkpoint():\n ft_integration.on_checkpointing_start()\n"
    " ft_integration.on_checkpointing_end(is_async_finalization=False)\n assert ft_integration.get_rank_monitor_client() is None\n",
    "global_vars.py": "from types import SimpleNamespace\n_GLOBAL_ARGS = SimpleNamespace(iteration=3, train_iters=5)\n",
    "ft_integration.py": "def __getattr__(name):\n raise SystemExit('the original was called')\n",
    "__init__.py": "",
}


def test_megatron_lm_calls_this_module_in_place_of_its_own(agent: AgentDouble, tmp_path: Path) -> None:
    """Replaced before Megatron-LM is imported, and after; outside of its training loop the step must be given."""
    for name, text in MEGATRON.items():
        (tmp_path / "megatron" / "training" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "megatron" / "training" / name).write_text(text)
    here = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom holdfast.integrations import megatron\n"
    replaced = "megatron.replace_ft_integration()\n"
    imported = "from importlib import import_module\ntraining = import_module('megatron.training.training')\n"
    for script in (f"{here}{replaced}{imported}training.pretrain(5)", f"{here}{imported}{replaced}training.pretrain(5)"):
        agent.received.clear()
        done = run(script, agent.environment)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        agent.wait_for("finished", step=5)
        assert [(one["step"], one["until"], one["loss"]) for one in agent.of("beat")] == [(4, 5, None), (5, 5, None)]
        begun = [one["name"] for one in agent.of("section") if one["begin"]]
        assert begun == ["checkpointing", "checkpointing", "evaluation step", "checkpointing"]
        assert len(agent.of("section")) == 2 * len(begun)
    done = run(f"{here}megatron.on_training_step_start()\nmegatron.on_training_step_end()", agent.environment)
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: on_training_step_end() does not know the step"), done.stderr
    assert run(f"{here}megatron.on_training_step_end()").stderr == ""


def test_a_model_of_megatron_core_resumes_bit_equal(torch_imported: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tensor-parallel over two ranks, one of which is killed: the loop's own checkpoint, and steps, losses and sections are reported."""
    needs("megatron.core")
    workers = Workers(torch_imported, "examples.megatron_core")
    results, flows = [], []
    for chaos in ([], [fault(1, "begin", 8)]):
        flow = FlowDouble(workers, tmp_path_factory.mktemp("f"), "saves_itself", "megatron", ranks=2, stride=1, chaos=chaos, groups="auto")
        flow.begin()
        if chaos:
            flow.until_dead(1)
            flow.restart()
        ended = flow.finish()
        assert ended.status == [0, 0], flow.logs()
        results.append((ended.results, ended.losses))
        flows.append(flow)
        flow.close()
    workers.close()
    assert results[0] == results[1]
    assert sorted(results[0][1][0]) == list(range(1, 11))
    disturbed = flows[1]
    assert "resumed after step 6" in disturbed.logs()
    assert {one["name"] for one in disturbed.of("section")} == {"checkpointing"}
    assert {one["level"] for one in disturbed.of("level")} == {"unchanged"}
    assert {one["step"] for one in disturbed.of("finished")} == {10}
