"""How long it takes to import the agent beside torch, and to answer `ddpwatch --help`."""

from __future__ import annotations

import subprocess
import sys
from statistics import median
from time import perf_counter

from benchmarks.pairs import row

ROUNDS = 9
IMPORT_BUDGET_MS = 60.0
HELP_BUDGET_MS = 150.0
# The import may set off a full garbage collection, mostly of torch's objects. It is counted, and printed beside.
IMPORT = """
import gc, time
began_s = time.perf_counter()
import torch, torch.distributed, torch.nn.parallel, torch.utils.data
torch_s = time.perf_counter() - began_s
collecting_s = 0.0
def count(phase, _info):
    global collecting_s
    collecting_s += time.perf_counter() if phase == "stop" else -time.perf_counter()
gc.callbacks.append(count)
began_s = time.perf_counter()
import ddpwatch.agent
print((time.perf_counter() - began_s) * 1000, collecting_s * 1000, torch_s * 1000)
"""


def _wall_ms(*command: str) -> float:
    began_s = perf_counter()
    subprocess.run([sys.executable, *command], capture_output=True, check=True)
    return (perf_counter() - began_s) * 1000


def main() -> None:
    """Medians over fresh processes."""
    runs = [
        [
            float(ms)
            for ms in subprocess.run(
                [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
            ).stdout.split()
        ]
        for _ in range(ROUNDS)
    ]
    imports = [agent_ms for agent_ms, _, _ in runs]
    collecting_ms = median(collecting_ms for _, collecting_ms, _ in runs)
    ratio = median(agent_ms / torch_ms for agent_ms, _, torch_ms in runs)
    row(
        "import ddpwatch.agent after torch", f"{median(imports):.0f} ms", f"{IMPORT_BUDGET_MS:.0f} ms",
        median(imports) <= IMPORT_BUDGET_MS,
        f"from {min(imports):.0f} to {max(imports):.0f} ms, {collecting_ms:.0f} ms of it garbage collection; "
        f"x {ratio:.2f} the import of torch",
    )  # fmt: skip
    answers, bare = [], []
    for _ in range(ROUNDS):
        answers.append(_wall_ms("-m", "ddpwatch", "--help"))
        bare.append(_wall_ms("-c", "pass"))
    row(
        "ddpwatch --help, process start included", f"{median(answers):.0f} ms", f"{HELP_BUDGET_MS:.0f} ms",
        median(answers) <= HELP_BUDGET_MS, f"a bare python takes {median(bare):.0f} ms",
    )  # fmt: skip


main()
