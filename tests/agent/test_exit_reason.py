"""The text of the exception that ends a script."""

import sys

from ddpwatch.agent.exit_reason import failure
from ddpwatch.agent.fail_open import Switch, guarded


class Hook:
    switch = Switch()

    @guarded
    def interrupted(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_that_arrives_in_a_hook_has_the_frames_of_the_script(monkeypatch):
    try:
        Hook().interrupted()
    except KeyboardInterrupt as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        monkeypatch.setattr(sys, "last_exc", error, raising=False)
    what, *places = (failure() or "").splitlines()

    assert what == "KeyboardInterrupt"
    assert [place.rpartition(" in ")[2] for place in places] == [
        "interrupted",
        "test_an_interrupt_that_arrives_in_a_hook_has_the_frames_of_the_script",
    ]
    assert not any("guard.py" in place for place in places)
