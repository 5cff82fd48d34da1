"""GPU figures of this process: NVML samples, Xid errors, allocator memory and NCCL timings.

Here: reading them, on the agent's thread. Not here: judging them (`ddpwatch.core.detectors.gpu_*`). Begin with
`sampler`; `nvml` is the only module that calls the library.
"""
