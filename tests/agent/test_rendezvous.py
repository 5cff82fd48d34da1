"""A second client of the job's store, also with a torch whose stores cannot be cloned."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ddpwatch.agent.rendezvous import _own_client


@pytest.fixture(params=["file", "tcp"])
def store(request, tmp_path):
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 1)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_before_torch_2_6_the_same_store_is_opened_again(store, monkeypatch):
    prefixed = SimpleNamespace(underlying_store=store)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: prefixed)
    store.set("key", "value")

    assert _own_client().get("key") == b"value"
