"""One module for each command: `holdfast NAME` is `NAME.py`. `holdfast.cli.parser` declares them and imports them when they run."""
