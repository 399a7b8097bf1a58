"""managed.py: `dist.recv(src=None)` raises: torch calls `work._source_rank()`, which ManagedWork does not define (it has `source_rank`)."""

import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import HashStore
from holdfast.runtime.groups.attempt import Attempt
from holdfast.runtime.groups.inner import build
from holdfast.runtime.groups.managed import ManagedGroup


def test_receive_from_anybody_tells_who_sent():
    import threading

    store, groups = HashStore(), {}

    def make(rank):
        one = ManagedGroup("g", [0, 1], rank, Attempt(), timedelta(seconds=5))
        one.give(build(store, "x", rank, 2, devices=("cpu",), timeout=timedelta(seconds=5), gave_up=lambda: False), {})
        groups[rank] = one

    threads = [threading.Thread(target=make, args=(r,)) for r in (0, 1)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    sent = groups[0].send([torch.ones(2)], 1, 0)
    work = groups[1].recv_anysource([torch.zeros(2)], 0)
    work.wait()
    sent.wait()
    assert work._source_rank() == 0


def test_operations_without_options_work():
    """managed.py: `opts or dist.AllgatherOptions()`: torch.distributed has no AllgatherOptions (torch._C._distributed_c10d has)."""
    from holdfast.runtime.groups.sandbox import Sandbox

    one = ManagedGroup("g", [0, 1, 2], 2, Attempt(), timedelta(seconds=1))
    one.sandbox = Sandbox(None, [one])
    out = torch.zeros(6)
    one.all_gather_single(out, torch.ones(2))
    one.allreduce_coalesced([torch.ones(2)])
