"""The command line: one module per command, imported only when that command runs.

Here: options and exit codes. Not here: what a command does (`outputs`, `session`, `tui`). Begin with `main`; modules
with a leading underscore are shared by commands.

numpy, msgspec, zmq, psutil and textual are imported inside functions, so that the help of a command and shell
completion stay fast.
"""
