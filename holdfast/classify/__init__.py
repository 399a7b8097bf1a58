"""Any log in, one verdict a line or traceback out. `Classifier` is the way in; what a line means stands in `detectors.logs`."""

from __future__ import annotations

from holdfast.classify.classifier import Classification, Classifier, Page, classify
from holdfast.classify.line_blocks import blocks

__all__ = ["Classification", "Classifier", "Page", "blocks", "classify"]
