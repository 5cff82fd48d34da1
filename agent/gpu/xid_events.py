"""Xid errors of the driver, received as NVML events. Waiting for them blocks, so it has a thread."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any, Final

from ddpwatch.agent.gpu.nvml import TIMEOUT, XID, Absent, Nvml, open_nvml
from ddpwatch.wire import MAX_XIDS

WHOLE_GPU: Final = 2**32 - 1
"""Id of the GPU instance in errors that concern the whole GPU."""
MAX_KEPT: Final = 8 * MAX_XIDS
"""Errors kept per card; other processes may use other instances of it."""
WAIT_MS: Final = 500
"""Milliseconds of one wait for an event, after which a request to stop is noticed."""
MAX_FAILURES: Final = 20
"""Waits that may fail in succession; a lost GPU makes them fail for all cards."""


class XidListener(threading.Thread):
    """Collects the Xid errors of some cards until stopped. ECC errors are not events here: they have counters."""

    def __init__(self, cards: tuple[int, ...]) -> None:
        super().__init__(name="ddpwatch-xid", daemon=True)
        self._cards = cards
        self._ending = threading.Event()
        self._xids: dict[int, deque[tuple[int, int]]] = {card: deque(maxlen=MAX_KEPT) for card in cards}
        """By index of the card, pairs of error and GPU instance, newest last."""
        self.why: dict[int, str] = {}
        """By index of a card, the reason why its errors cannot be received."""

    def of(self, card: int, instance: int | None) -> list[int]:
        """The errors of a card, newest last, without those of other GPU instances if one is given."""
        found = [code for code, where in tuple(self._xids[card]) if instance is None or where in (instance, WHOLE_GPU)]
        return found[-MAX_XIDS:]

    def stop(self) -> None:
        """End within the time of one wait, without waiting for it."""
        self._ending.set()

    def run(self) -> None:
        """Listen until stopped."""
        try:
            # Its own handle of NVML: the sampler may close while this thread is inside a call.
            nvml = open_nvml()
            if isinstance(nvml, Absent):
                self.give_up(nvml.why)
                return
            events = nvml.ask("nvmlEventSetCreate")
            if isinstance(events, Absent):
                self.give_up(events.why)
            else:
                self._listen(nvml, events, self._register(nvml, events))
                nvml.ask("nvmlEventSetFree", events)
            nvml.close()
        except Exception as error:  # noqa: BLE001 - other figures of the GPU are still read
            self.give_up(f"listening failed: {type(error).__name__}")

    def give_up(self, why: str) -> None:
        """Record why no more errors will be received."""
        self.why = dict.fromkeys(self._cards, why)

    def _register(self, nvml: Nvml, events: Any) -> dict[int | None, int]:
        """Register for events: the card by address of its handle, which is how an event names its GPU."""
        found: dict[int | None, int] = {}
        why: dict[int, str] = {}
        for card in self._cards:
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", card)
            answer = handle if isinstance(handle, Absent) else nvml.ask("nvmlDeviceRegisterEvents", handle, XID, events)
            if isinstance(answer, Absent):
                why[card] = answer.why
            else:
                found[_address(handle)] = card
        self.why = why
        return found

    def _listen(self, nvml: Nvml, events: Any, cards: dict[int | None, int]) -> None:
        failures = 0
        while cards and not self._ending.is_set():
            event = nvml.ask("nvmlEventSetWait_v2", events, WAIT_MS)
            if not isinstance(event, Absent):
                failures = 0
                card = cards.get(_address(event.device))
                if card is not None:
                    self._xids[card].append((int(event.eventData), int(event.gpuInstanceId)))
            elif event.code == TIMEOUT:
                failures = 0
            elif failures < MAX_FAILURES:
                failures += 1
                self._ending.wait(WAIT_MS / 1000)
            else:
                self.give_up(event.why)
                return


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
