"""The training job of `ddpwatch demo`: real gloo ranks on CPU with a schedule of faults.

Here: what runs in the ranks. Not here: starting them (`cli.demo`) and synthetic runs (`simulator`).
"""
