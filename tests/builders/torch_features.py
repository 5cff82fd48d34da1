"""Marks of tests that need more than the oldest supported torch has."""

import pytest
import torch
import torch.distributed as dist

from ddpwatch.cli._doctor_checks import FLIGHT_RECORDER_TORCH, _release

needs_gloo_recorder = pytest.mark.skipif(
    _release(torch.__version__) < FLIGHT_RECORDER_TORCH, reason="this torch does not record gloo's operations"
)
needs_list_keys = pytest.mark.skipif(
    not hasattr(dist.TCPStore, "list_keys"), reason="the stores of this torch cannot list their keys"
)
