"""Inside the training process: steps, managed groups, checkpoints, snapshots, and the connection to the agent.

Torch and the standard library only. Here: the session that a script uses, how it joins the other ranks, and what ended it; the folders have
the rest. What runs outside the training process is in `holdfast.agent` and `holdfast.control`.
"""
