"""The Prefect tasks: those of the training-job flow, of the scheduled flows, and building blocks for users' own flows.

Tasks are thin: what they do is in `holdfast.control` and `holdfast.probe`.
"""
