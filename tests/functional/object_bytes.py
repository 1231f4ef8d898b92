"""How many bytes object collectives carry, for tests."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist


@contextmanager
def object_bytes() -> Iterator[list[int]]:
    """The bytes of each object that this rank gives to object collectives."""
    sent, gather, spread = list[int](), dist.all_gather_object, dist.broadcast_object_list

    def gathering(values: list[Any], value: Any, **more: Any) -> None:
        sent.append(len(pickle.dumps(value)))
        gather(values, value, **more)

    def spreading(values: list[Any], *arguments: Any, **more: Any) -> None:
        sent.append(len(pickle.dumps(values)))
        spread(values, *arguments, **more)

    with mock.patch.multiple(dist, all_gather_object=gathering, broadcast_object_list=spreading):
        yield sent
