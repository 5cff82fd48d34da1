"""The table of GPUs, the page of one GPU, and CPU and memory where a host has no GPU.

Here: columns, totals, map and detail. Not here: reading NVML (`agent.gpu`). Begin with `columns`.
"""
