"""Kinds of training by how the model is wrapped (`wire.Hello.kind`): their names, and what is true of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddpwatch.core.state.run import RunState

NAMES: Final = {
    "ddp": "DDP",
    "contains-ddp": "DDP",
    "ddp-tp": "DDP + tensor parallel",
    "fsdp2": "FSDP2",
    "fsdp2-tp": "FSDP2 + tensor parallel",
    "fsdp1": "FSDP1",
    "replicate": "replicate",
    "deepspeed": "DeepSpeed",
    "tensor-parallel": "tensor parallel",
    "pipeline": "pipeline parallel",
    "other-ddp": "other DDP",
    "dataparallel": "DataParallel",
    "plain": "no wrapper",
}
"""Short name of each kind."""
DDP: Final = frozenset({"ddp", "contains-ddp", "ddp-tp", ""})
"""Kinds with torch's DistributedDataParallel, and the unknown one."""
REPLICAS: Final = frozenset({"ddp", "contains-ddp"})
"""Kinds in which all ranks have the same parameters, bit by bit, and wait in DDP's all-reduce."""
OWN_SAMPLES: Final = REPLICAS | {"fsdp2", "fsdp1", "replicate"}
"""Kinds in which each rank trains on samples of its own and waits for all others in every step."""
MODEL_PARALLEL: Final = frozenset({"ddp-tp", "fsdp2-tp", "tensor-parallel", "pipeline"})
"""Kinds in which several ranks compute one pass together, so that collectives are a part of the model."""


def kind_of_run(state: RunState) -> str:
    """Kind that the first rank with a description reports; empty = unknown."""
    return next((rank.hello.kind for rank in state.ranks.values() if rank.hello and rank.hello.kind), "")


def is_ddp(state: RunState) -> bool:
    """Whether the run trains with DDP, as far as is known."""
    return kind_of_run(state) in DDP


def sync_name(state: RunState) -> str:
    """What `sync` is called in this run: in DDP it is mostly an all-reduce, elsewhere it is not."""
    return "all-reduce" if is_ddp(state) else "collectives"


def kind_name(state: RunState) -> str:
    """Name of the kind of training if it is not DDP, else empty; also for one process without a wrapper."""
    kind = kind_of_run(state)
    if is_ddp(state) or (kind == "plain" and state.world_size < 2):
        return ""
    return NAMES.get(kind, kind)
