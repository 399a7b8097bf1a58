"""Training scripts of `benchmarks.frameworks`: a small GPT over four libraries.

A line that ends in ``# holdfast`` is left out of the plain script; one that ends in ``# holdfast: <code>`` is <code> there.
"""
