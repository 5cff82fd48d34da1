"""Ranks on TCP: viewers with the run's key see them from other hosts; others get no byte and do no harm."""

import contextlib
import os
import socket as sockets
import time

import msgspec
import pytest
import zmq
from torch.nn.parallel import DistributedDataParallel

from ddpwatch import encryption, rundir, wire
from ddpwatch.agent import tcp_listener
from ddpwatch.cli.main import run as command
from ddpwatch.errors import AccessRefused, NoSuchRun
from ddpwatch.sources.connections import probe
from tests.builders.training import wait_for
from tests.builders.watched_training import Training, join_group
from tests.faults.tcp_run import TCP, elsewhere, follow, trains
from tests.faults.viewer import Viewer, find_run, hasty


@pytest.fixture
def tcp_run(start, run_dir, tmp_path):
    start(trains, tmp_path / "never", env=TCP)
    return find_run(run_dir)


def test_a_ticket_gives_history_and_stream_from_elsewhere(tcp_run):
    state = follow(elsewhere(tcp_run, address="ipc:///nowhere"), lambda state: state.ranks[0].steps.newest > 100)

    assert state.ranks[0].lost == state.bad == 0
    assert (state.ranks[0].steps.indices() == range(len(state.ranks[0].steps.indices()))).all()


def test_a_viewer_with_a_wrong_key_or_none_is_refused_at_once_and_the_run_notes_it(tcp_run):
    _, secret_key = encryption.new_keys()
    began_s = time.monotonic()
    with pytest.raises(AccessRefused, match="does not accept the key"):
        probe(msgspec.structs.replace(elsewhere(tcp_run), viewer_secret_key=secret_key))
    with pytest.raises(AccessRefused, match="its key is not in the ticket"):
        probe(msgspec.structs.replace(elsewhere(tcp_run), viewer_secret_key=""))
    with pytest.raises(AccessRefused, match=r"cannot be watched: the viewer key in the ticket is not a CURVE key; get"):
        probe(msgspec.structs.replace(elsewhere(tcp_run), viewer_secret_key="abc"))
    with pytest.raises(AccessRefused, match="rank 0 has an unusable address: its key is not a CURVE key"):
        probe(elsewhere(tcp_run, server_key="abc"))
    with pytest.raises(AccessRefused, match="another key"):
        probe(elsewhere(tcp_run, server_key=encryption.new_keys()[0]))
    assert time.monotonic() - began_s < 3 * 2.5, "none of it waited until its time was up"
    probe(elsewhere(tcp_run))

    with Viewer(tcp_run.endpoints[0].address) as viewer:
        viewer.read(lambda viewer: viewer.snap is not None)
    assert [note.text for note in viewer.snap.notes if note.kind == "refused"] == [
        "Somebody without the key of this run was refused at its TCP port, once so far."
    ]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"server_key": encryption.new_keys()[0]}, "it has another key than this ticket"),
        ({"tcp_address": "tcp://127.0.0.1:1"}, "it does not answer at tcp://127.0.0.1:1"),
    ],
    ids=["key", "port"],
)
def test_the_reason_why_a_rank_of_a_ticket_is_missing_is_shown(start, run_dir, tcp_run, tmp_path, capsys, changed, why):
    start(trains, tmp_path / "never", env=TCP)
    runs = wait_for(lambda: found if len(found := rundir.scan(run_dir)[0]) == 2 else None)
    (wrong,) = [elsewhere(run, **changed).endpoints[0] for run in runs if run.id != tcp_run.id]
    endpoints = [*elsewhere(tcp_run).endpoints, msgspec.structs.replace(wrong, rank=1)]
    file = tmp_path / "run.ticket"
    rundir.write_private(file, msgspec.structs.replace(tcp_run, world_size=2, endpoints=endpoints))

    assert command(["status", str(file)]) == 0
    assert f"no data from rank 1: {why}" in " ".join(capsys.readouterr().out.split())


def test_the_ticket_of_another_run_opens_nothing(start, run_dir, tmp_path, tcp_run):
    start(trains, tmp_path / "never", env=TCP)
    runs = wait_for(lambda: found if len(found := rundir.scan(run_dir)[0]) == 2 else None)
    (other,) = [run for run in runs if run.id != tcp_run.id]

    with pytest.raises(AccessRefused):
        probe(msgspec.structs.replace(elsewhere(tcp_run), viewer_secret_key=other.viewer_secret_key))
    probe(elsewhere(other))


def test_a_run_that_is_gone_is_not_found(tcp_run):
    with contextlib.closing(sockets.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with pytest.raises(NoSuchRun, match=f"no rank of .* answers at tcp://127.0.0.1:{port}"):
        probe(elsewhere(tcp_run, tcp_address=f"tcp://127.0.0.1:{port}"), timeout_s=0.3)


def test_without_the_keys_not_a_byte_is_received(tcp_run):
    """A viewer that does not encrypt, as an older one would not."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(tcp_run.endpoints[0].tcp_address)
        assert not socket.poll(600)


def test_a_ticket_is_written_for_its_owner_alone_and_no_secret_of_a_rank_is_in_it(tcp_run, tmp_path, capsys):
    file = tmp_path / "run.ticket"
    assert command(["ticket", "-o", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert "holds a secret key" in capsys.readouterr().err
    assert rundir.read(file) == tcp_run
    assert command(["ticket", tcp_run.id]) == 0
    printed = tmp_path / "printed.json"
    printed.write_text(capsys.readouterr().out)
    assert rundir.read(printed) == tcp_run


def test_a_run_on_its_own_host_alone_has_no_ticket(start, run_dir, tmp_path, capsys):
    start(trains, tmp_path / "never")
    find_run(run_dir)

    assert command(["ticket"]) == 2
    assert "DDPWATCH_BIND=tcp" in capsys.readouterr().err


def test_a_bind_setting_that_is_neither_tcp_nor_ipc_is_noted(start, run_dir, tmp_path):
    start(trains, tmp_path / "never", env={"DDPWATCH_BIND": "udp"})
    run = find_run(run_dir)
    with Viewer(run.endpoints[0].address) as viewer:
        viewer.read(lambda viewer: viewer.snap is not None)

    assert run.endpoints[0].tcp_address == ""
    assert [note.text for note in viewer.snap.notes if note.kind == "tcp"] == [
        "DDPWATCH_BIND=udp is neither tcp nor ipc, and counts as if it were not set."
    ]


def trains_somewhere(store, rank, node, stop):
    """A launcher that says nothing about hosts; this process believes that it is on `node`."""
    rundir.node_id = lambda: node
    join_group(store, rank, 2)
    Training(DistributedDataParallel).steps_until(stop)


def test_ranks_find_out_by_themselves_that_they_are_on_two_hosts_of_one_name(start, run_dir, tmp_path):
    nodes = ["twin/1", "twin/2"]
    for rank, node in enumerate(nodes):
        start(
            trains_somewhere, str(tmp_path / "store"), rank, node, tmp_path / "never", env={**TCP, "DDPWATCH_BIND": ""}
        )

    def both():
        runs = [run for run in rundir.scan(run_dir)[0] if len(run.endpoints) == 2]
        return runs[0] if runs and all(each.tcp_address for each in runs[0].endpoints) else None

    run = wait_for(both)
    names = {each.host for each in run.endpoints}
    own = sockets.gethostname()
    assert own in names
    assert len(names) == 2, "their names differ"
    assert all(name.startswith(own) for name in names)
    state = follow(run, lambda state: all(rank.snapped for rank in state.ranks.values()))
    assert {rank.host for rank in state.ranks.values()} == names


def test_ranks_of_one_host_do_not_listen_on_tcp(start, run_dir, tmp_path):
    for rank in range(2):
        start(trains_somewhere, str(tmp_path / "store"), rank, "only/1", tmp_path / "never")
    run = find_run(run_dir, 2)
    with Viewer(run.endpoints[1].address) as viewer:
        viewer.read(viewer.has(wire.Beat, 4))

    assert [each.tcp_address for each in find_run(run_dir, 2).endpoints] == ["", ""]


# which address, which port


@pytest.fixture
def bare(monkeypatch):
    for name in (tcp_listener.HOST, tcp_listener.IFACE, tcp_listener.PORT_BASE):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def listening(*, store_host="", place=0):
    said = []
    listener, reported = tcp_listener.listen(store_host, place, said.append)
    with listener:
        return listener.getsockname(), reported, said


def test_the_interface_that_is_named_is_the_one_that_is_bound(bare):
    bare.setenv(tcp_listener.IFACE, "lo")
    bound, reported, _ = listening()

    assert bound[0] == "127.0.0.1"
    assert reported == f"tcp://127.0.0.1:{bound[1]}"


@pytest.mark.parametrize("store_host", ["", "127.0.0.1", "localhost"])
def test_a_store_on_loopback_or_in_a_file_does_not_keep_a_rank_from_being_reached(bare, store_host):
    """On one host it listens by configuration, which is useful from outside only; the README says so."""
    bare.setattr(
        tcp_listener, "_source_address", lambda host: {"": "", "192.0.2.1": "127.0.0.7"}.get(host, "127.0.0.1")
    )
    bare.setattr(tcp_listener, "_of_interface", lambda name: "")
    assert tcp_listener._choose(store_host) == ("127.0.0.1", "127.0.0.1"), "there is nothing else here"
    bare.setattr(tcp_listener, "_source_address", lambda host: {"": "", "192.0.2.1": "10.9.8.7"}.get(host, "127.0.0.1"))
    assert tcp_listener._choose(store_host) == ("10.9.8.7", "10.9.8.7")


@pytest.mark.parametrize("store_host", ["127.0.0.1", "192.0.2.9"])
def test_the_host_that_is_named_keeps_a_rank_on_loopback(bare, store_host):
    bare.setenv(tcp_listener.HOST, "127.0.0.1")

    assert listening(store_host=store_host)[0][0] == "127.0.0.1"


def test_an_interface_that_is_not_there_is_not_replaced_by_another(bare):
    bare.setenv(tcp_listener.IFACE, "ib99")
    with pytest.raises(tcp_listener.NoAddressError, match=r"ib99 has no address here; there are: .*lo"):
        listening()


def test_ipv6_is_announced_in_brackets(bare):
    bare.setenv(tcp_listener.HOST, "::1")
    try:
        bound, reported, _ = listening()
    except tcp_listener.NoAddressError as error:
        pytest.skip(str(error))

    assert reported == f"tcp://[::1]:{bound[1]}"


def test_ports_count_from_the_base_by_the_place_on_the_node(bare):
    with contextlib.closing(sockets.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    bare.setenv(tcp_listener.HOST, "127.0.0.1")
    bare.setenv(tcp_listener.PORT_BASE, str(port - 3))

    assert listening(place=3)[1] == f"tcp://127.0.0.1:{port}"


def test_a_port_that_is_taken_is_said_and_another_one_used(bare):
    with contextlib.closing(sockets.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        bare.setenv(tcp_listener.HOST, "127.0.0.1")
        bare.setenv(tcp_listener.PORT_BASE, str(port))
        bound, _, said = listening()

    assert bound[1] != port
    assert len(said) == 1
    assert f"Port {port} cannot be used" in said[0]
    assert str(bound[1]) in said[0]


# strangers


@pytest.fixture
def small_listener(monkeypatch):
    """A listener as agents have one, with room for four strangers at a time and a short closing time."""
    monkeypatch.setattr(tcp_listener, "MAX_DESCRIPTORS", 4)
    monkeypatch.setattr(tcp_listener, "CLOSED_S", 0.3)
    monkeypatch.setattr(encryption, "HANDSHAKE_MS", 200)
    before = tcp_listener.threads()
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)
    listener = sockets.create_server(("127.0.0.1", 0), backlog=64)
    listener.setblocking(False)
    viewer_public, viewer_secret = encryption.new_keys()
    public, secret = encryption.new_keys()
    notes = []
    made = tcp_listener.TcpListener(
        context,
        socket,
        listener,
        secret,
        viewer_public,
        tcp_listener.threads() - before,
        lambda *note: notes.append(note),
    )
    made.port, made.notes, made.keys, made.bound = listener.getsockname()[1], notes, (public, viewer_secret), socket
    yield made
    made.close()
    context.destroy(linger=0)


def handle_ready(small_listener, until, timeout_s=20.0):
    """Serve the listener as the agent's thread does."""
    deadline_s = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline_s
        poller = zmq.Poller()
        for watched in [small_listener.bound, *small_listener.watched()]:
            poller.register(watched, zmq.POLLIN)
        ready = [which for which, _ in poller.poll(20)]
        small_listener.handle_ready([which for which in ready if which is not small_listener.bound])
        if small_listener.bound in ready:
            small_listener.bound.recv()
        small_listener.check_load()


def test_a_crowd_of_strangers_takes_few_descriptors_and_viewers_come_in_again_when_it_is_gone(small_listener):
    before = len(os.listdir("/proc/self/fd"))
    strangers = []

    def crowd():
        stranger = sockets.socket()
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", small_listener.port))
        strangers.append(stranger)
        return len(strangers) == 200

    handle_ready(small_listener, crowd)
    taken = len(os.listdir("/proc/self/fd")) - before - len(strangers)
    for stranger in strangers:
        stranger.close()

    assert taken <= 100, "most of them were not let in"
    assert [kind for kind, _ in small_listener.notes] == ["strangers"]
    with zmq.Context() as context, context.socket(zmq.SUB) as viewer:
        viewer.linger = 0
        viewer.reconnect_ivl = 50
        viewer.subscribe(b"beat")
        encryption.connect(viewer, f"tcp://127.0.0.1:{small_listener.port}", *small_listener.keys)

        def receives():
            small_listener.bound.send_multipart([b"beat", b"x"])
            return viewer.poll(0)

        handle_ready(small_listener, receives)


def test_the_time_of_libzmqs_thread_is_limited_too(small_listener, monkeypatch):
    monkeypatch.setattr(tcp_listener, "MAX_CPU_S", 0.0)
    stranger = sockets.create_connection(("127.0.0.1", small_listener.port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
    handle_ready(small_listener, lambda: small_listener.notes)
    stranger.close()

    assert [kind for kind, _ in small_listener.notes] == ["strangers"]


def test_garbage_instead_of_a_handshake_is_not_answered_for_long(small_listener):
    for garbage in (
        b"",
        b"\xff" * 64,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + bytes(200),
        os.urandom(4096),
    ):
        with sockets.create_connection(("127.0.0.1", small_listener.port)) as stranger:
            stranger.sendall(garbage)
            stranger.setblocking(False)

            def ended(stranger=stranger):
                try:
                    return stranger.recv(4096) == b""
                except BlockingIOError:
                    return False
                except ConnectionError:
                    return True

            handle_ready(small_listener, ended)


def forks_and_dies(store, stop):
    """Its child goes on, as a worker of a DataLoader may for a while."""
    training = Training()
    wait_for(lambda: training.agent._publisher.address)
    if not os.fork():
        wait_for(lambda: os.path.exists(stop), 60)
        os._exit(0)
    training.steps_until(stop)


def test_a_forked_child_does_not_hold_the_port(start, run_dir, tmp_path):
    child = start(forks_and_dies, "", tmp_path / "stop", env=TCP)
    port = int(find_run(run_dir).endpoints[0].tcp_address.rpartition(":")[2])
    try:
        with Viewer(find_run(run_dir).endpoints[0].address) as viewer:
            viewer.read(viewer.trained(2))
        child.kill()
        child.wait()

        def refused():
            with sockets.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) != 0

        wait_for(refused)
    finally:
        (tmp_path / "stop").touch()


def trains_with_little_time_for_viewers(stop):
    tcp_listener.MAX_CPU_S = 0.02
    Training().steps_until(stop)


def test_viewers_with_the_key_that_keep_the_socket_busy_are_disconnected(start, run_dir, tmp_path):
    start(trains_with_little_time_for_viewers, tmp_path / "never", env=TCP)
    run = find_run(run_dir)
    (endpoint,) = run.endpoints
    with zmq.Context() as context, Viewer(endpoint.address) as witness:
        busy = [hasty(context, run, endpoint.tcp_address) for _ in range(20)]
        witness.read(lambda witness: "flooded" in [note.kind for note in witness.notes()])
        for socket in busy:
            socket.close()
        witness.live.clear()
        witness.read(lambda witness: witness.of(wire.Beat), 60)
