"""Errors that the driver tells as they happen. Waiting for them blocks, so they have a thread."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any, Final

from ddpwatch.agent.gpu.nvml import TIMEOUT, XID, Absent, Nvml, open_nvml
from ddpwatch.wire import MAX_XIDS

WHOLE_GPU: Final = 2**32 - 1
"""In place of the number of a MIG instance."""
MAX_KEPT: Final = 8 * MAX_XIDS
"""Of one card, of which others may use other instances."""
# Events of ECC errors are not asked for: the counters tell the same.
WAIT_MS: Final = 500
PATIENCE: Final = 20
"""So many waits may fail one after the other; a lost GPU lets them fail for all."""


class XidWatch(threading.Thread):
    """Hears the Xid errors of some cards, for as long as it is let."""

    def __init__(self, cards: tuple[int, ...]) -> None:
        super().__init__(name="ddpwatch-xid", daemon=True)
        self._cards = cards
        self._ending = threading.Event()
        self._xids: dict[int, deque[tuple[int, int]]] = {card: deque(maxlen=MAX_KEPT) for card in cards}
        """By number of the card, its errors and the GPU instances they are of, the latest last."""
        self.why: dict[int, str] = {}
        """By number of a card, why nothing will be heard of it."""

    def of(self, card: int, instance: int | None) -> list[int]:
        """The errors of a card, the latest last; of a GPU instance of it those that are not of another one."""
        found = [code for code, where in tuple(self._xids[card]) if instance is None or where in (instance, WHOLE_GPU)]
        return found[-MAX_XIDS:]

    def stop(self) -> None:
        """End within the time of one wait; nobody needs to wait for that."""
        self._ending.set()

    def run(self) -> None:
        """Listen until stopped."""
        try:
            # Its own door to NVML: the sampler may leave while this one is still inside.
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
        except Exception as error:  # noqa: BLE001 - all else of the GPU is still told
            self.give_up(f"listening failed: {type(error).__name__}")

    def give_up(self, why: str) -> None:
        """Nothing more will be heard."""
        self.why = dict.fromkeys(self._cards, why)

    def _register(self, nvml: Nvml, events: Any) -> dict[int | None, int]:
        """By address of a handle, the card that it is; an event names its GPU by that."""
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
            elif failures < PATIENCE:
                failures += 1
                self._ending.wait(WAIT_MS / 1000)
            else:
                self.give_up(event.why)
                return


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
