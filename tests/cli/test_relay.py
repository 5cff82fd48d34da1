"""`ddpwatch relay`: the port, a ticket that all other commands accept, lines and exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from contextlib import closing

import msgspec
import pytest

from ddpwatch import encryption, rundir
from ddpwatch.recording.reader import Recording
from tests.builders.fake_rank import FakeRun
from tests.builders.relay_thread import Tunnel, relayed
from tests.cli.cli_child import GIVE_UP_S


@pytest.fixture
def run(run_dir):
    """Four ranks, 60 steps in; rank 2 is slow in backward."""
    with FakeRun(run_dir, 4, name="resnet50") as run:
        run.train(0, 60, slow_rank=2)
        yield run


@pytest.fixture
def ticket(run, tmp_path):
    """Ticket of a relay that runs in this process, as on another host."""
    file = tmp_path / "run.ticket"
    with relayed(run.file) as relay:
        away = [msgspec.structs.replace(each, node="elsewhere") for each in relay.ticket.endpoints]
        rundir.write_private(file, msgspec.structs.replace(relay.ticket, endpoints=away))
        yield file


def test_it_relays_until_the_run_ends_and_says_what_to_do(run, start_ddpwatch, in_process, tmp_path):
    file = tmp_path / "mine.ticket"
    relay = start_ddpwatch("relay", "--bind", "127.0.0.1:0", "--ticket", str(file))
    said = [relay.stderr.readline() for _ in range(2)]
    ticket = rundir.read(file)
    port = ticket.relay.tcp_address.rpartition(":")[2]
    assert said[0] == f"relaying run {run.run_id[:8]} (resnet50), 4 ranks, at 127.0.0.1:{port}; Ctrl-C stops it\n"
    assert f"ddpwatch attach {file}" in said[1]
    assert file.stat().st_mode & 0o777 == 0o600

    done = in_process("status", "--json", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    status = json.loads(done.stdout)
    assert [rank["state"] for rank in status["ranks"]] == ["ok"] * 4
    assert [alert["rule"] for alert in status["alerts"]][:1] == ["straggler"]

    stranger = tmp_path / "stranger.ticket"
    rundir.write_private(stranger, msgspec.structs.replace(ticket, viewer_secret_key=encryption.new_keys()[1]))
    done = in_process("status", str(stranger))
    assert done.returncode == 1
    assert "does not accept the key" in done.stderr
    assert done.stderr.count("\n") == 1
    assert relay.stderr.readline() == "refused a connection without the key of the ticket, once so far\n"

    for rank in run.ranks:
        rank.say_bye()
    _, rest = relay.communicate(timeout=GIVE_UP_S)
    assert relay.returncode == 0
    assert rest.startswith(f"run {run.run_id[:8]} (resnet50) has ended: all ranks have exited; ")
    assert rest.endswith(" frames forwarded; 1 connection refused\n")
    assert rest.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_is_interrupted_cleanly(run, start_ddpwatch, tmp_path, number):
    file = tmp_path / "t.ticket"
    relay = start_ddpwatch("relay", "--bind", "127.0.0.1:0", "--ticket", str(file))
    relay.stderr.readline(), relay.stderr.readline()
    relay.send_signal(number)
    _, rest = relay.communicate(timeout=GIVE_UP_S)
    assert relay.returncode == 130
    assert "is still running; the relay has stopped" in rest
    assert rest.count("\n") == 1


def test_watch_record_and_stacks_take_its_ticket(run, ticket, in_process, tmp_path):
    file = tmp_path / "run.ddpw"
    done = in_process("watch", str(ticket), "--json", "--for", "1s", "--record", str(file))
    assert done.returncode == 0
    assert "straggler" in {json.loads(line)["rule"] for line in done.stdout.splitlines()}
    with closing(Recording(file)) as recording:
        assert len(recording.attempts) == 1
    assert encryption.public_of(rundir.read(ticket).viewer_secret_key).encode() not in file.read_bytes()

    done = in_process("stacks", str(ticket), "--timeout", "0.1")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_ticket_goes_into_a_file_of_the_runs_name_by_default(run, in_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def leave():
        for rank in run.ranks:
            assert rank.followed.wait(GIVE_UP_S)
            rank.say_bye()

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    assert in_process("relay", "resnet50", "--bind", "127.0.0.1:0").returncode == 0
    leaving.join(GIVE_UP_S)
    assert rundir.read(tmp_path / "resnet50.ticket").relay is not None


def test_the_ticket_can_be_copied_as_any_other(ticket, in_process, tmp_path):
    copy = tmp_path / "copy.ticket"
    assert in_process("ticket", str(ticket), "-o", str(copy)).returncode == 0
    assert rundir.read(copy) == rundir.read(ticket)


def test_a_file_that_is_no_ticket_is_not_replaced(run, ticket, in_process, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    link = tmp_path / "link.ticket"
    link.symlink_to(script)

    for file in (script, link, tmp_path):
        for command in (("relay", "resnet50", "--bind", "127.0.0.1:0", "--ticket"), ("ticket", str(ticket), "-o")):
            done = in_process(*command, str(file))
            assert done.returncode == 2
            assert f"{file} exists and is not a ticket" in done.stderr
            assert done.stderr.count("\n") == 1
    assert script.read_text() == "import torch\n"
    assert link.is_symlink()


def test_an_older_ticket_and_an_empty_file_are_replaced(ticket, in_process, tmp_path):
    older, empty = tmp_path / "older.ticket", tmp_path / "empty.ticket"
    older.write_bytes(ticket.read_bytes().replace(b"resnet50", b"older"))
    empty.touch()

    for file in (older, empty):
        assert in_process("ticket", str(ticket), "-o", str(file)).returncode == 0
        assert rundir.read(file) == rundir.read(ticket)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_ticket_that_others_may_read_is_used_with_a_warning(ticket, in_process, mode):
    ticket.chmod(mode)
    done = in_process("status", str(ticket), "--json")

    assert done.returncode == 0
    warning = f"ddpwatch: warning: {ticket} holds a key and is readable by others; run: chmod 600 {ticket}\n"
    assert done.stderr == (warning if mode != 0o600 else "")


def test_without_a_run_there_is_nothing_to_relay(in_process):
    done = in_process("relay", "--bind", "127.0.0.1:0")
    assert done.returncode == 3
    assert "no run found in " in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--bind", "7000"), "--bind 7000: not an address such as"),
        (("--bind", "127.0.0.1:99999"), "not an address"),
        (("--bind", "no.such.host.invalid:7000"), "unknown host"),
        (("--bind", "192.0.2.1:7000"), "cannot listen"),
        (("--bind", "127.0.0.1:0", "--advertise", "login"), "--advertise login: not an address"),
        ((), "Missing option '--bind'"),
    ],
)
def test_an_address_that_cannot_be_is_refused_in_a_line(run, in_process, options, words):
    done = in_process("relay", *options, "--ticket", os.devnull + "/x")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken_and_a_ticket_that_cannot_be_written_are_reported(run, in_process, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = in_process("relay", "--bind", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 2
    assert "address already in use" in done.stderr
    done = in_process("relay", "--bind", "127.0.0.1:0", "--ticket", str(tmp_path / "no" / "such.ticket"))
    assert done.returncode == 1
    assert f"cannot use {tmp_path / 'no' / 'such.ticket'}: No such file or directory" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_relay_of_a_relays_ticket_is_refused(ticket, in_process):
    done = in_process("relay", str(ticket), "--bind", "127.0.0.1:0")
    assert done.returncode == 2
    assert "already the ticket of a relay" in done.stderr


def test_it_works_through_a_tunnel_at_another_port(run, in_process, tmp_path):
    file = tmp_path / "t.ticket"
    with Tunnel() as tunnel, relayed(run.file, advertise=f"127.0.0.1:{tunnel.port}") as relay:
        tunnel.target = relay.bound_port
        assert tunnel.target != tunnel.port
        rundir.write_private(file, relay.ticket)
        done = in_process("status", "--json", str(file))
    assert [rank["state"] for rank in json.loads(done.stdout)["ranks"]] == ["ok"] * 4
