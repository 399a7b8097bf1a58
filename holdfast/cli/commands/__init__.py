"""What the commands do: one folder for each heading of `holdfast --help`, one module for each command or group of similar ones.

`holdfast.cli.parser` declares the commands and imports a module when its command runs.
"""
