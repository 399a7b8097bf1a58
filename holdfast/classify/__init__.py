"""Classify any log: it is read line by line, and each fault, a line or a traceback, is named. `Classifier` is the entry point.

Here: how to read a log and find candidate lines fast. Not here: what a line means: see `holdfast.detectors.log_lines`.
"""

from __future__ import annotations

from holdfast.classify.classifier import Classification, Classifier, Page, classify
from holdfast.classify.log_stream import blocks

__all__ = ["Classification", "Classifier", "Page", "blocks", "classify"]
