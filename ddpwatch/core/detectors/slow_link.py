"""Wire time of the all-reduce against its own earlier steady state, for the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.metrics.baseline import open_delay_steps
from ddpwatch.core.units import ms_text, percent, size_text

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext

RULE: Final = rules.SLOW_LINK
ADVICE: Final = (
    "Check the links between the hosts: errors and speed (ethtool -S, ibstat, nvidia-smi nvlink -s), traffic of other "
    "jobs, and with NCCL_DEBUG=INFO whether NCCL fell back from InfiniBand or NVLink to sockets."
)
ONE_HOST_ADVICE: Final = (
    "All ranks share one host: look for other processes on its CPU cores and memory (gloo runs the all-reduce on the "
    "CPU), more threads than cores (OMP_NUM_THREADS), and check NVLink or PCIe between GPUs (nvidia-smi nvlink -s, "
    "nvidia-smi topo -m)."
)


def slow_link(context: DetectorContext) -> list[Finding]:
    """The all-reduce itself takes longer than earlier in this run for the same gradient bytes.

    The wire is what even the last rank to arrive spends in the all-reduce, so slow ranks do not count. Compares it with
    the baseline of earlier steps that moved the same number of bytes, only while all ranks are seen, and only if it
    persists. The slow link itself is not identified.
    """
    limits = context.limits.slow_link
    window, block = context.window, context.latest_block
    if block is None or window.world_size < 2 or not window.complete:
        return []
    baseline = context.history.steady("wire_ns", block, limits.lasting_s)
    if baseline is None:
        return []
    more_ns = block.wire_ns - baseline.value
    step_ns = max(block.step_ns, 1.0)
    if block.wire_ns < limits.factor * baseline.value or more_ns <= 0 or more_ns < limits.share * step_ns:
        return []
    moved = f" for the same {size_text(block.comm_bytes)} of gradients" if block.comm_bytes else ""
    return [
        Finding(
            rule=RULE,
            severity=Severity.WARNING,
            subject="job",
            message=f"wire takes {ms_text(block.wire_ns)} per step vs {ms_text(baseline.value)} before{moved}"
            f" · costs {percent(more_ns / step_ns)} throughput",
            advice=ONE_HOST_ADVICE if window.one_host else ADVICE,
            cost=more_ns / step_ns,
            evidence={
                "wire_ms": round(block.wire_ns / 1e6, 3),
                "usual_wire_ms": round(baseline.value / 1e6, 3),
                "spread_ms": round(baseline.spread / 1e6, 3),
                "step_ms": round(block.step_ns / 1e6, 3),
                "gradient_bytes": round(block.comm_bytes),
                "steps": block.steps,
            },
            proven=more_ns > limits.sigmas * baseline.spread,
            lasting=open_delay_steps(limits.lasting_s, block),
        )
    ]
