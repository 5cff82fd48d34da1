"""Real ranks behind a relay: they listen on TCP with CURVE, the relay connects to them, and viewers to the relay."""

import os
import signal
from contextlib import closing

from ddpwatch.core.state.run import RunState
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.live import Live
from tests.builders.relay_thread import Tunnel, relayed
from tests.builders.training import wait_for
from tests.faults.tcp_run import TCP, elsewhere, follow, trains
from tests.faults.viewer import find_run


def test_history_stream_and_stacks_come_through_and_a_stopped_rank_falls_silent(start, run_dir, tmp_path):
    start(trains, tmp_path / "never", env=TCP)
    run = elsewhere(find_run(run_dir), address="ipc:///nowhere")
    with relayed(run) as relay:
        state = follow(relay.ticket, lambda state: state.ranks[0].steps.newest > 100)
        assert state.ranks[0].lost == state.bad == 0
        assert (state.ranks[0].steps.indices() == range(len(state.ranks[0].steps.indices()))).all()

        state = RunState(run.id, run.name, run.world_size)
        with closing(Live(relay.ticket)) as live:

            def hear():
                item = live.poll(20)
                if isinstance(item, Frame):
                    state.ingest(item.payload, item.received_ns)
                else:
                    state.tick(item.now_ns)

            live.want_stacks(frozenset({0}))
            wait_for(lambda: hear() or state.ranks[0].stack)
            assert any("train" in frame.function for frame in state.ranks[0].stack.threads[0].frames)
            os.kill(run.endpoints[0].pid, signal.SIGSTOP)
            wait_for(lambda: hear() or state.condition(state.ranks[0]) == "silent")
            assert not state.relay_lost, "it is the rank, and not the way to it"
            os.kill(run.endpoints[0].pid, signal.SIGCONT)
            wait_for(lambda: hear() or state.condition(state.ranks[0]) == "ok")


def test_a_peer_cut_off_on_either_side_of_the_relay_gets_what_it_has_missed(start, run_dir, tmp_path):
    """Both reconnect by themselves and renew their subscriptions."""
    start(trains, tmp_path / "never", env=TCP)
    run = find_run(run_dir)
    with Tunnel() as behind, Tunnel() as before:
        behind.target = int(run.endpoints[0].tcp_address.rpartition(":")[2])
        away = elsewhere(run, address="ipc:///nowhere", tcp_address=f"tcp://127.0.0.1:{behind.port}")
        with relayed(away, advertise=f"127.0.0.1:{before.port}") as relay:
            before.target = relay.bound_port
            with closing(Live(relay.ticket)) as live:
                state = RunState(run.id, run.name, run.world_size)
                snaps = []

                def hear():
                    item = live.poll(20)
                    if isinstance(item, Frame):
                        state.ingest(item.payload, item.received_ns)
                        snaps.extend([item.topic] if item.topic.startswith(b"snap/") else [])

                for tunnel in (behind, before):
                    wait_for(lambda: hear() or snaps)
                    snaps.clear()
                    tunnel.cut()
                    wait_for(lambda: hear() or snaps)
                    newest = state.ranks[0].steps.newest
                    wait_for(lambda newest=newest: hear() or state.ranks[0].steps.newest > newest + 20)
    assert state.bad == 0
    assert (state.ranks[0].steps.indices() == range(len(state.ranks[0].steps.indices()))).all()
