"""From events to evidence: what to diagnose, what happened before, who is slow, who reaches whom.

The judgement itself is in `detectors` and `policies`.
"""
