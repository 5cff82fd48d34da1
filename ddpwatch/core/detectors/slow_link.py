"""Wire time of the all-reduce against its own earlier steady state, for the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.metrics.baseline import open_delay_steps
from ddpwatch.core.units import ms, percent, size

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext

RULE: Final = rules.SLOW_LINK
ADVICE: Final = (
    "Check the links between the hosts: errors and speed (ethtool -S, ibstat, nvidia-smi nvlink -s), traffic of other "
    "jobs, and with NCCL_DEBUG=INFO whether it fell back from InfiniBand or NVLink to sockets."
)
ONE_HOST_ADVICE: Final = (
    "All ranks share one host: look for other processes on its cores and memory (with gloo the all-reduce itself runs "
    "on the CPU), more threads than cores (OMP_NUM_THREADS), and between GPUs at NVLink or PCIe (nvidia-smi nvlink -s, "
    "nvidia-smi topo -m)."
)


def slow_link(context: DetectorContext) -> list[Finding]:
    """The all-reduce itself takes longer than it did earlier in this run for the same gradient bytes.

    The wire is what even the last rank to arrive spends in the all-reduce, so slow ranks do not count. It is compared
    with the usual wire time of earlier steps that moved as many bytes, and only while all ranks are seen. It must last:
    a moment of load is no slow link. Which link it is cannot be seen from here.
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
    moved = f" for the same {size(block.comm_bytes)} of gradients" if block.comm_bytes else ""
    return [
        Finding(
            rule=RULE,
            severity=Severity.WARNING,
            subject="job",
            message=f"the wire takes {ms(block.wire_ns)} ms a step{moved}, {ms(baseline.value)} before"
            f" · {percent(more_ns / step_ns)} of the step longer",
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
