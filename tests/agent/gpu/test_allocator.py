"""What torch's allocator holds: looked at on the training thread, now and then, and never changed."""

from __future__ import annotations

import threading

import pytest
import torch

from ddpwatch.agent.gpu import allocator as memory
from ddpwatch.agent.gpu.allocator import AllocatorStats, TorchMemory


class Allocator:
    """Stands in for what torch.cuda says of memory; anything that resets is an error."""

    def __init__(self, monkeypatch):
        self.asked = []
        self.capturing = False
        self.thread = threading.get_ident()
        self.now_s = 100.0
        for name in dir(torch.cuda):
            if "reset" in name or name in ("synchronize", "empty_cache", "memory_snapshot"):
                monkeypatch.setattr(torch.cuda, name, self.refuse)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(memory, "monotonic", lambda: self.now_s)

    def refuse(self, *args, **kwargs):
        raise AssertionError("called something that changes the script's figures")

    def stats(self, index):
        assert threading.get_ident() == self.thread
        self.asked.append(index)
        count = {"current": 10 + index, "peak": 90 + index, "allocated": 1, "freed": 1}
        return {"allocated_bytes": {"all": count}, "reserved_bytes": {"all": {**count, "current": 50 + index}}}


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


def test_it_is_asked_at_most_once_a_second_and_nothing_is_reset(allocator):
    held = TorchMemory()
    held.watch([0, 3])
    for _ in range(1000):
        held.after_step()
        allocator.now_s += 0.01

    assert held.held == {0: AllocatorStats(10, 50, 90), 3: AllocatorStats(13, 53, 93)}
    assert 2 * 9 <= len(allocator.asked) <= 2 * 11


def test_without_a_device_torch_is_never_asked(allocator):
    held = TorchMemory()
    held.after_step()
    held.watch([])
    held.after_step()

    assert allocator.asked == []


def test_while_a_graph_is_captured_nothing_is_asked(allocator):
    held = TorchMemory()
    held.watch([0])
    allocator.capturing = True
    held.after_step()
    assert allocator.asked == []

    allocator.capturing = False
    allocator.now_s += memory.EVERY_S
    held.after_step()
    assert allocator.asked == [0]


def test_an_allocator_that_does_not_count_is_asked_once_and_the_reason_is_kept(allocator, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda index: {}[index])
    held = TorchMemory()
    held.watch([0])
    held.after_step()
    monkeypatch.undo()
    held.after_step()

    assert held.held == {}
    assert held.why == "torch's allocator does not report it (KeyError)"


def test_torch_has_what_is_asked():
    assert callable(torch.cuda.memory_stats_as_nested_dict)
    assert callable(torch.cuda.is_current_stream_capturing)
    names = torch.cuda.memory_stats_as_nested_dict.__module__
    assert names == "torch.cuda.memory"
