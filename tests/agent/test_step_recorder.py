"""The ring never blocks, keeps the newest, and counts what it loses."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.agent.step_recorder import Ring

ACTIONS = st.lists(st.one_of(st.just("push"), st.integers(0, 12)), max_size=80)


@given(st.integers(1, 8), ACTIONS)
def test_the_newest_records_come_out_in_order_and_every_loss_is_counted(size, actions):
    ring = Ring(size)
    model = deque()
    pushed, dropped = 0, 0
    for action in actions:
        if action == "push":
            ring.push(pushed)
            model.append(pushed)
            pushed += 1
            if len(model) > size:
                model.popleft()
                dropped += 1
        else:
            assert ring.drain(action) == [model.popleft() for _ in range(min(action, len(model)))]
        assert ring.dropped == dropped
    assert ring.drain(1000) == list(model)
