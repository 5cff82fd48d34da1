"""Xids, memory errors and lost GPUs."""

from __future__ import annotations

import pytest

from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.gpu_error import gpu_error
from tests.builders.gpu_run import read_gpus
from tests.builders.synthetic_run import look, only, run_of


@pytest.mark.parametrize(
    ("code", "severity", "word"),
    [
        (13, Severity.WARNING, "Graphics Engine Exception"),
        (43, Severity.INFO, "GPU stopped processing"),
        (48, Severity.CRITICAL, "Double Bit ECC Error"),
        (74, Severity.CRITICAL, "NVLINK Error"),
        (79, Severity.CRITICAL, "off the bus"),
        (119, Severity.CRITICAL, "GSP RPC Timeout"),
        (999, Severity.WARNING, "driver"),
    ],
)
def test_an_xid_is_reported_in_words(code, severity, word):
    found = only(gpu_error(look(read_gpus(run_of(), readings=1, r2={"xids": [code]}))))

    assert found.message.startswith(f"rank 2 · cuda:0: Xid {code}, ")
    assert word in found.message
    assert found.severity is severity


def test_the_worst_of_several_errors_comes_first():
    found = only(gpu_error(look(read_gpus(run_of(), readings=1, r2={"xids": [31, 79, 45, 45]}))))

    assert "Xid 79" in found.message
    assert found.message.endswith("and 2 more")


def test_new_memory_errors_are_reported_and_old_ones_are_not():
    old = read_gpus(run_of(), readings=2, r1={"ecc_uncorrected": 7})
    new = read_gpus(run_of(), readings=2, r1=[{"ecc_uncorrected": 7}, {"ecc_uncorrected": 9}])

    assert gpu_error(look(old)) == []
    found = only(gpu_error(look(new)))
    assert "2 new uncorrectable ECC errors" in found.message
    assert found.severity is Severity.CRITICAL


def test_a_lost_gpu_is_critical():
    found = only(gpu_error(look(read_gpus(run_of(), readings=1, r0={"lost": True}))))

    assert found.message == "rank 0 · cuda:0: GPU is lost: the driver cannot read it"
    assert found.severity is Severity.CRITICAL


def test_an_error_of_a_shared_gpu_is_reported_once():
    shared = {"uuid": "GPU-x", "xids": [79]}
    found = only(gpu_error(look(read_gpus(run_of(), readings=1, r0=shared, r1=shared))))

    assert found.ranks == (0, 1)


def test_errors_of_very_many_gpus_are_few_findings():
    state = read_gpus(run_of(24), readings=1, **{f"r{rank}": {"xids": [79]} for rank in range(24)})
    found = gpu_error(look(state))

    assert len(found) == 8
    assert sum(len(finding.ranks) for finding in found) == 24
