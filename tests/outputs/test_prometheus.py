"""Prometheus metrics: their values, the bound on series, and the limits of the server."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddpwatch.cli import main
from ddpwatch.core.alerts.model import Alert, AlertEvent, Finding, Moment, Severity
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.core.state.sanitize import NAME_CHARS
from ddpwatch.errors import UsageError
from ddpwatch.outputs.prometheus import server as scraping
from ddpwatch.outputs.prometheus.exporter import Exporter
from ddpwatch.outputs.prometheus.metrics import MAX_GPUS, MAX_RANKS, METRICS, WORST_RANKS, read, sample_run
from ddpwatch.view.run_view import current_view
from ddpwatch.view.status import status_object
from ddpwatch.wire import PHASES
from tests.builders.fake_rank import MS, make_beat, make_gpu, make_gpus, make_hello, make_snap, make_step

GIVE_UP_S = 30
STALE_NS = 2_000_000_000
CONTRIB = Path(__file__).parents[2] / "contrib"
DASHBOARD = CONTRIB / "grafana" / "ddpwatch.json"
RULES = CONTRIB / "prometheus" / "ddpwatch.rules.yml"
HOSTILE = 'a"} 1\nup{x="\\\x1b[2J\u202e\ud800' + "y" * 500
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")


def make_monitor(world=4, received=None, slow=2, steps=60, gpus=None, host="node-a", now_ns=1):
    """Evaluated run with one slow rank."""
    state = RunState("ab12cd34ab12cd34", "train", world, [Place(rank, "node-a", 100 + rank) for rank in range(world)])
    plain = [make_step(index, sync=12) for index in range(steps)]
    late = [make_step(index, backward=26) for index in range(steps)]
    for rank in range(world if received is None else received):
        hello = make_hello(rank, world_size=world, host=host)
        reported = None if gpus is None else make_gpus(rank, gpus)
        state.apply(make_snap(rank, 5, late if rank == slow else plain, hello, gpus=reported), now_ns)
    monitor = Monitor(state)
    monitor.evaluate_now()
    return monitor


def fetch(address, path="/metrics", method="GET"):
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    with urllib.request.urlopen(request, timeout=GIVE_UP_S) as answer:
        return answer.read().decode()


def text_of(monitor, events=()):
    """Samples in a scrape of this run."""
    with closing(Exporter("127.0.0.1:0")) as exporter:
        exporter.update(monitor, events, time.monotonic_ns())
        return fetch(exporter.address)


def series_of(text):
    """All series by name and labels; fails on duplicates."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    series = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}
    assert len(series) == len(samples)
    return series


def one(series, name, /, **labels):
    return series.get((name, *sorted((key, str(value)) for key, value in labels.items())))


def names(series):
    return {name for name, *_ in series}


def opened(rule="straggler", kind="opened"):
    at = Moment(1, 1, 0)
    return AlertEvent(kind, Alert(Finding(rule, Severity.WARNING, "rank 2", "message", "advice"), at, at))


def test_metrics_equal_the_figures_of_status():
    monitor = make_monitor(gpus=[make_gpu(power_mw=None)])
    status = status_object(current_view(monitor))
    series = series_of(text_of(monitor))

    assert one(series, "ddpwatch_run_info", run=status["run"]["id"], name="train", backend="gloo") == 1
    assert one(series, "ddpwatch_run_state", state="live") == 1
    assert one(series, "ddpwatch_world_size") == 4
    assert one(series, "ddpwatch_steps_total") == status["step"] == 60
    assert one(series, "ddpwatch_step_seconds") * 1e3 == pytest.approx(status["step_ms"])
    assert one(series, "ddpwatch_samples_per_second") == pytest.approx(status["samples_per_s"])
    assert one(series, "ddpwatch_effective_batch_samples") == status["effective_batch"]
    assert one(series, "ddpwatch_allreduce_ratio") == pytest.approx(status["allreduce"]["share"])
    for part in ("wire", "wait"):
        share = one(series, "ddpwatch_allreduce_share_ratio", part=part)
        assert share == pytest.approx(status["allreduce"][f"{part}_share"])
    for rank in status["ranks"]:
        place = {"rank": rank["rank"], "host": rank["host"]}
        assert one(series, "ddpwatch_rank_up", **place) == 1
        assert one(series, "ddpwatch_rank_steps_total", **place) == rank["step"]
        assert one(series, "ddpwatch_rank_self_seconds", **place) * 1e3 == pytest.approx(rank["self_ms"])
        assert one(series, "ddpwatch_rank_wait_seconds", **place) * 1e3 == pytest.approx(rank["wait_ms"])
        for phase in PHASES:
            reported = one(series, "ddpwatch_rank_phase_seconds", phase=phase, **place)
            assert reported * 1e3 == pytest.approx(rank[f"{phase}_ms"])
        assert one(series, "ddpwatch_rank_cpu_ratio", **place) * 100 == pytest.approx(rank["cpu_percent"])
        assert one(series, "ddpwatch_rank_resident_memory_bytes", **place) == rank["rss_bytes"]
        gpu = {**place, "device": "cuda:0"}
        assert one(series, "ddpwatch_gpu_utilization_ratio", **gpu) * 100 == rank["gpu"]["util"]
        assert one(series, "ddpwatch_gpu_memory_used_bytes", **gpu) == rank["gpu"]["mem_used"]
        assert one(series, "ddpwatch_gpu_temperature_celsius", **gpu) == rank["gpu"]["temp_c"]
    assert [alert["rule"] for alert in status["alerts"] if alert["severity"] == "warning"].count("straggler") == 1
    assert one(series, "ddpwatch_alerts_open", rule="straggler", severity="warning") == 1
    assert one(series, "ddpwatch_alerts_open", rule="stall", severity="critical") == 0
    assert "ddpwatch_gpu_power_watts" not in names(series)


def test_a_run_with_all_values_known_has_every_metric():
    steps = [make_step(index, busy_ns=4 * MS) for index in range(20)]
    states = {world: RunState("ab12cd34ab12cd34", "train", world) for world in (1, 2)}
    for world, state in states.items():
        for rank in range(world):
            state.apply(make_snap(rank, 5, steps, make_hello(rank, world_size=world), gpus=make_gpus(rank)), 1)
    reported = {world: names(series_of(text_of(Monitor(state)))) for world, state in states.items()}

    assert reported[2] == {metric.name for metric in METRICS}
    assert reported[2] - reported[1] == {"ddpwatch_allreduce_ratio", "ddpwatch_allreduce_share_ratio"}, (
        "one has nobody to meet"
    )


@pytest.mark.parametrize("received", [0, 3])
def test_unknown_values_are_absent(received):
    series = series_of(text_of(make_monitor(received=received)))

    reported = names(series)
    assert {"ddpwatch_run_info", "ddpwatch_ranks", "ddpwatch_alerts_open", "ddpwatch_rank_up"} <= reported
    assert one(series, "ddpwatch_ranks", state="missing") == 4 - received
    assert one(series, "ddpwatch_rank_up", rank=3, host="node-a") == 0
    unproven = {"ddpwatch_allreduce_share_ratio", "ddpwatch_rank_wait_seconds", "ddpwatch_samples_per_second"}
    assert not reported & unproven
    assert ("ddpwatch_step_seconds" in reported) == ("ddpwatch_steps_total" in reported) == bool(received)
    assert not any(name.startswith("ddpwatch_gpu") for name in reported)


def test_nan_and_infinity_are_absent():
    state = RunState("ab12cd34ab12cd34", "train", 1)
    state.apply(make_snap(0, 5, [], beat=make_beat(0, 5, cpu_percent=float("inf"))), 1)

    assert "ddpwatch_rank_cpu_ratio" not in names(series_of(text_of(Monitor(state))))


def test_untrusted_labels_are_sanitized_and_short():
    text = text_of(make_monitor(world=2, host=HOSTILE, gpus=[make_gpu(device=HOSTILE, name=HOSTILE, uuid=HOSTILE)]))
    series = series_of(text)

    assert all(line.isprintable() for line in text.splitlines())
    assert "up" not in names(series)
    values = {value for _, *labels in series for _, value in labels}
    assert max(map(len, values)) == NAME_CHARS
    assert any(value.startswith('a"} 1 up{x="\\') for value in values)


def test_gpus_of_the_same_name_do_not_spoil_the_scrape():
    series = series_of(text_of(make_monitor(world=1, gpus=[make_gpu(util_percent=10), make_gpu(util_percent=90)])))

    assert one(series, "ddpwatch_gpu_utilization_ratio", rank=0, host="node-a", device="cuda:0") == 0.1


def test_series_are_bounded_at_a_thousand_ranks():
    gpus = [make_gpu(device=f"cuda:{number}") for number in range(16)]
    monitor = make_monitor(world=1024, slow=700, steps=12, gpus=gpus)
    series = series_of(text_of(monitor))

    counts = Counter(name for name, *_ in series)
    assert counts["ddpwatch_rank_up"] == WORST_RANKS
    assert counts["ddpwatch_rank_phase_seconds"] == WORST_RANKS * len(PHASES)
    assert counts["ddpwatch_gpu_utilization_ratio"] == WORST_RANKS * MAX_GPUS
    assert one(series, "ddpwatch_rank_self_seconds", rank=700, host="node-a") == pytest.approx(0.038)
    assert one(series, "ddpwatch_ranks", state="ok") == 1024
    assert one(series, "ddpwatch_ranks_self_seconds", stat="max") == pytest.approx(0.038)
    assert one(series, "ddpwatch_ranks_self_seconds", stat="median") == pytest.approx(0.028)
    # For any number of ranks.
    assert len(series) < 10_000


def test_each_rank_has_series_of_its_own_up_to_the_bound():
    assert Counter(name for name, *_ in series_of(text_of(make_monitor(MAX_RANKS, steps=1))))["ddpwatch_rank_up"] == 256


def test_the_choice_of_the_worst_ranks_has_hysteresis():
    """Self times fluctuate; without hysteresis ranks would take turns, and each newcomer is a new series."""
    state = RunState("ab12cd34ab12cd34", "train", 512)
    for rank in range(512):
        # The higher the rank, the slower.
        state.apply(make_snap(rank, 5, [make_step(index, backward_ns=20 * MS + rank) for index in range(3)]), 1)
    monitor = Monitor(state)

    def reported(before=frozenset()):
        return {rank.rank for rank in sample_run(monitor, Counter(), before).ranks}

    assert reported() == set(range(480, 512))
    near, far = set(range(450, 466)), set(range(16))
    assert reported(frozenset(near)) == near | set(range(496, 512))
    assert reported(frozenset(far)) == set(range(480, 512))


def test_opened_alerts_are_counted():
    series = series_of(
        text_of(make_monitor(), [opened(), opened(kind="changed"), opened(kind="closed"), opened("stall")])
    )

    counts = {detector.rule: one(series, "ddpwatch_alerts_opened_total", rule=detector.rule) for detector in DETECTORS}
    assert counts == {**dict.fromkeys(counts, 0), "straggler": 1, "stall": 1}


def test_without_a_run_there_is_only_the_build_info():
    with closing(Exporter("127.0.0.1:0")) as exporter:
        assert names(series_of(fetch(exporter.address))) == {"ddpwatch_build_info"}


def test_no_snapshot_is_taken_without_a_scrape():
    with closing(Exporter("127.0.0.1:0")) as exporter:
        monitor, now_ns = make_monitor(), time.monotonic_ns()
        exporter.update(monitor, (), now_ns - STALE_NS)
        first = exporter._snapshot
        exporter.update(monitor, (), now_ns)

        assert exporter._snapshot is first


def test_a_later_scrape_gets_a_fresh_snapshot():
    with closing(Exporter("127.0.0.1:0")) as exporter:
        monitor, reported = make_monitor(), []
        exporter.update(monitor, (), time.monotonic_ns() - STALE_NS)
        monitor.state.apply(make_beat(0, seq=6, step=75), 2)
        scraping_thread = threading.Thread(target=lambda: reported.append(fetch(exporter.address)), daemon=True)
        scraping_thread.start()
        deadline_s = time.monotonic() + GIVE_UP_S
        while not reported:
            assert time.monotonic() < deadline_s
            exporter.update(monitor, (), time.monotonic_ns())
        scraping_thread.join(GIVE_UP_S)

    assert one(series_of(reported[0]), "ddpwatch_steps_total") == 75


def test_a_busy_watching_thread_does_not_delay_a_scrape_for_long():
    with closing(Exporter("127.0.0.1:0")) as exporter:
        exporter.update(make_monitor(), (), time.monotonic_ns() - STALE_NS)

        assert one(series_of(fetch(exporter.address)), "ddpwatch_steps_total") == 60


def test_a_snapshot_is_rendered_once_for_all_scrapes():
    with closing(Exporter("127.0.0.1:0")) as exporter:
        rendered = []
        generate = exporter._generate
        exporter._generate = lambda registry: rendered.append(registry) or generate(registry)
        # A time in the future, so that the snapshot does not expire during the test.
        exporter.update(make_monitor(), (), time.monotonic_ns() + 60 * STALE_NS)
        texts = {fetch(exporter.address) for _ in range(20)}

    assert (len(texts), len(rendered)) == (1, 1)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/metrics?name[]=x", "GET", 200), ("/metrics", "HEAD", 200), ("/", "GET", 200), ("/metrics/", "GET", 404),
     ("/../etc/passwd", "GET", 404), ("/metrics", "POST", 405), ("/metrics", "DELETE", 405)],
)  # fmt: skip
def test_only_two_paths_are_served(path, method, status):
    with closing(Exporter("127.0.0.1:0")) as exporter:
        try:
            text, found = fetch(exporter.address, path, method), 200
        except urllib.error.HTTPError as error:
            with error:
                text, found = error.read().decode(), error.code

    assert found == status
    assert len(text.splitlines()) == (0 if method == "HEAD" else 3 if path.startswith("/metrics?") else 1)


def connect(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=GIVE_UP_S)


def is_cut_off(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def answer_to(address, *said):
    """Read the response until the server closes the connection."""
    received = b""
    with connect(address) as connection:
        try:
            for part in said:
                connection.sendall(part)
            while part := connection.recv(65536):
                received += part
        except OSError:
            pass
    return received


@pytest.mark.parametrize("line", [b"", b"GET /metrics", b"\x16\x03\x01\x00\xff", b"GET  /  HTTP/1.1"])
def test_garbage_is_refused(line):
    with closing(Exporter("127.0.0.1:0")) as exporter:
        assert answer_to(exporter.address, line + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert "ddpwatch_build_info" in fetch(exporter.address)


def test_an_endless_request_is_cut_off():
    with closing(Exporter("127.0.0.1:0")) as exporter:
        endless = b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 10_000
        # The response may be lost when the server closes with unread input.
        assert answer_to(exporter.address, endless)[:13] in {b"", b"HTTP/1.1 431 "}
        assert "ddpwatch_build_info" in fetch(exporter.address)


def test_slow_clients_are_cut_off_and_do_not_block_others(monkeypatch):
    monkeypatch.setattr(scraping, "CONNECTION_S", 0.3)
    with closing(Exporter("127.0.0.1:0")) as exporter:
        assert answer_to(exporter.address, b"GET /metr") == b""

        monkeypatch.setattr(scraping, "CONNECTION_S", float(GIVE_UP_S))
        threads = threading.active_count()
        slow = [connect(exporter.address) for _ in range(3 * scraping.MAX_CONNECTIONS)]
        try:
            for connection in slow:
                connection.sendall(b"GET /metrics HTTP/1.1\r\n")
            for _ in range(5):
                assert "ddpwatch_build_info" in fetch(exporter.address)
            assert threading.active_count() == threads
            # The oldest connection was closed.
            assert is_cut_off(slow[0])
        finally:
            for connection in slow:
                connection.close()


def test_closing_ends_the_thread_and_frees_the_port():
    threads = threading.active_count()
    exporter = Exporter("127.0.0.1:0")
    with connect(exporter.address):
        exporter.close()
        assert threading.active_count() == threads
        with closing(Exporter(exporter.address)) as again:
            assert again.address == exporter.address
    exporter.update(make_monitor(), (), time.monotonic_ns())


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_an_ipv6_address_is_in_brackets():
    with closing(Exporter("[::1]:0")) as exporter:
        assert exporter.address.startswith("[::1]:")
        assert not exporter.public
        assert "ddpwatch_build_info" in fetch(exporter.address)


@pytest.mark.parametrize(("address", "public"), [("127.0.0.1:0", False), ("localhost:0", False), ("0.0.0.0:0", True)])
def test_a_public_address_is_recognized(address, public):
    with closing(Exporter(address)) as exporter:
        assert exporter.public == public


@pytest.mark.parametrize(
    "address",
    ["", "9464", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "::1:9464", "[::1]",
     "[nonsense]:1", "http://127.0.0.1:9464", "127.0.0.1:9464/metrics", "192.0.2.1:9464", "no such host:1",
     "a..b:9464", "127.0.0.1:٣"],
)  # fmt: skip
def test_a_bad_address_is_a_usage_error(address):
    with pytest.raises(UsageError, match=re.escape(f"--prometheus {address}: ")):
        Exporter(address)


@pytest.fixture
def run_main(capsys, monkeypatch, run_dir):
    """Run `ddpwatch ...` in this process; returns exit code and stderr."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments):
        return main.run(arguments), capsys.readouterr().err

    return run


def test_a_port_in_use_is_one_line_and_exit_code_2(run_main):
    with closing(Exporter("127.0.0.1:0")) as exporter:
        exit_code, said = run_main("watch", "--prometheus", exporter.address)

    assert exit_code == 2
    assert said == (
        f"ddpwatch: --prometheus {exporter.address}: cannot listen: address already in use;"
        " choose another address or port\n"
    )


def test_without_the_client_library_one_line_says_how_to_install_it(run_main, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)

    exit_code, said = run_main("watch", "--prometheus", "127.0.0.1:0")
    assert exit_code == 1
    assert said == ("ddpwatch: --prometheus needs the package prometheus-client: pip install 'ddpwatch[prometheus]'\n")


@pytest.mark.parametrize(("address", "warns"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
def test_the_address_of_the_metrics_is_printed_with_a_warning_if_public(run_main, address, warns):
    threads = threading.active_count()
    exit_code, said = run_main("watch", "--prometheus", address, "--for", "0.1")
    where, *more = said.splitlines()

    assert exit_code == 3
    assert re.fullmatch(r"serving metrics at http://[\d.]+:\d+/metrics", where)
    assert any("warning: anyone who can reach 0.0.0.0:" in line for line in more) == warns
    assert threading.active_count() == threads


def named_in(path):
    return set(re.findall(r"\bddpwatch_\w+", path.read_text()))


@pytest.mark.parametrize("path", [DASHBOARD, RULES], ids=lambda path: path.name)
def test_the_dashboard_and_the_rules_name_metrics_that_exist(path):
    assert named_in(path)
    assert named_in(path) <= {metric.name for metric in METRICS}


def dashboard_expressions():
    """Queries of all panels, with Grafana's variables substituted."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$run", ".*") for query in queries]


def test_the_dashboard_is_complete():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "job", "run"]
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {"${datasource}"}
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


def promtool(*arguments, **options):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, **options)
    return done.returncode, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_rules():
    exit_code, said = promtool("check", "rules", str(RULES))

    assert exit_code == 0, said


@needs_promtool
def test_promtool_parses_the_queries_of_the_dashboard(tmp_path):
    queries = dashboard_expressions()
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    # JSON is valid YAML.
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    exit_code, said = promtool("check", "rules", str(tmp_path / "rules.yml"))

    assert exit_code == 0, said
    assert len(queries) > 20


@needs_promtool
def test_promtool_accepts_the_names():
    exit_code, said = promtool("check", "metrics", input=text_of(make_monitor(gpus=[make_gpu()])))

    assert (exit_code, said) == (0, "")


def test_each_metric_is_in_the_table_once():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert len(read(sample_run(make_monitor(), Counter()))) > 20
