"""Facts about a rank besides its times: GPUs, process, data, set-up, and the cost of watching it."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final

from ddpwatch.core.diagnosis.data_loading import first_batches_of
from ddpwatch.core.diagnosis.exits import why_no_heartbeat
from ddpwatch.core.metrics.pauses import pauses_of
from ddpwatch.core.model_kinds import DDP
from ddpwatch.core.state.run import ALIVE
from ddpwatch.core.units import UNPROVEN, count, duration_text, ms_text, percent, plural, size
from ddpwatch.view.cells import Cell, Level
from ddpwatch.view.gpus.busy_and_waiting import cpu_percent, stale_s
from ddpwatch.view.gpus.detail import absences, gpu_facts
from ddpwatch.view.gpus.process_usage import cpu_share, memory_change
from ddpwatch.view.layout import facts, heading, paragraph
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from ddpwatch.core.metrics.pauses import PauseFigures
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.view.run_view import RunView
    from ddpwatch.wire import Beat, Hello, Loader, LoaderWorkers

NOTES_SHOWN: Final = 3
"""Max. number of notes shown, the newest."""
_MIN_STARVATION: Final = 0.01
"""Smallest CPU starvation that is shown, as a fraction of the time."""
_MIN_PAUSES: Final = 0.001
"""Smallest pauses that are shown, as a fraction of the time."""
PAUSE_LABELS: Final = {"gc_ns": "GC", "save_ns": "saves", "eval_ns": "evaluation"}
SETTINGS_SHOWN: Final = 12
"""Max. number of DDP settings shown."""
WRAPPERS: Final = {
    "ddp": "DistributedDataParallel",
    "contains-ddp": "contains a DistributedDataParallel",
    "ddp-tp": "DistributedDataParallel, with parameters sharded as DTensors",
    "fsdp2": "FSDP2 (fully_shard)",
    "fsdp2-tp": "FSDP2 (fully_shard), with parameters sharded once more as DTensors",
    "fsdp1": "FSDP1 (FullyShardedDataParallel)",
    "replicate": "replicate of torch.distributed",
    "deepspeed": "DeepSpeed engine",
    "tensor-parallel": "tensor parallel: parameters sharded as DTensors",
    "pipeline": "stage of a pipeline",
    "other-ddp": "a DistributedDataParallel that is not torch's",
    "dataparallel": "DataParallel",
    "plain": "no wrapper",
}
"""What wraps the model, by `Hello.kind`."""
COMMS: Final = {
    "passive": "passive: no DDP communication hook",
    "buckets": "buckets: each bucket is timed",
    "hook": "the script's own communication hook",
}


def rank_facts(run_view: RunView, row: Row, columns: int) -> list[Line]:
    """The facts in groups, the most variable first. Empty groups are left out."""
    rank = row.state
    # GPU readings are always current: with steps of another time they cannot show what was waiting.
    gpus = _gpus(row._replace(figures=None) if run_view.hindsight else row)
    groups = (
        *gpus,
        ("process", _process(run_view, row)),
        ("pauses", _pauses(run_view, rank)),
        ("data", _data(row)),
        ("logged by the script", _logged(rank)),
        ("setup", _set_up(rank.hello)),
        ("ddpwatch itself", _watching(rank)),
    )
    lines: list[Line] = []
    for place, (title, pairs) in enumerate(groups):
        if pairs:
            note = run_view.hindsight if place <= len(gpus) else ""
            lines += [*([[]] if lines else []), heading(title, columns, note), *facts(pairs, columns)]
    if rank.notes:
        lines += [[], *_notes(rank, columns)]
    return lines


def _process(run_view: RunView, row: Row) -> list[tuple[str, str]]:
    rank, beat = row.state, row.state.beat
    if beat is None:
        received = "nothing yet" if rank.last_received_ns is None else "no heartbeat yet"
        return [("received", f"{received}; {why}" if (why := why_no_heartbeat(rank)) else received)]
    change, share = memory_change(rank), cpu_share(rank)
    pairs = [
        ("CPU", f"{cpu_percent(rank):.0f}%" + (f", {share}" if share else "")),
        ("RSS", (size(beat.rss_bytes) if beat.rss_bytes else UNPROVEN) + (f", {change}" if change else "")),
    ]
    if (waited := rank.cpu_starvation.lately) is not None and waited >= _MIN_STARVATION:
        pairs.insert(1, ("starved", f"waited for a CPU core {percent(waited)} of the time it was runnable"))
    if row.condition in ALIVE:
        pairs.append(("now", f"has been in {beat.activity or PHASES[beat.phase]} for {_short(beat.phase_ns)}"))
    elif rank.last_received_ns is not None:
        pairs.append(("last message", f"{duration_text((run_view.now.now_ns - rank.last_received_ns) / 1e9)} ago"))
    return pairs


def _gpus(row: Row) -> list[tuple[str, list[tuple[str, str]]]]:
    """One group per GPU, or why there is none."""
    latest = row.state.gpus.latest
    if latest is None:
        return []
    if not latest.gpus:
        return [("GPU", [("no data", latest.why)] if latest.why else [])]
    groups = []
    for gpu in latest.gpus:
        pairs = gpu_facts(row, gpu)
        if (age_s := stale_s(row.state)) is not None:
            pairs.insert(0, ("▲ stale", f"read {duration_text(age_s)} before the last message"))
        if absent := absences(gpu):
            pairs.append(("no data", absent))
        groups.append((" · ".join(filter(None, (gpu.device, gpu.name))), pairs))
    return groups


def _logged(rank: RankState) -> list[tuple[str, str]]:
    if rank.logged is None:
        return []
    step, values = rank.logged
    return [*((name, f"{value:.6g}") for name, value in values.items()), ("at step", count(step))]


def _pauses(run_view: RunView, rank: RankState) -> list[tuple[str, str]]:
    shown = (pause for pause in pauses_of(run_view.state, rank) if pause.share >= _MIN_PAUSES)
    return [(PAUSE_LABELS[pause.column], _pause(pause)) for pause in shown]


def _pause(pause: PauseFigures) -> str:
    parts = [
        f"{pause.share:.1%} of the time",
        pause.detail,
        f"up to {ms_text(pause.longest_ns)} in {plural(pause.steps, 'step')}",
        f"last in step {count(pause.last_step)}",
    ]
    return ", ".join(filter(None, parts))


def _data(row: Row) -> list[tuple[str, str]]:
    pairs = []
    if row.figures is not None and row.figures.batch is not None:
        pairs.append(("batch", count(row.figures.batch)))
    if row.state.loaders:
        _, loader = max(row.state.loaders.items(), key=itemgetter(0))
        pairs += [("sampler", _sampler(loader)), ("loader", _loader(loader))]
        if row.state.workers is not None and loader.workers:
            pairs.append(("workers", _workers(row.state.workers)))
        if (first := first_batches_of(row.state)) is not None:
            pairs.append(("first batch", f"{ms_text(first.first_ns)}, later ones {ms_text(first.later_ns)}"))
    return pairs


def _workers(workers: LoaderWorkers) -> str:
    text = f"{workers.cpu_percent}% of a core each"
    if workers.queued_percent:
        text += f", waited for one {workers.queued_percent}% of the time"
    return text


def _sampler(loader: Loader) -> str:
    parts = [loader.sampler or "none"]
    parts.append(f"over {plural(loader.replicas, 'rank')}" if loader.distributed else "not distributed")
    if loader.shuffle:
        parts.append("shuffled")
    if loader.sampler_epoch >= 0:
        parts.append(f"set_epoch({loader.sampler_epoch})")
    return ", ".join(parts)


def _loader(loader: Loader) -> str:
    parts = [plural(loader.workers, "worker") if loader.workers else "no workers"]
    if loader.workers and loader.prefetch_factor:
        parts.append(f"prefetch_factor {count(loader.prefetch_factor)}")
    if loader.workers and loader.persistent_workers is not None:
        parts.append("persistent" if loader.persistent_workers else "new in each epoch")
    if loader.pin_memory is not None:
        parts.append("pinned memory" if loader.pin_memory else "memory not pinned")
    if loader.length:
        parts.append(f"{count(loader.length)} batches per epoch")
    return ", ".join([*parts, f"epoch {count(loader.epoch + 1)} since start"])


def _set_up(hello: Hello | None) -> list[tuple[str, str]]:
    if hello is None:
        return []
    model = hello.model
    if hello.parameters:
        model += f"{', ' if model else ''}{count(hello.parameters)} parameters, {size(hello.parameter_bytes)}"
    settings = [f"{name}={value}" for name, value in hello.ddp.items()]
    more = len(settings) - SETTINGS_SHOWN
    versions = [
        f"torch {hello.torch}" if hello.torch else "",
        f"Python {hello.python}" if hello.python else "",
    ]
    pairs = [
        ("model", model),
        ("wrapped as", WRAPPERS.get(hello.kind, hello.kind)),
        ("device", hello.device),
        ("local rank", str(hello.local_rank)),
        ("backend", hello.backend),
        ("all-reduce", COMMS.get(hello.comm, hello.comm) if hello.kind in DDP else ""),
        ("DDP", ", ".join(settings[:SETTINGS_SHOWN]) + (f", … {more} more" if more > 0 else "")),
        ("versions", ", ".join(filter(None, versions))),
        ("restarts", count(hello.attempt) if hello.attempt else ""),
    ]
    return [(name, text) for name, text in pairs if text]


def _watching(rank: RankState) -> list[tuple[str, str]]:
    """What ddpwatch costs this rank, and how many of its messages are missing."""
    losses = [
        f"{plural(rank.lost, 'message')} lost" if rank.lost else "",
        f"{plural(rank.dropped, 'record')} dropped" if rank.dropped else "",
        f"{plural(rank.bad, 'record')} unusable" if rank.bad else "",
    ]
    pairs = [("missing", ", ".join(filter(None, losses)) or "nothing")] if rank.last_received_ns is not None else []
    beat = rank.beat
    if beat is not None and beat.hook_ns and beat.step:
        pairs.append(("hooks", f"{beat.hook_ns / beat.step / 1e3:.0f} µs per step"))
    if beat is not None and beat.agent_cpu_ns:
        pairs.append(("agent thread", _agent_cpu(rank, beat)))
    return pairs


def _agent_cpu(rank: RankState, beat: Beat) -> str:
    started_ns = rank.hello.started_unix_ns if rank.hello else 0
    ran_ns = rank.unix_ns_at(beat.mono_ns) - started_ns if started_ns else 0
    if ran_ns <= 0:
        return f"{beat.agent_cpu_ns / 1e9:.1f} s of CPU so far"
    return f"{min(beat.agent_cpu_ns / ran_ns * 100, 999):.1f}% of a core"


def _notes(rank: RankState, columns: int) -> list[Line]:
    newest = [note for _, note in sorted(rank.notes.items(), key=itemgetter(0))]
    left_out = len(newest) - NOTES_SHOWN
    lines = [heading("notes", columns, f"the last {NOTES_SHOWN} of {len(newest)}" if left_out > 0 else "")]
    for note in reversed(newest[-NOTES_SHOWN:]):
        lead = [Cell(f"step {count(note.step)}  ", Level.DIM)]
        lines += paragraph(note.text, columns, lead=lead)
    return lines


def _short(ns: int) -> str:
    return f"{ns / 1e6:.0f} ms" if ns < 1_000_000_000 else duration_text(ns / 1e9)
