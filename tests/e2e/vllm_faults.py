"""The command line with a planted fault between trainer and vLLM, for test_vllm_faults.py.

python vllm_faults.py FAULT train ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nemo_oprd.batch.types import Rollout
from nemo_oprd.cli import main
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.stream_rollouts import StreamSampler
from nemo_oprd.vllm import request_round, server_lifecycle
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.sampler import Task
from nemo_oprd.vllm.weight_transfer import UpdateCalls


def another_temperature() -> None:
    body = Task.body

    def cooler(task: Task, index: int) -> dict[str, Any]:
        request = body(task, index)
        request["sampling_params"]["temperature"] *= 0.8
        return request

    Task.body = cooler  # type: ignore[method-assign]


def stale_prefix_cache() -> None:
    post = Client.post

    async def keeping(client: Client, to: server_lifecycle.Server, path: str, *args: Any, **kwargs: Any) -> Any:
        return await post(client, to, path.replace("mode=wait", "mode=wait&clear_cache=false"), *args, **kwargs)

    Client.post = keeping  # type: ignore[method-assign]
    request_round.PAUSE_AND_CUT += "&clear_cache=false"
    early_cuts()


def stale_head() -> None:
    """A server whose worker does not pack tied heads again."""
    folder = Path(sys.argv[1])
    folder.mkdir()
    for file in server_lifecycle.WORKER_FOLDER.glob("*.py"):
        (folder / file.name).write_text(file.read_text().replace("    _pack_tied_heads(model)\n", ""))
    assert "    _pack_tied_heads(model)" not in (folder / "nemo_oprd_reload.py").read_text()
    del sys.argv[1]
    server_lifecycle.WORKER_FOLDER = folder


def _change_in_transit(change: Any) -> None:
    update = UpdateCalls.update

    async def changed(calls: UpdateCalls, to: server_lifecycle.Server, info: dict[str, Any]) -> None:
        entries = [dict(entry) for entry in info["entries"]]
        await update(calls, to, {**info, "entries": change(entries)})

    UpdateCalls.update = changed  # type: ignore[method-assign]


def missing_tensor() -> None:
    _change_in_transit(lambda entries: entries[:-1])


def exchanged_tensors() -> None:
    """Two norms of equal shape change places."""

    def exchange(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        one, other = (entry for entry in entries if entry["name"].endswith("layers.0.input_layernorm.weight")
                      or entry["name"].endswith("layers.1.input_layernorm.weight"))  # fmt: skip
        one["name"], other["name"] = other["name"], one["name"]
        return entries

    _change_in_transit(exchange)


def wrong_shape() -> None:
    def turn(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for entry in entries:
            if entry["name"].endswith("layers.0.mlp.up_proj.weight"):
                entry["shape"] = entry["shape"][::-1]
        return entries

    _change_in_transit(turn)


def file_elsewhere() -> None:
    """A server is told to load a file that is not in a run's folder."""
    update = UpdateCalls.update

    async def changed(calls: UpdateCalls, to: server_lifecycle.Server, info: dict[str, Any]) -> None:
        await update(calls, to, {**info, "path": "/etc/passwd"})

    UpdateCalls.update = changed  # type: ignore[method-assign]


def somebody_else_updates() -> None:
    """Another user of the server gives its weights another version after every update."""
    finish = UpdateCalls.finish

    async def finished(calls: UpdateCalls, to: server_lifecycle.Server, digest: str, version: str) -> None:
        await finish(calls, to, digest, version)
        await calls._client.post(to, "/update_weight_version", {"new_version": "theirs"}, timeout=60)

    UpdateCalls.finish = finished  # type: ignore[method-assign]


def early_cuts() -> None:
    """No fault: a stream is cut when the step has its responses, and some then have long to go on any machine."""
    of_step, body = StreamSampler._of_step, Task.body

    def cutting(sampler: StreamSampler, step: int) -> tuple[list[Request], list[Rollout]]:
        found = of_step(sampler, step)
        sampler.settle(step)
        return found

    def endless(task: Task, index: int) -> dict[str, Any]:
        """The oldest unfinished response of a step, and every fourth after it, has all tokens that it may have."""
        request = body(task, index)
        if index % 4 == 0:
            request["sampling_params"]["stop_token_ids"] = []
        return request

    StreamSampler._of_step = cutting  # type: ignore[method-assign]
    Task.body = endless  # type: ignore[method-assign]


def none() -> None:
    """The run without a fault."""


FAULTS = {
    fault.__name__: fault
    for fault in (
        another_temperature, stale_prefix_cache, stale_head, missing_tensor, exchanged_tensors, wrong_shape,
        file_elsewhere, somebody_else_updates, early_cuts, none,
    )
}  # fmt: skip

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
