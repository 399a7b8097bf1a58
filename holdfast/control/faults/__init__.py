"""From events to evidence: what to diagnose, whether enough is known, what happened before, who is slow, who reaches whom.

The judgement itself is in `detectors` and `policies`.
"""
