"""What is known of a run: ranks, their recent steps, GPUs and logs, kept up to date frame by frame.

Here: decoding into bounded memory, and checkpoints of it for recordings. Not here: figures across ranks (`metrics`).
Read `run` (RunState), `rank` (RankState), `step_store` (the steps of one rank), then `ingest`. Text from outside
passes through `sanitize` once.
"""
