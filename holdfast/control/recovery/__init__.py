"""From a diagnosis to training again: what was decided, the two ways to carry it out (a restart, or in the living processes), and waiting.

Which action it is to be the policy says (`policies`); ranks that move while nothing is wrong are in `holdfast.control.migration`.
"""
