"""Analyse: reports about jobs, the cost of faults, the fault catalogue, logs, and policies.

What is computed and drawn is in `holdfast.accounting`, `holdfast.report` and `holdfast.classify`.
"""
