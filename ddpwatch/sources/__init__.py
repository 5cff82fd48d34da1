"""Where frames come from while a job runs: sockets of ranks, a relay, processes of this host, log files.

Here: connections and their loss. Not here: recordings (`recording.replay` is a source too) and synthetic runs
(`simulator`). Read `frames` (what a source yields), `live`, `find_run` (which runs exist).
"""
