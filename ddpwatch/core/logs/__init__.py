"""What log lines of torch, NCCL, torchrun and the kernel mean, and what they say together.

Here: recognizing lines and reasoning over them. Not here: following files (`sources.log_tail`). Read `parser`,
`pattern` and the two tables `patterns_nccl` and `patterns_system`, then `diagnose`.
"""
