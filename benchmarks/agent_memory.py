"""How much memory the agent takes, whether it grows over a million steps, and what its thread costs."""

from __future__ import annotations

import time

import psutil

from benchmarks.pairs import alone, block, row, small_model, train

MIB = 1 << 20
BUDGET_MIB = 30.0
STEPS = 1_000_000
BEAT_S = 10.0
BUDGET_THREAD = 0.3


def main() -> None:
    """Resident memory before the import, after a short training, and after a million synthetic steps."""
    process = psutil.Process()
    alone()
    model, optimizer, batch = small_model()
    block(lambda: train(model, optimizer, batch), 500)
    before = process.memory_info().rss

    import ddpwatch.agent

    agent = ddpwatch.agent.install(model)
    assert isinstance(agent, ddpwatch.agent.Agent)
    block(lambda: train(model, optimizer, batch), 2000)
    recorder, publisher = agent._recorder, agent._publisher

    def made_up(steps: int) -> int:
        for _ in range(steps):
            recorder.close_step()
        return process.memory_info().rss

    early = made_up(STEPS // 10)
    late = made_up(STEPS - STEPS // 10)
    row(
        "agent memory after 1 M steps", f"{(late - before) / MIB:.1f} MiB", f"{BUDGET_MIB:.0f} MiB",
        (late - before) / MIB <= BUDGET_MIB, f"grew {(late - early) / MIB:+.1f} MiB over the last 900 000",
    )  # fmt: skip

    began_s, cpu_ns = time.monotonic(), publisher._heartbeat.beat(0, 0).agent_cpu_ns
    del cpu_ns  # thread_time belongs to the asking thread: the published figure is the agent's own
    threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    deadline_s = began_s + BEAT_S
    while time.monotonic() < deadline_s:
        train(model, optimizer, batch)
        time.sleep(0.01)
    used_s = {
        thread.id: thread.user_time + thread.system_time - threads.get(thread.id, 0.0) for thread in process.threads()
    }
    percent = 100 * used_s[publisher.native_id] / BEAT_S
    row(
        "agent thread at 4 Hz, steps of some 10 ms", f"{percent:.2f} % core", f"{BUDGET_THREAD} %",
        percent <= BUDGET_THREAD, "grain 0.1 %",
    )  # fmt: skip
    agent.close()


main()
