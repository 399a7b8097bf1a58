"""Any log in, one verdict a line or traceback out. `Classifier` is the way in; what a line means stands in `detectors.logs`."""

from __future__ import annotations

from holdfast.classify.classifier import Classifier, Page, Verdict, classify
from holdfast.classify.line_blocks import blocks

__all__ = ["Classifier", "Page", "Verdict", "blocks", "classify"]
