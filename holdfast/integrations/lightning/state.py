# ruff: noqa: SLF001, ANN401 (Lightning keeps its counters and logged values in private attributes; they are of any type)
"""What a rank of a Lightning training needs besides model, optimizers, schedulers and generators: read it, and put it back."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.integrations.lightning.data import DataLoaderSource, Source, tracker_of
from holdfast.runtime.state import tree
from holdfast.runtime.world import World

META: Final = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx")
"""Settings of a logged value that are plain."""


class RankState:
    """The state of one rank between two steps, as ``data`` of its session.

    `restore_objects` and `restore_loops` put a loaded state back, in two parts: the first before Lightning's hooks that start the training,
    the second after them.
    """

    follows_rank_0: Final = True
    """A rank that did not exist when the state was saved takes the state of rank 0."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._root = next(kind.__module__ for kind in type(trainer).__mro__ if kind.__module__.endswith(".trainer.trainer"))
        self.loaded: dict[str, Any] | None = None
        """The state that was loaded and is not restored completely."""

    # -- reading ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        fetcher, connector = fit_loop._data_fetcher, trainer._logger_connector
        tracker, ahead = tracker_of(fit_loop._combined_loader), len(getattr(fetcher, "batches", ()))
        return {
            "ranks": World.current().size,
            "epoch": fit_loop.epoch_progress.state_dict(),
            "loop": fit_loop.epoch_loop.state_dict(),
            "data": None if tracker is None else tracker.position(ahead),
            "fetched": None if fetcher is None else fetcher.fetched - ahead,
            "batch_idx": getattr(fetcher, "_batch_idx", 0),
            "reloaded": (fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch),
            "results": [_logged(key, metric) for key, metric in fit_loop.epoch_loop._results.items() if metric.meta.sync.group is None],
            "metrics": {name: dict(getattr(connector, name)) for name in _METRICS},
            "connector": (connector._first_loop_iter, connector._current_fx),
            "torchmetrics": {name: _metric_state(metric) for name, metric in self._metrics()},
            "evaluating": [name for name, module in self._module.named_modules() if not module.training],
            "frozen": [name for name, one in self._module.named_parameters() if not one.requires_grad],
            "trainer": (trainer.should_stop, trainer.accumulate_grad_batches),
            "buffers": self._own_buffers(),
            **{name: state for name, _, state in self._objects()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, for `restore_objects` and `restore_loops`."""
        self.loaded = state

    def check(self) -> None:
        """Refuse states of callbacks and hooks that could be saved but not loaded. Raise ``TypeError``."""
        for _, owner, state in self._objects():
            for name, part in state.items():
                try:
                    tree.from_bytes(tree.to_bytes(part))
                except Exception as error:
                    raise TypeError(
                        f"HoldfastCallback cannot save what {owner} stores as {name!r}: keep numbers, strings, lists, dicts and tensors in "
                        "it, or allow its class with torch.serialization.add_safe_globals"
                    ) from error

    def _objects(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield the states of the user's objects: where they are saved, whose they are, and the state by name."""
        trainer, module = self._trainer, self._module
        call = self._import("trainer.call")
        yield "callbacks", "a callback's state_dict()", call._call_callbacks_state_dict(trainer)
        saved = self._hook_dict()
        before = set(saved)
        module.on_save_checkpoint(saved)
        yield "module", f"{type(module).__name__}.on_save_checkpoint()", {name: saved[name] for name in saved.keys() - before}
        data = trainer.datamodule
        yield "datamodule", f"{type(data).__name__}.state_dict()", {} if data is None else dict(data.state_dict())
        yield "precision", "the precision plugin", dict(trainer.precision_plugin.state_dict())

    def _hook_dict(self) -> dict[str, Any]:
        """Return what a module's hook for checkpoints finds in a checkpoint."""
        trainer = self._trainer
        own: dict[str, Any] = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
        if not self._overrides("on_save_checkpoint") and not self._overrides("on_load_checkpoint"):
            return own
        own["state_dict"] = self._module.state_dict()
        own["optimizer_states"] = [optimizer.state_dict() for optimizer in trainer.optimizers]
        own["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        return own

    def _overrides(self, hook: str) -> bool:
        return bool(self._import("utilities.model_helpers").is_overridden(hook, self._module))

    def _own_buffers(self) -> dict[str, Tensor] | None:
        """Return copies of the buffers where each rank has its own: DDP takes those of rank 0 otherwise, before the next batch.

        Under manual optimization Lightning has DDP exchange buffers before the first batch only.
        """
        parallel = self._trainer.strategy.model
        if not isinstance(parallel, DistributedDataParallel) or parallel.will_sync_module_buffers():
            return None
        return {name: one.detach().clone() for name, one in self._module.named_buffers()}

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        """Yield the metrics of torchmetrics that the module holds: what they have summed is in no state dict."""
        kind = import_module("torchmetrics").Metric
        return ((name, one) for name, one in self._module.named_modules() if isinstance(one, kind))

    # -- restoring ----------------------------------------------------------------------------------------------------

    def restore_objects(self) -> bool:
        """Restore the states of callbacks and hooks and the position in the data; return whether it is within an epoch.

        Lightning's loops then begin the current epoch, as if all before it had been done here.
        """
        assert self.loaded is not None
        state, fit_loop = self.loaded, self._trainer.fit_loop
        self._restore_users_objects(state)
        self._restore_counters(state)
        self._trainer.should_stop = state["trainer"][0]
        if state["data"] is None:
            return False
        fit_loop.setup_data()
        tracker = tracker_of(fit_loop._combined_loader)
        assert tracker is not None
        tracker.restore(state["data"])
        self._rescale(state, tracker.sources)
        iter(fit_loop._data_fetcher)
        epoch = fit_loop.epoch_progress
        within = bool(epoch.current.ready > epoch.current.processed)
        if within:  # Lightning counts the epoch again as it begins it
            for counts in (epoch.current, epoch.total):
                counts.ready, counts.started = counts.processed, counts.processed
            fit_loop._resuming_from_checkpoint = True  # the iterator of the data stays
        return within

    def _restore_users_objects(self, state: dict[str, Any]) -> None:
        """Restore the states of callbacks and hooks, as Lightning does from a checkpoint."""
        trainer = self._trainer
        for callback in trainer.callbacks:
            if own := state["callbacks"].get(callback.state_key):
                callback.load_state_dict(own)
        if self._overrides("on_load_checkpoint"):
            self._module.on_load_checkpoint({**self._hook_dict(), **state["module"]})
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])

    def restore_loops(self) -> None:
        """Restore counters and logged values, between the start of the epoch and its next batch."""
        assert self.loaded is not None
        trainer, state, self.loaded = self._trainer, self.loaded, None
        fit_loop, connector = trainer.fit_loop, trainer._logger_connector
        self._restore_counters(state)
        self._restore_fetcher(state)
        fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = state["reloaded"]
        trainer.accumulate_grad_batches = state["trainer"][1]
        connector._first_loop_iter, connector._current_fx = state["connector"]
        for name in _METRICS:
            setattr(connector, name, _moved(state["metrics"][name], self._module.device))
        self._restore_results(state["results"])
        for name, metric in self._metrics():
            if own := state["torchmetrics"].get(name):
                _restore_metric(metric, own, self._module.device)
        self._restore_module(state)

    def _restore_fetcher(self, state: dict[str, Any]) -> None:
        fetcher = self._trainer.fit_loop._data_fetcher
        fetcher.fetched = state["fetched"] + len(getattr(fetcher, "batches", ()))
        if hasattr(fetcher, "_batch_idx"):
            fetcher._batch_idx = state["batch_idx"]
        if fetcher.length is not None:
            fetcher.done = fetcher.fetched >= fetcher.length

    def _restore_module(self, state: dict[str, Any]) -> None:
        """Restore the buffers that each rank has of its own, and which parts evaluate and which are frozen."""
        if state["buffers"] is not None:
            self._trainer.strategy.model.require_forward_param_sync = False
            for name, buffer in self._module.named_buffers():
                buffer.copy_(state["buffers"].get(name, buffer))
        evaluating, frozen = set(state["evaluating"]), set(state["frozen"])
        for name, module in self._module.named_modules():
            module.training = name not in evaluating
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad is (name in frozen):
                parameter.requires_grad = name not in frozen

    def _restore_counters(self, state: dict[str, Any]) -> None:
        fit_loop = self._trainer.fit_loop
        fit_loop.epoch_progress.load_state_dict(state["epoch"])
        fit_loop.epoch_loop.load_state_dict(state["loop"])
        loops = [fit_loop, fit_loop.epoch_loop]
        while loops:  # Lightning restarts a loop with other rules: here it continues as in the process before
            loop = loops.pop()
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            loops += [one for one in vars(loop).values() if hasattr(one, "_resuming_from_checkpoint")]

    def _rescale(self, state: dict[str, Any], sources: list[Source]) -> None:
        """Count the batches of this epoch for the present number of ranks: as many samples were used, in larger or smaller parts."""
        before, now = state["ranks"], World.current().size
        (source, *others) = sources
        if before == now or others or not isinstance(source, DataLoaderSource) or not hasattr(source.loader.sampler, "num_replicas"):
            return
        batches = source.resumable.consumed
        batches -= batches % state["trainer"][1]  # whole steps
        progress = state["loop"]["batch_progress"]
        skipped = batches - progress["current"]["completed"]
        for count in progress["current"]:
            progress["current"][count], progress["total"][count] = batches, progress["total"][count] + skipped
        progress["is_last_batch"] = False
        source.resumable.consumed = state["fetched"] = state["data"]["index"] = batches

    def _restore_results(self, saved: list[dict[str, Any]]) -> None:
        """Restore what was logged in this epoch, so that its mean is over all of it."""
        results, kinds = self._trainer.fit_loop.epoch_loop._results, self._import("trainer.connectors.logger_connector.result")
        results.clear()
        for one in saved:
            meta = kinds._Metadata(**one["meta"], metric_attribute=one["metric"], reduce_fx=_reduction(one["reduce"]))
            should, rank_zero_only, op = one["sync"]
            meta.sync = kinds._Sync(_should=should, fn=self._trainer.strategy.reduce, rank_zero_only=rank_zero_only, _op=op)
            results[one["key"]] = metric = kinds._ResultMetric(meta, one["value"] is not None)
            if one["value"] is None:
                metric.value = self._module.get_submodule(one["metric"])
            else:
                metric.value = one["value"].clone()
            if one["batch_size"] is not None:
                metric.cumulated_batch_size = one["batch_size"].clone()
            metric._forward_cache, metric.has_reset, metric._update_count = one["cache"], one["has_reset"], one["updates"]
            metric.to(self._module.device)

    def _import(self, name: str) -> Any:
        """Return a module of the Lightning whose Trainer this is."""
        return import_module(f"{self._root.removesuffix('trainer.trainer')}{name}")


_METRICS: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def _logged(key: str, metric: Any) -> dict[str, Any]:
    """Return a logged value with its settings, in plain values and tensors."""
    meta = metric.meta
    module = getattr(meta.reduce_fx, "__module__", None)
    size = getattr(metric, "cumulated_batch_size", None) if metric.is_tensor else None
    return {
        "key": key,
        "meta": {name: getattr(meta, name) for name in META},
        "metric": meta.metric_attribute,
        "reduce": (module == "builtins", meta.reduce_fx.__name__),
        "sync": (meta.sync.should, meta.sync.rank_zero_only, meta.sync.op),
        "value": metric.value.detach().clone() if metric.is_tensor else None,
        "batch_size": size.detach().clone() if isinstance(size, Tensor) else size if size is None else torch.tensor(size),
        "cache": metric._forward_cache.detach().clone() if isinstance(metric._forward_cache, Tensor) else None,
        "has_reset": metric.has_reset,
        "updates": metric._update_count,
    }


def _reduction(named: tuple[bool, str]) -> Callable[..., Any]:
    builtin, name = named
    found: Callable[..., Any] = getattr(builtins if builtin else torch, name)
    return found


def _metric_state(metric: Any) -> dict[str, Any]:
    """Return what a metric has summed: tensors, or lists of them."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {"values": {name: _detached(value) for name, value in values.items()}, "updates": metric._update_count}


def _restore_metric(metric: Any, state: Mapping[str, Any], device: torch.device) -> None:
    for name, value in state["values"].items():
        setattr(metric, name, _moved(value, device))
    metric._update_count, metric._computed = state["updates"], None


def _detached(value: Any) -> Any:
    return [one.detach().clone() for one in value] if isinstance(value, list) else value.detach().clone()


def _moved(value: Any, device: torch.device) -> Any:
    """Return tensors, in lists and dicts too, on *device*."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_moved(one, device) for one in value]
    return {name: _moved(one, device) for name, one in value.items()} if isinstance(value, dict) else value
