"""The Hugging Face Trainer in a Holdfast job: ``Trainer(..., callbacks=[HoldfastCallback()])``."""

from __future__ import annotations

try:
    import transformers  # noqa: F401 (named in the error below)
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError("holdfast.integrations.huggingface needs transformers: pip install 'transformers>=5.23'") from error

from holdfast.integrations.huggingface.callback import HoldfastCallback

__all__ = ["HoldfastCallback"]
