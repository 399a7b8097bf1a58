"""A package in the shape of pytorch/examples' multigpu_torchrun.py, as its author has it: nothing in it knows of Holdfast."""
