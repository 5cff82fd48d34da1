"""Every threshold of every rule, by name, with its unit and its default.

The rules read these and nothing else, so that what a user may tune and what is judged by are the same thing. In a
file the groups are tables of their rule's name: `[straggler]` `share = 0.03`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from itertools import pairwise
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ddpwatch.errors import UsageError

Share: TypeAlias = Annotated[float, Meta(gt=0, lt=10)]
Factor: TypeAlias = Annotated[float, Meta(gt=1, le=1000)]
Sigmas: TypeAlias = Annotated[float, Meta(ge=1, le=100)]
Fraction: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Steps: TypeAlias = Annotated[int, Meta(ge=1, le=500)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.1, le=86_400)]
Bytes: TypeAlias = Annotated[int, Meta(ge=1, le=2**50)]
Readings: TypeAlias = Annotated[int, Meta(ge=2, le=100)]
"""Of a GPU, one a second."""


class _Group(Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    pass


class JudgeLimits(_Group, frozen=True):
    """When steps are judged, for all rules alike."""

    warmup_steps: Steps = 10
    """First steps of a run that are never judged: bucket building, compiling, caches."""
    stride_steps: Steps = 5
    """Judged again each time all ranks have done so many more steps; of very many ranks after some times as many."""
    least_s: Seconds = 5.0
    """Where steps are so short that the steps looked at take less than this, more of them are."""


class StragglerLimits(_Group, frozen=True):
    """A rank whose own work takes longer than that of the others."""

    share: Share = 0.05
    """Own work beyond that of the others that counts, as a part of the step."""
    window_steps: Steps = 80
    """Steps looked at."""
    recent_steps: Steps = 20
    """Latest steps in which a lasting excess must show in the median."""
    sigmas: Sigmas = 5.0
    """How far beyond the noise an excess must be, in standard errors."""
    outliers: Steps = 5
    """Slow steps in the window that make an irregular straggler."""
    critical_cost: Share = 0.5
    """Costs the job so much of its time: critical instead of a warning."""
    linger_steps: Steps = 120
    """Closed when it is in none of the steps looked at for so many more; longer than the pauses between bursts."""


class CommShareLimits(_Group, frozen=True):
    """Too much of the step goes into communication that is not hidden."""

    share: Share = 0.10
    """All-reduce share of the step, waiting included; more opens the alert."""
    close_part: Fraction = 0.8
    """Part of `share` below which the share must fall to close it."""
    window_steps: Steps = 50
    """Steps looked at."""
    linger_steps: Steps = 100
    """Closed after so many steps below."""


class SlowLinkLimits(_Group, frozen=True):
    """The wire takes longer than it used to for the same bytes."""

    factor: Factor = 1.5
    """Wire time against its own earlier steady state."""
    share: Share = 0.03
    """And so much more of the step, at the least."""
    sigmas: Sigmas = 5.0
    """How far beyond the spread of the earlier steady state."""
    lasting_s: Seconds = 20.0
    """It must have lasted so long, and the steady state before it, too."""
    linger_steps: Steps = 100
    """Closed after so many steps without it."""


class DataBoundLimits(_Group, frozen=True):
    """The ranks wait for their DataLoaders."""

    share: Share = 0.20
    """Waiting for data as a part of the step."""
    ranks_share: Fraction = 0.5
    """On more than this part of the ranks."""
    window_steps: Steps = 50
    """Steps looked at."""
    linger_steps: Steps = 100
    """Closed after so many steps without it."""


class SlowdownLimits(_Group, frozen=True):
    """The whole job has become slower than it was."""

    factor: Factor = 1.10
    """Work and wire of all ranks against their own earlier steady state."""
    sigmas: Sigmas = 5.0
    """How far beyond the spread of the earlier steady state."""
    lasting_s: Seconds = 20.0
    """It must have lasted so long, and the steady state before it, too."""
    linger_steps: Steps = 150
    """Closed after so many steps without it."""


class UnevenBatchLimits(_Group, frozen=True):
    """Ranks train on different numbers of samples."""

    steps: Steps = 3
    """Steps with different sample counts, of the last `window-steps`."""
    window_steps: Steps = 20
    """Steps looked at."""
    linger_s: Seconds = 60.0
    """Closed after so long without it; where ranks wait for one whose data has ended, as `stall` is."""


class SameDataLimits(_Group, frozen=True):
    """Ranks train on the same samples."""

    steps: Steps = 3
    """Steps in which ranks had the same batch, of those that were sampled."""
    linger_steps: Steps = 500
    """Closed after so many steps without it."""


class DriftLimits(_Group, frozen=True):
    """The replicas are no longer equal."""

    linger_steps: Steps = 500
    """Closed after so many steps with equal checksums."""


class MemoryLimits(_Group, frozen=True):
    """Memory of a rank keeps growing."""

    growth_bytes: Bytes = 256 << 20
    """Growth of the resident memory over the samples kept."""
    growth_share: Share = 0.10
    """And as a part of what it was."""
    least_s: Seconds = 300.0
    """Watched for at least so long."""
    gpu_part: Fraction = 0.95
    """Part of a GPU's memory in use, and growing."""
    gpu_growth_bytes: Bytes = 64 << 20
    """Growth of a GPU's memory in use over the readings kept."""
    gpu_least_s: Seconds = 60.0
    """A GPU is watched for at least so long."""
    gpu_unused_part: Fraction = 0.20
    """Reserved by torch and not in use, as a part of the GPU's memory: said to be fragmented."""
    linger_s: Seconds = 300.0
    """Closed after so long without growth."""


class GpuThrottleLimits(_Group, frozen=True):
    """The clocks of a GPU are held down."""

    readings: Readings = 20
    """Held down in most of so many readings, one a second."""
    clock_part: Fraction = 0.85
    """Clocks below this part of those of the other GPUs cost time: a warning also where only power is short."""
    lasting_s: Seconds = 5.0
    """Found for so long: the GPUs of a host become hot one after another, and are to be told as the host."""
    linger_s: Seconds = 60.0
    """Closed after so long without it."""


class GpuErrorLimits(_Group, frozen=True):
    """The driver tells of an error of a GPU."""

    linger_s: Seconds = 86_400.0
    """Never closed while the rank lives: what has failed once is looked at by somebody."""


class GpuIdleLimits(_Group, frozen=True):
    """A GPU has little to do while its rank trains."""

    util_part: Fraction = 0.30
    """Utilisation below this part on average, and in the last reading."""
    readings: Readings = 30
    """Over so many readings, one a second."""
    linger_s: Seconds = 60.0
    """Closed after so long without it."""


class RankLostLimits(_Group, frozen=True):
    """A rank has fallen silent."""

    silent_s: Seconds = 5.0
    """No sign of life for so long."""
    linger_s: Seconds = 1.0
    """Closed so long after it is heard again."""


class RankFailedLimits(_Group, frozen=True):
    """A rank was ended by an exception."""

    linger_s: Seconds = 86_400.0
    """Never closed while anybody watches: a rank does not come back."""


class StallLimits(_Group, frozen=True):
    """Ranks wait in a collective for one that has not arrived."""

    least_s: Seconds = 1.0
    """A wait that is shorter is never abnormal."""
    factor: Factor = 5.0
    """And it must exceed so many times the longest of 99 in 100 earlier waits."""
    first_s: Seconds = 120.0
    """As long as there were none: in the first steps ranks compile and start one after another."""
    joined_s: Seconds = 5.0
    """And where all ranks have joined: when cores are short, an operation stands still for a while."""
    critical_s: Seconds = 10.0
    """Critical after so long, or when more than half of the timeout has passed."""
    linger_s: Seconds = 2.0
    """Closed so long after the ranks go on."""


class DesyncLimits(_Group, frozen=True):
    """Ranks wait in different operations for each other. When a wait is abnormal is said by `stall`."""

    linger_s: Seconds = 2.0
    """Closed so long after the ranks go on."""


class TimeoutLimits(_Group, frozen=True):
    """The timeout of a process group is near, or has fired."""

    soon_s: Seconds = 60.0
    """Told when no more than this is left."""
    soon_part: Fraction = 0.5
    """And no more than this part of the timeout."""
    linger_s: Seconds = 2.0
    """Closed so long after the ranks go on."""


class LossyLimits(_Group, frozen=True):
    """Something that was measured did not arrive, or could not be believed."""

    linger_s: Seconds = 60.0
    """Closed after so long without a new loss."""


class Limits(_Group, frozen=True):
    """All of them."""

    judge: JudgeLimits = JudgeLimits()
    straggler: StragglerLimits = StragglerLimits()
    comm_share: CommShareLimits = CommShareLimits()
    slow_link: SlowLinkLimits = SlowLinkLimits()
    data_bound: DataBoundLimits = DataBoundLimits()
    slowdown: SlowdownLimits = SlowdownLimits()
    uneven_batch: UnevenBatchLimits = UnevenBatchLimits()
    same_data: SameDataLimits = SameDataLimits()
    drift: DriftLimits = DriftLimits()
    memory: MemoryLimits = MemoryLimits()
    gpu_throttle: GpuThrottleLimits = GpuThrottleLimits()
    gpu_error: GpuErrorLimits = GpuErrorLimits()
    gpu_idle: GpuIdleLimits = GpuIdleLimits()
    rank_lost: RankLostLimits = RankLostLimits()
    rank_failed: RankFailedLimits = RankFailedLimits()
    stall: StallLimits = StallLimits()
    desync: DesyncLimits = DesyncLimits()
    timeout: TimeoutLimits = TimeoutLimits()
    lossy: LossyLimits = LossyLimits()


DEFAULTS: Final = Limits()


def limits_from(table: dict[str, Any], where: str) -> Limits:
    """The limits with what the table changes. Raises `UsageError` that names the key and where it was read."""
    try:
        return msgspec.convert(table, Limits)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`")
        raise UsageError(f"{where}: {f'limit {key}: ' if key else ''}{_plain(what)}") from None


def changed(limits: Limits) -> dict[str, dict[str, float]]:
    """By group and key as users write them, the limits that are not those of this version."""
    usual: dict[str, dict[str, float]] = msgspec.to_builtins(DEFAULTS)
    found: dict[str, dict[str, float]] = {}
    for group, keys in msgspec.to_builtins(limits).items():
        for key, value in keys.items():
            if value != usual[group][key]:
                found.setdefault(group, {})[key] = value
    return found


def described(limits: Limits, group: str) -> list[dict[str, Any]]:
    """The limits of one group: key, value as set, and what it means."""
    found = getattr(limits, group.replace("-", "_"))
    texts = _texts(type(found).__name__)
    return [
        {"key": name.replace("_", "-"), "value": getattr(found, name), "text": texts[name]}
        for name in found.__struct_fields__
    ]


def _texts(kind: str) -> dict[str, str]:
    """The docstrings of a group's fields. Python keeps none at run time; the source has them."""
    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _plain(what: str) -> str:
    """The validator's sentence in this project's words."""
    if what.startswith("Object contains unknown field"):
        known = what.rpartition(" ")[2].strip("`")
        return f"there is no limit {known}"
    return what[:1].lower() + what[1:].replace("`", "")
