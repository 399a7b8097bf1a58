"""Two replicas of one model, each with its own loss; rank 0 is killed once, between the update of a step and the report of its loss."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

until, fatal = int(sys.argv[1]), int(sys.argv[2])
marks = Path(os.environ["HOLDFAST_CHECKPOINT_DIR"])

torch.set_num_threads(1)
holdfast.join()
torch.manual_seed(1)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with holdfast.session(model=model, optimizer=optimizer) as session:
    wrapped = session.stabilize_ddp(DistributedDataParallel(model))
    for step in session.steps(until=until):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step.number + session.rank))
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if session.rank == 0 and step.number == fatal and os.environ["HOLDFAST_GENERATION"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        step.end(step.number + session.rank / 2)
