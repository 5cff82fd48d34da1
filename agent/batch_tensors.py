"""Finds tensors in the inputs and outputs of models, and takes sampled checksums (CRC-32) of batches."""

from __future__ import annotations

import ctypes
import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, strided

MAX_DEPTH: Final = 6
"""Levels of nesting that are searched for tensors."""
MAX_VISITS: Final = 512
"""Objects that are visited in one search, which bounds its time on the training thread."""
TOKENS: Final = ("input_ids", "attention_mask")
"""Inputs with one element for each token, as Hugging Face's models name them."""
PIECES: Final = 16
"""Evenly spaced pieces of a tensor that enter its checksum."""
PIECE_BYTES: Final = 16
"""Bytes in each piece."""


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, mappings, dataclasses and plain objects, in order, up to a depth and count."""
    stack = [(value, 0)]
    visits = 0
    while stack and visits < MAX_VISITS:
        item, depth = stack.pop()
        visits += 1
        if isinstance(item, Tensor):
            yield item
        elif depth < MAX_DEPTH:
            stack.extend((child, depth + 1) for child in reversed(_children(item)))


def _children(item: Any) -> list[Any]:
    try:
        if isinstance(item, (list, tuple)):
            return list(item)
        if isinstance(item, Mapping):
            return list(item.values())
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
        if isinstance(item, (str, bytes, int, float, type(None), type)) or callable(item):
            return []
        # An output class of the user's: its attributes, if it has any.
        return list(getattr(item, "__dict__", {}).values())
    except Exception:  # noqa: BLE001 - attributes and methods of a user's class may raise
        return []


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor with a batch dimension, or None."""
    # The common case: a tensor, or a tuple that begins with one.
    head = value[0] if type(value) in (tuple, list) and value else value
    if isinstance(head, Tensor) and head.dim():
        return head
    for tensor in tensors(value):
        if tensor.dim():
            return tensor
    return None


def input_elements(first: Tensor, inputs: Any, kwargs: Any) -> int:
    """Size of a model's input from shapes alone: elements of its token ids, else of its `first` tensor; 0 = unknown."""
    named = kwargs or (inputs[0] if inputs else None)
    if isinstance(named, Mapping):
        for name in TOKENS:
            if isinstance(tokens := named.get(name), Tensor):
                first = tokens
                break
    try:
        return int(first.numel())
    except Exception:  # noqa: BLE001 - tensor subclasses, such as nested ones, may not know it
        return 0


def fingerprint(tensor: Tensor) -> int:
    """CRC-32 of a few pieces of a contiguous CPU tensor; 0 for any other tensor.

    Reads memory directly, without a torch operation that a profiler, a dispatch mode or an RNG could notice.
    """
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout is not strided:
        return 0
    size = tensor.numel() * tensor.element_size()
    if not size or not tensor.is_contiguous():
        return 0
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        return 0  # inside a transform such as vmap, where a tensor has no memory of its own
    piece = min(PIECE_BYTES, size)
    last = size - piece
    crc = size
    for k in range(PIECES):
        crc = zlib.crc32(ctypes.string_at(address + last * k // (PIECES - 1), piece), crc)
    return crc or 1
