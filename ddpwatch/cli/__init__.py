"""The command line: one module a command, imported only when that command runs.

Here: options and exit codes. Not here: what a command does (`outputs`, `session`, `tui`). Begin with `main`; modules
with a leading underscore are shared by commands.
"""
