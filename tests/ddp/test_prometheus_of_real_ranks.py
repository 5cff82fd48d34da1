"""The whole road of a metric: real ranks, `ddpwatch watch --prometheus`, and a real Prometheus that scrapes it."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.ddp.napping_run import training

ROOT = Path(__file__).parents[2]
GIVE_UP_S = 60
DASHBOARD = ROOT / "contrib" / "grafana" / "ddpwatch.json"
RULES = ROOT / "contrib" / "prometheus" / "ddpwatch.rules.yml"
CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: ddpwatch
    static_configs: [{{targets: ["{target}"]}}]
"""

pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(*command, **options):
    with subprocess.Popen(command, **options) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def prometheus(place, target):
    """A Prometheus of our own that scrapes `target` every second; yields how to ask it."""
    (place / "prometheus.yml").write_text(CONFIG.format(rules=RULES, target=target))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={place / 'prometheus.yml'}", f"--storage.tsdb.path={place / 'data'}"]
    with (
        (place / "said").open("w") as said,
        running("prometheus", *options, f"--web.listen-address={address}", stdout=said, stderr=said) as child,
    ):

        def ask(path, **fields):
            assert child.poll() is None, (place / "said").read_text()
            query = urllib.parse.urlencode(fields)
            try:
                with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{query}", timeout=GIVE_UP_S) as answer:
                    return json.load(answer)["data"]
            except urllib.error.HTTPError as error:
                with error:
                    # It says so while it starts.
                    if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                        raise AssertionError(error.read().decode()) from None
                return None
            except OSError:
                return None

        yield ask


def until(condition):
    deadline_s = time.monotonic() + GIVE_UP_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.1)
    return found


def panels():
    """By title, the queries of each panel with Grafana's variables filled in."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        queries = [target["expr"] for target in panel.get("targets", ())]
        yield (
            panel["title"],
            [
                query.replace("$__rate_interval", "1m").replace("$job", "ddpwatch").replace("$run", ".+")
                for query in queries
            ],
        )


def test_prometheus_scrapes_a_run_and_the_dashboard_has_something_to_show(pool, run_dir, tmp_path):
    command = [sys.executable, "-m", "ddpwatch", "watch", "--prometheus", "127.0.0.1:0"]
    with (
        training(pool, 2, tmp_path, guilty=1, phase="backward", nap_s=0.02) as done,
        running(*command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as monitor,
    ):
        said = ""
        while "serving metrics at" not in said:
            said = monitor.stderr.readline()
            assert said, "it has ended"
        target = said.removesuffix("/metrics\n").rpartition("/")[2]
        with prometheus(tmp_path, target) as ask:

            def value(query):
                found = ask("query", query=query)
                return float(found["result"][0]["value"][1]) if found and found["result"] else None

            until(lambda: value("ddpwatch_steps_total > 0"))
            assert value("up") == 1
            until(lambda: value('ddpwatch_alerts_open{rule="straggler"} > 0'))
            # Its first two samples make a rate.
            until(lambda: value("rate(ddpwatch_steps_total[1m]) > 0"))
            assert value("topk(1, ddpwatch_rank_self_seconds)") < value("ddpwatch_step_seconds") * 1.5
            empty = [
                title for title, queries in panels() for query in queries if not ask("query", query=query)["result"]
            ]
            (scraped,) = ask("targets")["activeTargets"]
            (group,) = ask("rules")["groups"]
        (tmp_path / "stop").touch()
        assert monitor.wait(GIVE_UP_S) == 0

    assert done[0] > 0
    # There is no GPU here, and alerts that were open before the first scrape have not been seen to open.
    assert {title for title in empty if "GPU" not in title} <= {"Alerts opened"}
    assert (scraped["health"], scraped["lastError"]) == ("up", "")
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{target}/metrics", timeout=GIVE_UP_S)
