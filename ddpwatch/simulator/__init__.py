"""Synthetic runs: steps, heartbeats and GPUs of ranks that do not exist, from a scenario of faults.

Here: what tests, benchmarks, screenshots and `ddpwatch demo` show without GPUs. Not here: real training (`demo.job`).
Begin with `scenario`.
"""
