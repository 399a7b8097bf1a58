"""One module a command: `holdfast NAME` is `NAME.py`. The grammar, which loads them when they are called, is beside this folder."""
