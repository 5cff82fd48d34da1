"""GPU figures of this process: NVML samples, Xid errors, allocator memory and NCCL timings.

Here: reading them, in threads of their own. Not here: evaluating them (`ddpwatch.core.detectors.gpu_*`). Begin with
`sampler`; `nvml` is the only module that calls the library.
"""
