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
IMPORT = (
    "import torch, torch.distributed, torch.nn.parallel, torch.utils.data, time; began = time.perf_counter(); "
    "import ddpwatch.agent; print((time.perf_counter() - began) * 1000)"
)


def _wall_ms(*command: str) -> float:
    began_s = perf_counter()
    subprocess.run([sys.executable, *command], capture_output=True, check=True)
    return (perf_counter() - began_s) * 1000


def main() -> None:
    """Medians over fresh processes."""
    imports = [
        float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)
        for _ in range(ROUNDS)
    ]
    row(
        "import ddpwatch.agent after torch", f"{median(imports):.0f} ms", f"{IMPORT_BUDGET_MS:.0f} ms",
        median(imports) <= IMPORT_BUDGET_MS, f"from {min(imports):.0f} to {max(imports):.0f} ms",
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
