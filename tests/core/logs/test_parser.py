"""Parsing of one log line: known lines give their fields, any other text gives None and never raises."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch.core.logs.parser import LINE_PATTERNS, MAX_CHARS, PREFILTERS, parse_line
from ddpwatch.core.logs.pattern import LINE_CHARS
from ddpwatch.core.logs.prefixes import DEFAULT_GROUP, Group, read_group

SAMPLES = [json.loads(line) for line in (Path(__file__).parent / "samples.jsonl").read_text().splitlines()]
LINES = [sample["line"] for sample in SAMPLES]
NEUTRAL = [
    "",
    "2026-01-02 03:04:05,123 ",
    "[2026-01-02 03:04:05] ",
    "2026-01-02T03:04:05.123456Z ",
    "dn-14: ",
    "10.0.0.7: ",
]
NEUTRAL += ["worker-1  | ", "03:04:05 ", "\x1b[31m", "node7.cluster.local: ", "(TrainWorker pid=123, ip=10.0.0.1) "]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample['kind']}: {sample['line'].strip()[:40]}")
def test_every_known_line_gives_its_fields(sample):
    mark = parse_line(sample["line"])

    assert {"line": sample["line"], **{name: getattr(mark, name) for name in sample if name != "line"}} == sample


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("[PG ID 0 PG GUID 0(default_pg) Rank 118]  failure", Group(DEFAULT_GROUP, 118)),
        ("[PG 0 (default_pg) Rank 7] E", Group(DEFAULT_GROUP, 7)),
        ("[PG 0 Rank 7] T", Group(DEFAULT_GROUP, 7)),
        ("[PG ID 0 PG GUID  Rank 3] P", Group(DEFAULT_GROUP, 3)),
        ("[PG ID 5 PG GUID 42(TP) Rank 1] P", Group("TP 42", 1)),
        ("[PG ID 6 PG GUID 43(TP) Rank 1] P", Group("TP 43", 1)),
        ("[PG Rank 7]", None),
        ("no group", None),
    ],
)
def test_process_groups_of_all_versions_are_read(text, group):
    assert read_group(text) == group


@given(st.sampled_from(LINES), st.lists(st.sampled_from(NEUTRAL), max_size=3))
def test_a_prefix_without_a_rank_changes_nothing(line, prefixes):
    bare, prefixed = parse_line(line), parse_line("".join(prefixes) + line)

    assert msgspec.structs.replace(prefixed, text="") == msgspec.structs.replace(bare, text="")


@given(st.sampled_from(SAMPLES), st.lists(st.sampled_from(NEUTRAL), max_size=2), st.integers(0, 4095))
def test_the_rank_in_the_prefix_is_the_writer_of_the_line(sample, prefixes, rank):
    mark = parse_line(f"{''.join(prefixes)}[rank{rank}]:{sample['line']}")

    fields = {name: value for name, value in sample["fields"].items() if name != "group_rank"}
    assert (mark.kind, mark.group, mark.fields) == (sample["kind"], sample["group"], fields)
    about = {"torchrun-rank", "nccl-ras", "desync-timeout", "spawn-exit"}
    if sample["kind"] not in about and not sample["line"].startswith("[rank"):
        assert (mark.rank, mark.rank_sure) == (rank, True)


@pytest.mark.parametrize(
    ("prefix", "rank", "sure"),
    [
        ("[default3]:", 3, False),
        ("[trainer3]:", 3, False),
        ("3: ", 3, False),
        ("0: [default3]:", 3, False),
        ("1: [default3]:", None, False),
        ("1: [default3]:[rank11]: ", 11, True),
        ("dn-14: [rank11]:", 11, True),
        ("[rank3]:[E ProcessGroupNCCL.cpp:1537] ", 3, True),
        ("", None, False),
    ],
)
def test_launcher_prefixes_give_ranks_but_only_a_global_one_is_sure(prefix, rank, sure):
    mark = parse_line(f"{prefix}ValueError: no")

    assert (mark.kind, mark.rank, mark.rank_sure) == ("exception", rank, sure)


def test_a_rank_within_a_process_group_is_not_a_global_rank():
    line = (
        "[PG ID 5 PG GUID 42(TP) Rank 1]  failure detected by watchdog at work sequence id: 3 PG status: last enqueued"
    )
    mark = parse_line(f"{line} work: 3, last completed work: 2")

    assert (mark.rank, mark.group, mark.fields["group_rank"]) == (None, "TP 42", 1)


def test_the_rank_that_nccl_prints_is_only_a_fallback():
    line = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, OpType=BROADCAST"

    assert (parse_line(line).rank, parse_line(line).rank_sure) == (1, False)
    assert (parse_line(f"[rank9]:[E ProcessGroupNCCL.cpp:563] {line}").rank) == 9
    assert (parse_line(f"[default9]:{line}").rank) == 9


@pytest.mark.parametrize("value", ["3452013982", "18446744073709551615", "-7", "9" * 20])
def test_an_impossible_number_is_left_out(value):
    mark = parse_line(f"Timeout at NCCL work: 1, last enqueued NCCL work: 1, last completed NCCL work: {value}.")

    assert mark.fields == {"seq": 1, "enqueued": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "epoch 3 step 100 loss 2.5",
        "[rank0]: epoch 3 step 100 loss 2.5",
        "validation error 0.12, timeout=1800",
        "node1:123:456 [0] NCCL INFO Channel 00/24 : 0 1 2 3",
        "wandb: Network error (ConnectionError), entering retry loop.",
        "the Error class is documented below",
        "RuntimeErrors are handled",
        "using gloo with Timeout(ms)=1000",
    ],
)
def test_lines_of_a_healthy_run_match_nothing(text):
    assert parse_line(text) is None


def test_an_exception_after_a_progress_bar_is_recognized():
    assert parse_line(" 45%|##  | 45/100\r[rank1]: KeyError: 'x'").fields["exception"] == "KeyError"


def test_every_hint_passes_the_prefilter():
    assert not [shape.hint for shape in LINE_PATTERNS if not any(gate in shape.hint for gate in PREFILTERS)]


@pytest.mark.parametrize(
    "filler", ["", "1", "1, ", "[1, ", "a:1:", "[PG ", "[rank", "\x1b]", "é", "\x00", " ", "a1: ", "("]
)
def test_matching_is_linear_in_repeated_hints(filler):
    for shape in LINE_PATTERNS:
        for line in ((shape.hint + filler) * 200, filler * 4_000 + shape.hint, shape.hint + filler * 5_000):
            mark = parse_line(line)
            assert mark is None or len(mark.text) <= LINE_CHARS


@settings(max_examples=100)
@given(st.sampled_from(LINES), st.binary(max_size=40), st.integers(0, 200))
def test_junk_in_a_line_never_raises_and_is_sanitized(line, junk, at):
    data = line.encode()
    mark = parse_line((data[:at] + junk + data[at:]).decode("utf-8", "replace"))

    if mark is not None:
        texts = [mark.text, mark.group, *(value for value in mark.fields.values() if isinstance(value, str))]
        assert all(text.isprintable() for text in texts)


@given(st.text(max_size=300))
def test_any_text_can_be_parsed(text):
    parse_line(text)
    parse_line(text + "Error: " + text)


def test_only_the_beginning_of_a_line_of_megabytes_is_parsed():
    line = "[rank1]: CUDA out of memory. Tried to allocate 2.00 GiB" + " x" * 2_000_000

    assert parse_line(line) == parse_line(line[:MAX_CHARS])


def test_text_beyond_the_limit_is_not_parsed():
    assert parse_line("x" * MAX_CHARS + "CUDA out of memory") is None
