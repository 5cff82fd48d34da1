"""Alert sinks with real commands and web servers, dead and hanging ones too; none blocks the caller."""

from __future__ import annotations

import contextlib
import http.server
import json
import shlex
import socket
import sys
import threading
import time

import psutil
import pytest

from ddpwatch.errors import UsageError
from ddpwatch.outputs import alert_sinks as sinks
from ddpwatch.outputs.alert_sinks import Command, Sink, Webhook, close_all

GIVE_UP_S = 30


def make_event(number=0):
    return {"schema": 1, "event": "opened", "rule": "straggler", "severity": "warning", "number": number}


def wait_until(condition):
    deadline_s = time.monotonic() + GIVE_UP_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def server(answer):
    """Web server that calls `answer(handler)` for every POST and keeps it in `.posts`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.posts.append((self.path, dict(self.headers), body))
            answer(self)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.posts = []
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join(GIVE_UP_S)


def answering(code, **headers):
    def answer(handler):
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def address(running, rest="/hook"):
    return f"http://127.0.0.1:{running.server_address[1]}{rest}"


@pytest.fixture
def said():
    return []


@pytest.fixture
def start(said):
    """Start sinks that are given up after the test."""
    started = []

    def start_with(receiver):
        started.append(Sink(receiver, said.append))
        return started[-1]

    yield start_with
    for sink in started:
        sink.give_up()


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(sinks, "WEB_BACKOFFS_S", (0.01, 0.01))


def test_a_webhook_gets_every_event_in_order(start, said):
    with server(answering(204)) as running:
        sink = start(Webhook(address(running)))
        for number in range(20):
            sink.put(make_event(number))
        assert sink.close(GIVE_UP_S) == 0

    assert [json.loads(body)["number"] for _, _, body in running.posts] == list(range(20))
    path, headers, _ = running.posts[0]
    assert (path, headers["Content-Type"]) == ("/hook", "application/json")
    assert said == []


def test_a_server_error_is_retried_twice_and_reported_once(start, said, hurried):
    with server(answering(500)) as running:
        sink = start(Webhook(address(running)))
        sink.put(make_event())
        sink.put(make_event())
        assert sink.close(GIVE_UP_S) == 2

    assert len(running.posts) == 6
    assert said == [f"webhook {address(running, '')} failed: HTTP status 500 (3 tries)"]


def test_a_server_that_recovers_gets_its_event(start, said, hurried):
    def answer(handler):
        answering(200 if len(handler.server.posts) == 3 else 503)(handler)

    with server(answer) as running:
        sink = start(Webhook(address(running)))
        sink.put(make_event())
        assert sink.close(GIVE_UP_S) == 0

    assert len(running.posts) == 3
    assert said == []


def test_a_dead_port_is_reported_in_words(start, said, hurried):
    with socket.socket() as taken:
        # Bound but not listening: no other process gets the port, and it refuses connections.
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        sink = start(Webhook(f"{url}/x"))
        sink.put(make_event())
        assert sink.close(GIVE_UP_S) == 1

    assert said == [f"webhook {url} failed: connection refused (3 tries)"]


def test_a_hanging_server_is_given_up(start, said, hurried, monkeypatch):
    monkeypatch.setattr(sinks, "WEB_TIMEOUT_S", 0.05)
    release = threading.Event()
    with server(lambda handler: release.wait(GIVE_UP_S)) as running:
        try:
            sink = start(Webhook(address(running)))
            sink.put(make_event())
            assert sink.close(GIVE_UP_S) == 1
        finally:
            release.set()

    assert said == [f"webhook {address(running, '')} failed: timed out (3 tries)"]


def test_a_redirect_is_not_followed(start, said, hurried):
    with server(answering(200)) as other, server(answering(302, Location=address(other))) as running:
        sink = start(Webhook(address(running)))
        sink.put(make_event())
        assert sink.close(GIVE_UP_S) == 1

    assert other.posts == []
    assert "HTTP status 302" in said[0]


def test_a_response_other_than_http_is_a_failure_that_quotes_nothing(start, said, hurried):
    with server(lambda handler: handler.wfile.write(b"\x1b[2Jowned\r\n\r\n")) as running:
        sink = start(Webhook(address(running)))
        sink.put(make_event())
        assert sink.close(GIVE_UP_S) == 1

    assert said == [f"webhook {address(running, '')} failed: invalid response (BadStatusLine) (3 tries)"]


def test_secrets_of_an_address_are_sent_and_never_shown(start, said, hurried):
    with server(answering(500)) as running:
        port = running.server_address[1]
        receiver = Webhook(f"http://user:p%40ss@127.0.0.1:{port}/token?key=secret#part")
        sink = start(receiver)
        sink.put(make_event())
        sink.close(GIVE_UP_S)

    path, headers, _ = running.posts[0]
    assert path == "/token?key=secret"
    assert headers["Authorization"] == "Basic dXNlcjpwQHNz"
    shown = " ".join([*said, receiver.name])
    assert not any(secret in shown for secret in ("user", "p%40ss", "p@ss", "token", "secret", "dXNl"))


@pytest.mark.parametrize(
    "url",
    ["", "example.com", "ftp://example.com/x", "file:///etc/passwd", "http://", "http:///x", "http://h:port/",
     "http://h:99999/", "http://[::1", "javascript:1", "http://a b/", "http://a\n/", "HTTPS", "http://ä.example/"],
)  # fmt: skip
def test_an_invalid_web_address_is_refused_without_quoting_it(url):
    with pytest.raises(UsageError, match=r"^--webhook: not an http:// or https:// URL$"):
        Webhook(url)


def test_a_command_gets_the_event_on_stdin_and_the_facts_in_its_environment(start, said, tmp_path):
    target = tmp_path / "got"
    sink = start(Command(f'cat >> {target}; echo "$DDPWATCH_RULE $DDPWATCH_SEVERITY $DDPWATCH_EVENT" >> {target}'))
    sink.put(make_event(0))
    sink.put(make_event(1))
    assert sink.close(GIVE_UP_S) == 0

    lines = target.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines[::2]] == [0, 1]
    assert lines[1::2] == ["straggler warning opened"] * 2
    assert said == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [("exit 3", "exit code 3"), ("kill -9 $$", "killed by signal 9"), ("nosuch 2>&-", "exit code 127")],
)
def test_a_failing_command_is_reported_once(start, said, command, reason):
    sink = start(Command(command))
    for _ in range(3):
        sink.put(make_event())

    assert sink.close(GIVE_UP_S) == 3
    assert said == [f"--exec failed: {reason}"]


def test_a_hanging_command_is_killed_with_its_children(start, said, tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "COMMAND_TIMEOUT_S", 0.5)
    pids = tmp_path / "pids"
    sleeper = f"{shlex.quote(sys.executable)} -c 'import time; time.sleep(600)'"
    sink = start(Command(f"{sleeper} & echo $$ $! > {pids}; wait"))
    sink.put(make_event())

    assert sink.close(GIVE_UP_S) == 1
    assert said == ["--exec failed: killed after 0.5 s"]
    shell, grandchild = map(int, pids.read_text().split())
    assert not psutil.pid_exists(shell), "not reaped"
    wait_until(lambda: _has_ended(grandchild))


def test_a_command_need_not_read_its_stdin(start, said):
    sink = start(Command("exec <&-; true"))
    sink.put({**make_event(), "message": "x" * 1_000_000})

    assert sink.close(GIVE_UP_S) == 0
    assert said == []


def test_output_of_a_command_does_not_mix_with_the_alerts(start, capfd):
    sink = start(Command("echo hello"))
    sink.put(make_event())
    assert sink.close(GIVE_UP_S) == 0

    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "hello\n")


def test_a_full_queue_drops_new_events_and_never_blocks(start):
    blocked = Blocked()
    sink = start(blocked)
    for number in range(sinks.QUEUE_EVENTS + 51):
        sink.put(make_event(number))
        if number == 0:
            # The first event is being delivered, and the queue is empty again.
            assert blocked.busy.wait(GIVE_UP_S)
    blocked.release.set()

    assert sink.close(GIVE_UP_S) == 50
    assert blocked.got == list(range(sinks.QUEUE_EVENTS + 1))


class Blocked:
    """Receiver that blocks until it is released."""

    name = "blocked"

    def __init__(self):
        self.busy, self.release, self.got = threading.Event(), threading.Event(), []

    def deliver(self, event):
        self.busy.set()
        assert self.release.wait(GIVE_UP_S)
        self.got.append(event["number"])

    def abort(self):
        self.release.set()


def test_giving_up_kills_the_running_command_and_counts_the_rest(start, said, tmp_path):
    pid_file = tmp_path / "pid"
    sink = start(Command(f"echo $$ > {pid_file}; sleep 600"))
    for _ in range(5):
        sink.put(make_event())
    pid = wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())

    assert close_all([sink], 0.0) == {"--exec": 5}
    assert not psutil.pid_exists(int(pid))
    assert said == []


def test_giving_up_on_a_dead_address_does_not_wait_for_its_backoff(start, monkeypatch):
    monkeypatch.setattr(sinks, "WEB_BACKOFFS_S", (600.0, 600.0))
    with server(answering(500)) as running:
        sink = start(Webhook(address(running)))
        sink.put(make_event())
        wait_until(lambda: running.posts)
        assert close_all([sink], 0.0) == {f"webhook {address(running, '')}": 1}
        sink._thread.join(GIVE_UP_S)
        assert not sink._thread.is_alive()


def test_an_exception_in_a_receiver_does_not_end_the_thread(start, said):
    class Breaking(Blocked):
        name = "breaking"

        def deliver(self, event):
            if event["number"] == 0:
                raise RuntimeError("http://user:secret@host")

    sink = start(Breaking())
    sink.put(make_event(0))
    sink.put(make_event(1))

    assert sink.close(GIVE_UP_S) == 1
    assert said == ["breaking failed: unexpected RuntimeError"]


def _has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
