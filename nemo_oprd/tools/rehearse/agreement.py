"""Compares rehearsed ranks: the ranks of a group must issue the same collectives, in the same order.

They must agree in kind, number of elements and dtype of every collective, which no single rank can see. A message
must meet its counterpart: the k-th message from rank a to rank b is received as the k-th message from a on rank b.
"""

from __future__ import annotations

from itertools import combinations, zip_longest
from typing import Any

Messages = list[dict[str, Any]]


def disagreements(found: dict[int, dict[str, Any]]) -> list[str]:
    """One line per pair of ranks that do not agree, which names both sides of the first difference.

    `found`: rank -> the report of its process.
    """
    sequences = {rank: _in_order(seen) for rank, seen in found.items()}
    lines = []
    for one, other in combinations(sorted(found), 2):
        for ranks in sorted({message["ranks"] for message in sequences[one]}):
            if other in ranks:
                here = _collectives(sequences[one], ranks, ranks.index(other))
                there = _collectives(sequences[other], ranks, ranks.index(one), is_mirrored=True)
                lines += _first_difference(one, other, here, there)
        lines += _first_difference(one, other, _sent(sequences[one], other), _received(sequences[other], one))
        lines += _first_difference(other, one, _sent(sequences[other], one), _received(sequences[one], other))
    return lines


def _in_order(seen: dict[str, Any]) -> Messages:
    messages = [message for phase in seen["phases"].values() for message in phase["messages"]]
    return [{**message, "ranks": tuple(message["ranks"])} for message in messages]


def _collectives(messages: Messages, ranks: tuple[int, ...], partner: int, *, is_mirrored: bool = False) -> Messages:
    """The collectives of a group; of an uneven all-to-all only the rows from `partner` and those to it.

    If mirrored, in the order in which the partner itself receives and sends them.
    """
    found = []
    for message in messages:
        if message["peer"] is None and message["ranks"] == ranks:
            if message["rows"] is not None:
                rows = [part[partner] for part in message["rows"]]
                message = {**message, "shapes": [rows[::-1] if is_mirrored else rows, message["shapes"][0][1:]]}
            found.append(message)
    return found


def _sent(messages: Messages, target: int) -> Messages:
    return [message for message in messages if message["kind"] == "send" and message["peer"] == target]


def _received(messages: Messages, source: int) -> Messages:
    return [message for message in messages if message["kind"] == "recv_" and message["peer"] == source]


def _first_difference(one: int, other: int, here: Messages, there: Messages) -> list[str]:
    for number, pair in enumerate(zip_longest(here, there), start=1):
        if _signature(pair[0]) != _signature(pair[1]):
            ours, theirs = (_said(message) for message in pair)
            return [f"rank {one} and rank {other} do not meet at their message {number}: {ours}, but {theirs}"]
    return []


def _signature(message: dict[str, Any] | None) -> Any:
    if message is None:
        return None
    kind = message["kind"] if message["peer"] is None else "message"
    # the rank that gathers has one more tensor per rank, for what it gets
    shapes = message["shapes"][-1:] if message["kind"].startswith("gather") else message["shapes"]
    return kind, shapes, message["dtype"]


def _said(message: dict[str, Any] | None) -> str:
    if message is None:
        return "nothing more"
    return f"{message['kind']} of {message['shapes']} {message['dtype']} at {message['place']}"
