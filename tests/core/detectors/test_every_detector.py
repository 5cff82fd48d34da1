"""Properties of every rule: an explanation, a close delay, no exception on any input."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core import detectors
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import MS, make_beat, make_gpu, make_gpus, make_hello, make_step
from tests.builders.synthetic_run import SECOND, look, make_run, remember, train


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.rule)
def test_every_rule_has_an_explanation_and_a_close_delay(detector):
    sentences = [part for part in detector.text.split(". ") if part.strip()]

    assert 2 <= len(sentences) <= 5, f"a docstring of 2 to 5 sentences, not: {detector.text}"
    assert detector.text.endswith(".")
    assert detector.close_delay(DEFAULTS) > 0


def test_every_finding_that_may_open_an_alert_has_evidence():
    lacking = [
        f"{path.name}:{node.lineno}"
        for path in Path(detectors.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
        if not {"evidence", "opens"} & {keyword.arg for keyword in node.keywords}
    ]

    assert lacking == []


@pytest.mark.parametrize(
    "state",
    [
        RunState("ab12cd34", "train", 4),
        make_run({}, world=4),
        make_run({rank: [] for rank in range(4)}),
        make_run({rank: train() for rank in range(4)}),
        make_run({0: train()}),
        make_run({0: train(), 2: train()}, world=4),
    ],
    ids=["nothing", "nobody", "no steps", "healthy", "a world of one", "two of four"],
)
def test_no_rule_finds_anything_where_nothing_is_wrong(state):
    context = look(state, remember(*[make_run({0: train(), 1: train()})] * 4))

    assert {detector.rule: found for detector in DETECTORS if (found := detector.find(context))} == {}


numbers = st.one_of(st.integers(0, 40), st.integers(0, 60 * MS), st.sampled_from([2**50, 2**54]))
names = st.sampled_from(["", "a", "RandomSampler", "DistributedSampler", "weight"])
reasons = st.sampled_from(["exit", "closed", "failed", "off", ""])
small = st.integers(0, 3)


@st.composite
def wild_steps(draw):
    indices = draw(st.lists(st.integers(0, 90), unique=True, max_size=12).map(sorted))
    if draw(st.booleans()):
        indices = range(10, 10 + draw(st.integers(0, 60)))
    base = {name: draw(numbers) for name in ("data_ns", "forward_ns", "sync_ns", "samples", "comm_bytes")}
    fields = st.sampled_from([*base, "backward_ns", "optimizer_ns", "other_ns", "presync_ns", "fingerprint", "flags"])
    changes = draw(st.lists(st.dictionaries(fields, numbers, max_size=4), min_size=1, max_size=5))
    return [make_step(index, **{**base, **changes[index % len(changes)]}) for index in indices]


@st.composite
def wild_gpus(draw):
    changed = {name: draw(st.none() | numbers) for name in ("used_bytes", "total_bytes", "sm_mhz", "ecc_uncorrected")}
    throttle = draw(st.lists(st.sampled_from(["hw_slowdown", "sw_thermal_slowdown", "sw_power_cap", "?"]), max_size=3))
    xids = draw(st.lists(st.sampled_from([13, 45, 79, 2**50]), max_size=3))
    return make_gpu(**changed, throttle=throttle, xids=xids, lost=draw(st.booleans()), util_percent=draw(small))


@st.composite
def wild_messages(draw):
    rank, seq = draw(small), draw(st.integers(0, 40))
    common = {"rank": rank, "seq": seq}
    kind = draw(
        st.sampled_from(["hello", "steps", "steps", "beat", "gpu", "note", "loader", "checksum", "bye", "gone"])
    )
    match kind:
        case "hello":
            kinds = st.sampled_from(["ddp", "contains-ddp", "plain", ""])
            return make_hello(**common, kind=draw(kinds), host=draw(names), mono_ns=seq)
        case "steps":
            return wire.Steps(**common, steps=draw(wild_steps()))
        case "beat":
            drawn = {name: draw(numbers) for name in ("step", "phase_ns", "rss_bytes", "dropped")}
            return make_beat(**common, phase=draw(st.integers(0, 5)), **drawn)
        case "gpu":
            return make_gpus(rank, [draw(wild_gpus())], seq, mono_ns=seq * SECOND)
        case "note":
            return wire.Note(**common, kind=draw(names), text=draw(names), step=draw(numbers), mono_ns=seq)
        case "loader":
            return wire.Loader(
                **common,
                step=draw(numbers),
                epoch=draw(small),
                sampler=draw(names),
                distributed=draw(st.booleans()),
                replicas=draw(small),
                shuffle=draw(st.booleans()),
                sampler_epoch=draw(st.integers(-1, 2)),
            )
        case "checksum":
            return wire.Checksum(**common, step=draw(small), parameter=draw(names), offset=0, crc=draw(small))
        case "bye":
            return wire.Bye(**common, reason=draw(reasons), text=draw(st.text(max_size=20)), mono_ns=seq)
        case _:
            return wire.Gone(**common)


wild_runs = st.tuples(
    st.integers(1, 4), st.lists(st.tuples(wild_messages(), st.integers(0, 40 * SECOND)), min_size=1, max_size=25)
)


def apply_all(state, messages):
    now_ns = 0
    for message, later_ns in messages:
        now_ns += later_ns
        state.apply(message, now_ns)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(wild_runs)
def test_no_rule_ever_raises_and_what_it_finds_can_be_shown(run):
    world, messages = run
    state = RunState("ab12cd34", "train", world)
    apply_all(state, messages)
    context = look(state)
    for _ in range(4 if len(context.window) else 0):
        context.history.add(context.window.last(1))
    for detector in DETECTORS:
        found = detector.find(context)
        assert found == detector.find(context), "it remembers something"
        assert len({finding.subject for finding in found}) == len(found)
        for finding in found:
            assert finding.rule == detector.rule
            assert finding.message
            assert finding.message.isprintable()
            assert finding.advice.endswith(".")
            assert finding.evidence
            assert finding.cost is None or 0 <= finding.cost <= 1 + 1e-9
            assert set(finding.ranks) <= set(state.ranks)
            assert all(type(value) in {int, float, str} for value in finding.evidence.values())


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(wild_runs)
def test_a_watch_takes_anything(run):
    world, messages = run
    monitor = Monitor(RunState("ab12cd34", "train", world))
    now_ns = 0
    for message, later_ns in messages:
        now_ns += later_ns
        monitor.ingest(wire.encode(message), now_ns)
    monitor.evaluate_now()
