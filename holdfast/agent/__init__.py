"""The agent: one process per node that starts the job's workers, monitors them and the node, and reports to the controller.

What runs on a node belongs here, with the standard library only. What decides about nodes belongs to `holdfast.control`, and what runs
inside the training process to `holdfast.runtime`.
"""
