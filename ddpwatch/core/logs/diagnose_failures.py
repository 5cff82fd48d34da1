"""Ranks that failed by themselves: out of memory, an exception, a signal. Other ranks' symptoms follow from them."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core.diagnosis.exits import how_ended
from ddpwatch.core.logs.verdict import Verdict, evidence_of
from ddpwatch.core.units import ranks_text, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.logs.rank_attribution import AttributedLines, Entry

CAUSES: Final = (
    "gpu-fault", "cuda-oom", "host-oom", "cuda-error", "ddp-error", "exception", "crash", "killed", "signal", "exit",
)  # fmt: skip
"""Kinds of lines that end a rank by themselves; among several, the first in this list explains the others."""
GPU_AFTERMATH: Final = frozenset({43, 45})
"""Xids that the driver logs when a process ends, for any reason."""
_KINDS: Final = {
    "xid": "gpu-fault",
    "oom-killer": "host-oom",
    **{cause: cause for cause in ("cuda-oom", "cuda-error", "ddp-error", "exception", "crash")},
}
_OF_THE_KERNEL: Final = ("xid", "oom-killer")
_PASSING: Final = frozenset({"exception", "cuda-oom", "ddp-error"})
"""Kinds of errors that a script may catch and survive."""
_VICTIM_CODES: Final = (-signal.SIGTERM, -signal.SIGABRT, 128 + signal.SIGTERM, 128 + signal.SIGABRT)
UNNAMED: Final = "A rank that the logs do not name"
UNEXPLAINED_EXIT: Final = "unexplained-exit"
"""Cause of a verdict that knows which rank exited, and not why."""
OWN_LOGS_ADVICE: Final = "Add the ranks' own logs: torchrun writes them with `--log-dir logs --redirects 3 --tee 3`."
_TEXT_CHARS: Final = 160
"""Characters quoted of an error message."""


class Failure(NamedTuple):
    """A rank that failed by itself, with the line that shows it."""

    cause: str
    entry: Entry

    @property
    def rank(self) -> int | None:
        """The failed rank; None if no line names it."""
        return self.entry.rank


def by_failure(case: AttributedLines) -> Verdict | None:
    """Name the ranks that failed by themselves; None if none did."""
    failures = _failures(case)
    first = [failure for failure in failures if failure.rank in case.first_failed]
    if first:
        # A line without a rank may be about one of these; failures of other ranks came later.
        failures = [*first, *(each for each in failures if each.rank is None and not _is_of_another(case, each))]
    if not failures:
        return None
    cause = min((failure.cause for failure in failures), key=CAUSES.index)
    alike = [failure for failure in failures if failure.cause == cause]
    chosen = _earliest(alike)
    culprits = {failure.rank for failure in chosen if failure.rank is not None}
    named = bool(culprits)
    if not culprits:
        culprits = {failure.rank for failure in failures if failure.rank is not None}
    failed = {failure.rank for failure in _failures(case) if failure.rank is not None}
    others = (failed | set(case.secondary())) - culprits
    # A child of torch.multiprocessing that raised is reported with its traceback: one without it called exit.
    if cause == "exit" and chosen[0].entry.mark.kind != "spawn-exit" and not case.with_symptoms():
        return _unexplained_exit(case, chosen, culprits)
    return Verdict(
        culprits=tuple(sorted(culprits)),
        cause=cause,
        text=_text(chosen, culprits, others, named=named, other_pid=_has_another_pid(case, chosen[0])),
        victims=tuple(sorted(others)),
        evidence=evidence_of([failure.entry for failure in chosen], [*case.exits.values()]),
        certain=named
        and (bool(first) or _is_proven(case, alike, culprits, others))
        and all(failure.entry.sure for failure in chosen),
    )


def _unexplained_exit(case: AttributedLines, chosen: Sequence[Failure], ranks: set[int]) -> Verdict:
    """The first exit that a launcher reports, without any rank's error: the rank may have failed, or have waited in
    vain for another one, which the launcher then terminated.
    """
    codes = sorted({code for rank in ranks if (code := case.exit_code(rank)) is not None})
    first = " first" if ranks <= case.first_failed else ""
    whose, it = ("their errors are", "they are") if len(ranks) > 1 else ("its error is", "it is")
    text = (
        f"{ranks_text(ranks).capitalize()} exited{first} (code {', '.join(map(str, codes))}); {whose} not in these "
        f"logs, so whether {it} the root cause is not proven. {OWN_LOGS_ADVICE}"
    )
    return Verdict((), UNEXPLAINED_EXIT, text, (), evidence_of([failure.entry for failure in chosen]))


def _is_of_another(case: AttributedLines, failure: Failure) -> bool:
    """Whether the kernel names a process that the launcher does not list, though both use one pid namespace. In a
    container they do not, and then no pid matches.
    """
    alike = any(entry.mark.number("pid") in case.ranks_by_pid for entry in case.of(*_OF_THE_KERNEL))
    return alike and _has_another_pid(case, failure)


def _has_another_pid(case: AttributedLines, failure: Failure) -> bool:
    pid, known = failure.entry.mark.number("pid"), case.ranks_by_pid
    return pid is not None and pid not in known and bool(known) and case.first_failed <= set(known.values())


def _failures(case: AttributedLines) -> list[Failure]:
    found = [
        Failure(_KINDS[entry.mark.kind], entry)
        for entry in case.of(*_KINDS)
        if entry.mark.number("xid") not in GPU_AFTERMATH
        and not case.had_symptom_before(entry)
        and not (entry.mark.kind in _PASSING and (case.outlived(entry) or case.was_ended(entry)))
    ]
    if case.of("scheduler-end"):
        return found
    explained = {failure.rank for failure in found}
    explained |= case.with_symptoms()
    for rank, entry in case.exits.items():
        cause = _cause_of_exit(case.exit_code(rank))
        if cause is not None and rank not in explained:
            found.append(Failure(cause, entry))
    return found


def _cause_of_exit(exit_code: int | None) -> str | None:
    """Cause implied by an exit code; None if others ended the process, or it did not fail."""
    if exit_code in (None, 0, *_VICTIM_CODES):
        return None
    if exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "killed"
    return "signal" if exit_code < 0 else "exit"


def _earliest(failures: Sequence[Failure]) -> list[Failure]:
    """The first exception of each file. Lines of different files have no common order."""
    sources = {failure.entry.source for failure in failures}
    kinds = {failure.entry.mark.word("exception") for failure in failures}
    if len(sources) == 1 and len(kinds) > 1:
        return [min(failures, key=lambda failure: failure.entry.line)]
    seen: dict[int | None, Failure] = {}
    for failure in failures:
        seen.setdefault(failure.rank, failure)
    return list(seen.values())


def _is_proven(case: AttributedLines, alike: Sequence[Failure], culprits: set[int], others: set[int]) -> bool:
    """Whether no other rank can have failed first, and another rank noticed it: scripts also print what they catch."""
    noticed = bool(others) or any(case.exit_code(rank) not in (None, 0) for rank in culprits)
    return {failure.rank for failure in alike} == culprits and (noticed or alike[0].cause not in _PASSING)


def _text(chosen: Sequence[Failure], culprits: set[int], others: set[int], *, named: bool, other_pid: bool) -> str:
    mark = chosen[0].entry.mark
    name = ranks_text(culprits).capitalize() if culprits else UNNAMED
    what = _what(chosen[0].cause, mark.fields, plural=len(culprits) > 1)
    text = f"{name} {what}."
    if culprits and not named:
        text = f"A process {what}: most likely {ranks_text(culprits)}, but no line names it."
        if other_pid:
            text = f"A process {what}. The launcher lists {ranks_text(culprits)} under another pid, so it was "
            text += f"{ranks_text(culprits)} only if the job ran in a container with its own pids."
    if others:
        text += f" {ranks_text(others).capitalize()}: secondary failure{'' if len(others) == 1 else 's'}."
    return text


def _what(cause: str, fields: dict[str, int | float | str], *, plural: bool) -> str:
    wanted, rss = fields.get("wanted_bytes"), fields.get("rss_bytes")
    detail = str(fields.get("error") or fields.get("message") or "")[:_TEXT_CHARS].rstrip(". ")
    name, code = str(fields.get("exception", "an error")), fields.get("exit_code")
    texts = {
        "gpu-fault": f"had a GPU error: Xid {fields.get('xid')}, {detail}",
        "cuda-oom": "ran out of GPU memory" + (f", allocating {size_text(wanted)}" if isinstance(wanted, int) else ""),
        "host-oom": "was killed by the kernel's OOM killer"
        + (f" at {size_text(rss)} of host memory" if isinstance(rss, int) else ""),
        "cuda-error": f"had a CUDA error: {detail}",
        "ddp-error": "was stopped by a DDP error: the model or its use is not what DDP expects",
        "exception": f"raised {name}" + (f": {detail}" if detail else ""),
        "crash": f"crashed: {detail}",
        "killed": "was killed (SIGKILL); check the kernel log (dmesg) and the scheduler for an out-of-memory kill",
        "signal": how_ended(code) if isinstance(code, int) else "was terminated (a signal)",
        "exit": f"exited with code {code}; these logs contain no exception from it",
    }
    text = texts[cause]
    return text.replace("was ", "were ", 1) if plural and text.startswith("was ") else text
