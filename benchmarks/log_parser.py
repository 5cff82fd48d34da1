"""How many lines of training logs are read in a second: of those that say nothing, and of a mix with failures."""

from __future__ import annotations

from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING

from benchmarks.pairs import row
from ddpwatch.core.logs.parser import parse_line

if TYPE_CHECKING:
    from collections.abc import Sequence

BUDGET_PER_S = 200_000
MIX_BUDGET_PER_S = 50_000
BLOCKS = 30
LINES = 5_000
PLAIN = (
    "[rank3]: epoch 3 step 12345/50000 loss=2.3456 lr=0.000123 grad_norm=1.234 samples/s=1234.5 mem=34.5GiB",
    "2026-01-02 03:04:05,123 INFO trainer: saved checkpoint to out/step_12000 in 3.4 s",
    " 45%|████▌     | 450/1000 [03:12<03:55,  2.33it/s, loss=1.23]",
    "",
    "reading shard 00012 of 00100; 0 retries",
)
FAILURES = (
    (
        "[rank2]:[E810 03:04:11.061727749 ProcessGroupNCCL.cpp:683] [PG ID 0 PG GUID 0(default_pg) Rank 2]  failure "
        "detected by watchdog at work sequence id: 9 PG status: last enqueued work: 12, last completed work: 8"
    ),
    "[rank1]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:14503",
    "[rank3]: ValueError: not enough values to unpack (expected 2, got 1)",
)


def lines_per_s(texts: Sequence[str]) -> float:
    """Median over blocks, so that a busy moment does not count."""
    rates = []
    for _ in range(BLOCKS):
        began_ns = perf_counter_ns()
        for text in texts:
            parse_line(text)
        rates.append(len(texts) / (perf_counter_ns() - began_ns) * 1e9)
    return median(rates)


def main() -> None:
    """Lines in a second, with and without failures among them."""
    plain = PLAIN * (LINES // len(PLAIN))
    one_in_ten = ((PLAIN * 6)[:27] + FAILURES) * (LINES // 30)
    for what, texts, budget in (
        ("log lines that say nothing", plain, BUDGET_PER_S),
        ("log lines, one in ten about a failure", one_in_ten, MIX_BUDGET_PER_S),
    ):
        rate = lines_per_s(texts)
        row(what, f"{rate / 1000:.0f} k/s", f">{budget // 1000} k/s", rate >= budget)


main()
