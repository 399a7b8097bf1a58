"""What managed groups need of torch that is no public interface: it differs between versions, so it is looked up, and never assumed."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

NEEDED: Final = {
    "torch.distributed": (
        *("ProcessGroup", "ProcessGroupGloo._set_default_timeout", "Work", "DistNetworkError", "PrefixStore", "_broadcast_coalesced"),
        *("Backend._plugins", "Backend.register_backend", "BackendConfig"),
    ),
    "torch.distributed.distributed_c10d": (
        *("_new_process_group_helper", "_register_process_group", "_unregister_process_group", "AllgatherOptions"),
        *("batch_isend_irecv", "_check_p2p_op_list", "_coalescing_manager", "_get_default_group"),
        *("_world.default_pg", "_world.pg_map", "_world.pg_names", "_world.pg_group_ranks", "_world.pg_backend_config"),
        "_world.pg_coalesce_state",
    ),
    "torch._C": ("_dispatch_tls_is_dispatch_key_excluded", "DispatchKey.ADInplaceOrView", "_AutoDispatchBelowADInplaceOrView"),
    "torch._C._dynamo.eval_frame": ("_FrameExecStrategy", "_FrameAction.SKIP", "set_code_exec_strategy"),
}
"""Attributes, by the module that has them."""


@functools.cache
def missing() -> str:
    """Return the first thing that managed groups need and this torch lacks; empty where it has all."""
    return next((f"{module}.{name}" for module, names in NEEDED.items() for name in names if not _has(module, name)), "")


def _has(module: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True
