"""What a training script imports sooner or later: a warm starter has it imported before anybody asks."""

from typing import Final

USUAL_IMPORTS: Final = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",  # comes with the first use of an optimizer
    "holdfast.runtime.session",
)
