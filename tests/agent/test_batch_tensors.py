"""Tensors are found in whatever holds them, and a batch is sampled without a torch operation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddpwatch.agent.batch_tensors import MAX_VISITS, fingerprint, first_tensor, input_elements, tensors


def test_equal_batches_have_equal_fingerprints_and_others_do_not():
    batch = torch.arange(4096.0).view(64, 64)
    assert fingerprint(batch) == fingerprint(batch.clone()) != 0
    other = batch.clone()
    other[0, 0] += 1
    assert fingerprint(other) != fingerprint(batch)
    assert fingerprint(batch[:32]) != fingerprint(batch)


@given(st.integers(1, 5000), st.sampled_from([torch.uint8, torch.float32, torch.int64, torch.bool, torch.bfloat16]))
def test_a_fingerprint_reads_inside_the_tensor_only_and_is_never_0(count, dtype):
    # Surrounded by other memory of the same tensor: what is outside the slice must not matter.
    whole = torch.zeros(count + 64, dtype=dtype)
    before = fingerprint(whole[32 : 32 + count])
    whole[:32] = 1
    whole[32 + count :] = 1
    assert fingerprint(whole[32 : 32 + count]) == before != 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 4),
        torch.zeros(4, 8).t(),
        torch.zeros(8, 8)[:, ::2],
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        nn.Parameter(torch.zeros(3)),
    ],
    ids=["empty", "transposed", "strided", "meta", "sparse", "parameter"],
)
def test_what_cannot_be_read_in_place_has_no_fingerprint(tensor):
    assert fingerprint(tensor) == 0


def test_a_tensor_inside_a_function_transform_has_no_fingerprint():
    seen = []
    torch.func.vmap(lambda row: (seen.append(fingerprint(row)), row)[1])(torch.zeros(3, 4))
    assert seen == [0]


def test_a_scalar_is_not_a_batch():
    assert first_tensor(torch.tensor(3.0)) is None
    batch = torch.zeros(2, 3)
    assert first_tensor([torch.tensor(3.0), {"x": batch}]) is batch
    assert first_tensor("no tensor here") is None


def test_the_walk_keeps_order_and_ends_in_a_loop():
    first, second = torch.zeros(1), torch.ones(1)
    assert [id(tensor) for tensor in tensors({"a": [first], "b": (second, first)})] == [
        id(first),
        id(second),
        id(first),
    ]
    loop = [first]
    loop.append(loop)
    assert 1 <= len(list(tensors(loop))) <= MAX_VISITS
    assert len(list(tensors([[first] * 10_000]))) <= MAX_VISITS


def test_an_object_whose_attributes_raise_is_walked_over():
    class Grumpy:
        __slots__ = ()

        def __getattr__(self, name):
            raise ValueError(name)

    batch = torch.zeros(2, 3)
    assert first_tensor([Grumpy(), batch]) is batch


def test_the_size_of_an_input_is_that_of_its_token_ids_or_its_first_tensor():
    image, ids = torch.ones(2, 3, 4), torch.ones(2, 7)

    assert input_elements(image, (image,), {}) == 24
    assert input_elements(image, (), {"pixels": image, "input_ids": ids}) == 14
    assert input_elements(image, ({"pixels": image, "attention_mask": ids},), {}) == 14
    assert input_elements(image, (image,), {"input_ids": None}) == 24


def test_a_tensor_that_does_not_know_its_size_counts_as_unknown():
    class Sizeless(torch.Tensor):
        def numel(self):
            raise RuntimeError("no size")

    assert input_elements(torch.ones(2).as_subclass(Sizeless), (), {}) == 0
