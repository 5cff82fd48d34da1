"""`ddpwatch watch`: lines, JSON objects, exit codes, and waiting for a run."""

from __future__ import annotations

import http.server
import json
import re
import signal
import socket
import subprocess
import sys
import threading

import msgspec
import pytest

from ddpwatch import rundir
from tests.builders.fake_rank import FakeRun
from tests.cli.cli_child import GIVE_UP_S

ESCAPE = "\x1b"
WAITING = "waiting for a run in {}; if the job is running, see `ddpwatch doctor`\n"
ALERT_KEYS = {
    "schema", "event", "run", "rule", "severity", "ranks", "phase", "phases", "message", "advice", "cost", "evidence",
    "since",
    "since_step", "opened", "from_step", "upto_step", "last", "open",
}  # fmt: skip


@pytest.fixture
def slow_run(run_dir):
    """Four ranks, 60 steps in; rank 2 is slow in backward."""
    with FakeRun(run_dir, 4, name="resnet50") as run:
        run.train(0, 60, slow_rank=2)
        yield run


@pytest.fixture
def victim():
    """Process that a test may kill; it is killed at the end."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def read_until(stream, words):
    """Lines up to the one with these words."""
    lines = []
    while words not in "".join(lines[-1:]):
        line = stream.readline()
        assert line, f"it ended before it said {words!r}: {lines}"
        lines.append(line)
    return lines


def finish(child):
    """The rest of both streams and the exit code."""
    out, err = child.communicate(timeout=GIVE_UP_S)
    return child.returncode, out, err


def wait_until_followed(run):
    for rank in run.ranks:
        assert rank.followed.wait(GIVE_UP_S)


def say_goodbye(run):
    for rank in run.ranks:
        rank.say_bye()


def belonging_to(process, endpoint):
    return msgspec.structs.replace(endpoint, pid=process.pid, pid_created_s=rundir.created_s(process.pid))


def test_a_slow_rank_is_printed_as_text(start_ddpwatch, slow_run):
    child = start_ddpwatch("watch")
    reported = read_until(child.stdout, "opened straggler: ")[-1]
    advice = child.stdout.readline()
    say_goodbye(slow_run)
    exit_code, out, err = finish(child)

    assert re.fullmatch(
        r"(\d\d:\d\d:\d\d|--:--:--) ▲ warning opened straggler: rank 2 slow in backward: .*\n", reported
    )
    assert advice.startswith(" " * 11)
    assert exit_code == 0
    assert ESCAPE not in reported + out
    assert re.fullmatch(
        r"run ab12cd34 \(resnet50\) has ended: all ranks have exited; \d alerts? opened: \d warning.*\n", err
    )


def test_json_is_one_object_a_line(start_ddpwatch, slow_run):
    child = start_ddpwatch("watch", "resnet50", "--json")
    first = read_until(child.stdout, '"straggler"')
    say_goodbye(slow_run)
    exit_code, out, _ = finish(child)
    changes = [json.loads(line) for line in [*first, *out.splitlines()]]

    assert exit_code == 0
    assert all(set(change) == ALERT_KEYS for change in changes)
    straggler = next(change for change in changes if change["rule"] == "straggler")
    assert (straggler["event"], straggler["ranks"], straggler["phase"]) == ("opened", [2], "backward")
    assert straggler["run"] == {"id": slow_run.run_id, "name": "resnet50"}
    assert (straggler["schema"], straggler["open"]) == (1, True)


def test_a_run_without_trouble_is_silent_and_fine(start_ddpwatch, run_dir):
    with FakeRun(run_dir, 2) as run:
        child = start_ddpwatch("watch", "--fail-on", "info")
        wait_until_followed(run)
        say_goodbye(run)
        exit_code, out, err = finish(child)

    assert (exit_code, out) == (0, "")
    assert err == "run ab12cd34 (train) has ended: all ranks have exited; no alert opened\n"


@pytest.mark.parametrize(("fail_on", "exit_code"), [("info", 4), ("warning", 4), ("critical", 0)])
def test_an_alert_of_that_severity_fails_at_the_end_and_not_before(start_ddpwatch, slow_run, fail_on, exit_code):
    child = start_ddpwatch("watch", "--fail-on", fail_on, "--json")
    read_until(child.stdout, '"straggler"')
    slow_run.train(60, 20, slow_rank=2)
    assert child.poll() is None
    say_goodbye(slow_run)

    assert finish(child)[0] == exit_code


def test_time_that_is_up_is_no_failure_unless_an_alert_was(start_ddpwatch, slow_run):
    monitor = ("watch", "--for", "4s")
    for expected, child in {0: start_ddpwatch(*monitor), 4: start_ddpwatch(*monitor, "--fail-on", "warning")}.items():
        exit_code, out, err = finish(child)

        assert exit_code == expected
        assert "straggler" in out
        assert "is still running; stopped watching after --for; " in err


def test_a_rank_that_failed_is_a_bad_end(start_ddpwatch, run_dir):
    with FakeRun(run_dir, 2) as run:
        child = start_ddpwatch("watch", "--json")
        wait_until_followed(run)
        run.ranks[1].say_bye("failed")
        run.ranks[0].say_bye()
        exit_code, out, err = finish(child)

    assert exit_code == 4
    assert "ended badly: rank 1 failed; " in err
    assert "rank-failed" in {json.loads(line)["rule"] for line in out.splitlines()}


def test_a_killed_rank_is_reported_and_a_bad_end(start_ddpwatch, run_dir, victim):
    """After `kill -9` no goodbye is sent; the others send theirs."""
    with FakeRun(run_dir, 2, rank1={"beats": False}) as run:
        mine, other = run.file.endpoints
        rundir.write(run_dir, msgspec.structs.replace(run.file, endpoints=[mine, belonging_to(victim, other)]))
        child = start_ddpwatch("watch", "--json")
        wait_until_followed(run)
        victim.kill()
        victim.wait(GIVE_UP_S)
        lost = json.loads(read_until(child.stdout, '"rank-lost"')[-1])
        run.ranks[0].say_bye()
        exit_code, _, err = finish(child)

    assert (lost["event"], lost["ranks"]) == ("opened", [1])
    assert exit_code == 4
    assert "ended badly: rank 1 lost; " in err


def test_a_run_whose_processes_are_all_killed_ends_badly(start_ddpwatch, run_dir, victim):
    with FakeRun(run_dir, 2) as run:
        endpoints = [belonging_to(victim, endpoint) for endpoint in run.file.endpoints]
        rundir.write(run_dir, msgspec.structs.replace(run.file, endpoints=endpoints))
        child = start_ddpwatch("watch", "--for", "10m")
        wait_until_followed(run)
        victim.kill()
        victim.wait(GIVE_UP_S)
        exit_code, out, err = finish(child)

    assert exit_code == 4
    assert out.count("opened rank-lost: ") >= 1
    assert "ended badly: ranks 0-1 lost; " in err


def test_it_waits_for_a_run_to_start(start_ddpwatch, run_dir):
    child = start_ddpwatch("watch")
    assert child.stderr.readline() == WAITING.format(run_dir)
    with FakeRun(run_dir, 1) as run:
        wait_until_followed(run)
        say_goodbye(run)
        exit_code, _, err = finish(child)

    assert exit_code == 0
    assert "has ended: all ranks have exited" in err


def test_it_waits_for_the_run_that_was_named(start_ddpwatch, run_dir):
    with FakeRun(run_dir, 1, run_id="0123456789abcdef", name="other") as other:
        child = start_ddpwatch("watch", "mine")
        assert child.stderr.readline() == WAITING.format(run_dir).replace("a run", "run 'mine'", 1)
        with FakeRun(run_dir, 1, name="mine") as run:
            wait_until_followed(run)
            say_goodbye(run)
            exit_code, _, err = finish(child)
        assert not other.ranks[0].followed.is_set()

    assert exit_code == 0
    assert "(mine) has ended" in err


def test_waiting_ends_with_its_time(ddpwatch, run_dir):
    done = ddpwatch("watch", "--for", "0.2")

    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"{WAITING.format(run_dir)}ddpwatch: gave up waiting: no run found in {run_dir} ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_control_c_and_a_plain_kill_end_it_with_a_summary(start_ddpwatch, slow_run, number):
    child = start_ddpwatch("watch")
    read_until(child.stdout, "straggler")
    child.send_signal(number)
    exit_code, _, err = finish(child)

    assert exit_code == 130
    assert "is still running; stopped watching; " in err
    assert err.count("\n") == 1


def test_control_c_while_waiting_is_quiet(start_ddpwatch, run_dir):
    child = start_ddpwatch("watch")
    assert child.stderr.readline() == WAITING.format(run_dir)
    child.send_signal(signal.SIGINT)

    assert finish(child) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["--for", "soon"], 2, "not a duration"),
        (["--fail-on", "anything"], 2, "'anything' is not one of"),
        (["--webhook", "ftp://user:secret@example.com"], 2, "--webhook: not an http:// or https:// URL"),
        (["--limit", "straggler.share"], 2, "RULE.KEY=NUMBER"),
        (["--config", "nosuch.toml"], 2, "--config nosuch.toml: cannot read it: No such file"),
        (["/nosuch/run.json"], 3, "no run at /nosuch/run.json"),
        (["a", "b"], 2, "unexpected extra argument"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(ddpwatch, arguments, exit_code, words):
    done = ddpwatch("watch", *arguments)

    assert (done.returncode, done.stdout) == (exit_code, "")
    assert done.stderr.startswith("ddpwatch: ")
    assert words in done.stderr
    assert "secret" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["watch", "record", "attach"])
@pytest.mark.parametrize("files", [2, 4])
def test_a_pattern_that_the_shell_has_expanded_is_refused_with_a_hint_about_quotes(ddpwatch, tmp_path, command, files):
    """The second file would be taken for a run."""
    logs = [tmp_path / f"{number}.log" for number in range(files)]
    for log in logs:
        log.touch()
    done = ddpwatch(command, "--log", *map(str, logs))

    assert done.returncode == 2
    assert "one quoted pattern, such as --log 'logs/**/*.log'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_several_runs_are_listed_and_none_is_chosen(ddpwatch, run_dir):
    with FakeRun(run_dir, 1), FakeRun(run_dir, 1, run_id="0123456789abcdef", name="other"):
        done = ddpwatch("watch")

    assert done.returncode == 2
    assert "ab12cd34 (train)" in done.stderr
    assert "01234567 (other)" in done.stderr


def test_a_limit_changes_what_is_an_alert(ddpwatch, slow_run):
    limits = ["--limit", "straggler.share=0.9", "--limit", "comm-share.share=0.9"]

    assert ddpwatch("watch", "--for", "2", *limits).stdout == ""
    assert "none stands out" in ddpwatch("status", *limits).stdout


def test_a_command_gets_every_change_in_order(start_ddpwatch, slow_run, tmp_path):
    got = tmp_path / "got"
    child = start_ddpwatch("watch", "--json", "--exec", f"cat >> {got}")
    first = read_until(child.stdout, '"straggler"')
    say_goodbye(slow_run)
    exit_code, out, err = finish(child)

    assert exit_code == 0
    assert got.read_text() == "".join(first) + out
    assert "not delivered" not in err


def test_a_command_that_fails_changes_nothing_but_the_summary(start_ddpwatch, slow_run):
    child = start_ddpwatch("watch", "--exec", "exit 7")
    read_until(child.stdout, "straggler")
    say_goodbye(slow_run)
    exit_code, _, err = finish(child)

    failure, summary = err.splitlines()
    assert exit_code == 0
    assert failure == "ddpwatch: --exec failed: exit code 7"
    assert re.search(r"; --exec: \d alert changes? not delivered$", summary)


def test_a_web_address_gets_the_changes(start_ddpwatch, slow_run):
    posts = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            child = start_ddpwatch("watch", "--json", "--webhook", f"http://127.0.0.1:{server.server_address[1]}/x")
            first = read_until(child.stdout, '"straggler"')
            say_goodbye(slow_run)
            exit_code, out, _ = finish(child)
        finally:
            server.shutdown()
            thread.join(GIVE_UP_S)

    assert exit_code == 0
    assert "\n".join(posts) + "\n" == "".join(first) + out


def test_a_dead_web_address_is_reported_once_and_counted(start_ddpwatch, slow_run):
    with socket.socket() as taken:
        # Bound but not listening, so that connections are refused and no other process takes the port.
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        child = start_ddpwatch("watch", "--webhook", f"{url}/path?key=secret")
        read_until(child.stdout, "straggler")
        failure = child.stderr.readline()
        say_goodbye(slow_run)
        exit_code, _, err = finish(child)

    assert exit_code == 0
    assert failure == f"ddpwatch: webhook {url} failed: connection refused (3 tries)\n"
    assert re.search(rf"; webhook {url}: \d alert changes? not delivered\n$", err)
    assert err.count("\n") == 1


def test_a_reader_that_went_away_is_no_error(start_ddpwatch, slow_run):
    child = start_ddpwatch("watch", "--json", "--limit", "straggler.linger-steps=1")
    read_until(child.stdout, '"straggler"')
    child.stdout.close()
    # One more alert to print: another rank becomes the straggler.
    slow_run.train(60, 200, slow_rank=1)

    assert child.wait(GIVE_UP_S) == 141
    assert child.stderr.read() == ""


def test_hostile_names_do_not_reach_the_terminal(start_ddpwatch, run_dir):
    with FakeRun(run_dir, 4, name="\x1b]0;owned\x07\x1b[31mevil\u202e") as run:
        run.train(0, 60, slow_rank=2)
        child = start_ddpwatch("watch")
        first = read_until(child.stdout, "straggler")
        say_goodbye(run)
        _, out, err = finish(child)

    assert "(evil)" in err
    assert not {ESCAPE, "\x07", "\u202e"} & set("".join(first) + out + err)
