"""What `comm="buckets"` adds for each gradient bucket, beside what the plainest Python hook would add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import ddpwatch.agent
from benchmarks.pairs import added, alone, block, installed, row, small_model, train

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

PAIRS = 40
STEPS = 100
LAYERS = 16
BUDGET_US = 25.0
CAP = {"bucket_cap_mb": 0.02}


def register_plain_hook(ddp: DistributedDataParallel) -> None:
    """The hook that torch's documentation shows, without ddpwatch around it."""

    def hook(_state, bucket):  # noqa: ANN001, ANN202 - DDP refuses annotations that are text
        buffer = bucket.buffer()
        buffer.div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])

    register: Any = type(ddp).register_comm_hook
    register.__wrapped__(ddp, None, hook)


def main() -> None:
    """Three equal models: with the timing hook, with a plain hook, and with none."""
    alone()
    timed, hooked, plain = (small_model(LAYERS, **CAP) for _ in range(3))
    register_plain_hook(hooked[0])
    agent = installed(timed[0], lambda: train(*timed), comm="buckets")
    block(lambda: train(*timed), 50)
    buckets = len(timed[0].reducer._get_zeros_like_grad_buckets())
    # All are watched, so only their hooks differ; the others are not given one.
    agent._wants_buckets = False
    ddpwatch.agent.install(hooked[0])
    ddpwatch.agent.install(plain[0])
    blocks: dict[str, list[Any]] = {"timed": [], "hooked": [], "plain": []}
    for _ in range(PAIRS):
        for name, model in (("timed", timed), ("hooked", hooked), ("plain", plain)):
            blocks[name].append(block(lambda: train(*model), STEPS))  # noqa: B023 - called at once
    plainest = {name: cost_us / buckets for name, cost_us, _, _ in added(blocks["hooked"], blocks["plain"])}
    for name, cost_us, noise_us, _ in added(blocks["timed"], blocks["plain"]):
        row(
            f'comm="buckets", {name}, each of {buckets} buckets',
            f"+{cost_us / buckets:.1f} us",
            f"{BUDGET_US:.0f} us",
            cost_us / buckets <= BUDGET_US,
            f"noise {noise_us / buckets:.1f} us; a plain Python hook adds {plainest[name]:.1f} us",
        )


main()
