"""Read evidence about the node that this process runs on. Standard library only, and pynvml where it is installed.

Every file that a reader opens is below a root that it is given, so that tests can use their own trees. Not here: what the evidence means
(`detectors`).
"""
