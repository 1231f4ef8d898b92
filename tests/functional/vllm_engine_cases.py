"""What the pool's workers run: the engine of `rollout.engine=vllm` with the servers of `vllm_stand_in.py`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import vllm_stand_in
from messages import messages
from object_bytes import object_bytes
from stand_in_python import stand_in
from tiny_models import SIZES

EOS = (1, 3)
MODEL = SIZES | {
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
PROMPTS = [[5, 6, length] for length in (3, 10, 4, 9, 9, 2, 6, 13, 5)]


def make_bench(root: Path, **faults: Any) -> Path:
    """A directory with a model's config.json, faults, and an interpreter whose `vllm` is the stand-in."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(MODEL))
    stand_in(root, faults)
    return root


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Random tensors by all HF names of the model; the servers look at names and bytes only."""
    from nemo_oprd.megatron.param_names import mappings_by_name
    from nemo_oprd.models import parse_model_spec

    generator = torch.Generator().manual_seed(seed)
    names = [name for mapping in mappings_by_name(parse_model_spec(MODEL)).values() for name in mapping.hf]
    return {name: torch.randn(5, 1 + i % 3, generator=generator) for i, name in enumerate(names)}


def expected(seed: int, prompts: list[list[int]], key: tuple[int, ...] = (7, 1, 0), known: int = 300) -> list[tuple]:
    """(ids, log-probabilities, finish reason) of a call, computed without a server."""
    from nemo_oprd.vllm.sampler import seed_of

    tensors = {name: ("float32", tuple(tensor.shape), *_sums(tensor)) for name, tensor in weights(seed).items()}
    digest, found = vllm_stand_in.digest_of(tensors), []
    for i, prompt in enumerate(prompts):
        one = vllm_stand_in.sample(digest, seed_of((*key, i)), prompt, 6, known, list(EOS))
        found.append(
            (one["ids"], np.array(one["logprobs"], np.float32).tolist(), "stop" if one["stopped"] else "length")
        )
    return found


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    words = tensor.contiguous().view(-1).view(torch.int32).tolist()
    return vllm_stand_in.sums(words)  # type: ignore[arg-type]


def lines(root: str | Path) -> list[dict[str, Any]]:
    """All calls to the servers, in order."""
    file = Path(root) / "requests.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def requests(root: str | Path) -> list[dict[str, Any]]:
    """The calls that sample responses, in order."""
    return [line for line in lines(root) if line["call"] == "/inference/v1/generate"]


def settings_of(root: str | Path) -> list[str]:
    """Overrides of a configuration whose servers are the stand-ins of a bench."""
    settings = ["student.hf_path=a", "teacher.hf_path=b", f"output={root}/run", "rollout.engine=vllm"]
    return [*settings, f"rollout.vllm.python={root}/python", "rollout.vllm.start_timeout=30"]


def flags_of(root: Path) -> list[str]:
    """The arguments with which a run starts the stand-ins of a bench."""
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.data.token_ids import TokenIds
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.vllm.launch import student_arguments

    return student_arguments(
        load_config("verify", settings_of(root)), read_model_spec(root), root, TokenIds(300), cuda=False
    )


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(root: Path, *, unix: bool) -> Iterator[dict[str, str]]:
    """A stand-in as `nemo-oprd serve` starts it: "root", "url", "token_file" of an endpoint."""
    from nemo_oprd.vllm.server_lifecycle import server_command, server_environment
    from nemo_oprd.vllm.worker.nemo_oprd_middleware import TOKEN_FILE

    token_file, at, port = root / "token", root / "socket", free_port()
    token_file.touch(0o600)
    token_file.write_text("a-token-of-one-user_" + "0123456789" * 2 + "\n")
    listen = ["--uds", str(at)] if unix else ["--host", "127.0.0.1", "--port", str(port)]
    command = server_command(
        root / "python", flags_of(root), [*listen, "--middleware", "nemo_oprd_middleware.Middleware"]
    )
    environment = server_environment(None) | {TOKEN_FILE: str(token_file)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while True:
            with suppress(OSError), socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as caller:
                caller.connect(str(at) if unix else ("127.0.0.1", port))
                break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        url = f"unix://{at}" if unix else f"http://127.0.0.1:{port}"
        yield {"root": str(root), "url": url, "token_file": str(token_file)}
    finally:
        process.kill()
        process.wait()


@contextmanager
def shared_gpus(root: str, memory: str) -> Iterator[None]:
    """Servers that sleep as if on the trainer's GPUs, whose memory is full while the file ROOT/memory exists.

    `memory`: "freed" when the trainer's ranks give back what they keep, or "kept".
    """
    from dataclasses import replace

    from nemo_oprd.vllm import engine as module
    from nemo_oprd.vllm import transport

    file, place = Path(root) / "memory", module.place_servers

    def places(*arguments: Any) -> list[Any]:
        return [replace(found, sleeps=True, ranks=(0,)) for found in place(*arguments)]

    def free_and_total() -> tuple[int, int]:
        return int(1e9) if file.exists() else int(40e9), int(80e9)

    def give_back() -> None:
        if memory == "freed":
            file.unlink(missing_ok=True)

    with (
        mock.patch.object(module, "place_servers", places),
        mock.patch.object(transport, "SETTLE_S", 0.1),
        mock.patch.object(torch.cuda, "empty_cache", give_back),
        mock.patch.object(torch.cuda, "mem_get_info", free_and_total),
    ):
        yield


@contextmanager
def engine(
    root: str, overrides: list[str], students: int | None, vocab_limit: int | None, deadline: float = 300.0
) -> Iterator[Any]:
    """An engine on the world's first `students` ranks; None: on all.

    It asks often whether it should cancel and whether its servers are well, and sends weights in small buckets.
    """
    import torch.distributed as dist

    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.data.token_ids import TokenIds
    from nemo_oprd.megatron.parallel import init_distributed
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.run.engine_kinds import make_engine
    from nemo_oprd.vllm import client, rounds, transport, weight_group
    from nemo_oprd.vllm.worker import nemo_oprd_guard as guard

    init_distributed()
    config, ranks = (
        load_config("verify", [*settings_of(root), *overrides]),
        Layout(data=students or dist.get_world_size()),
    )
    whole = transport.buckets
    with (
        mock.patch.object(rounds, "CANCEL_CHECK_S", 0.05),
        mock.patch.object(client, "HEALTH_EVERY_S", 0.1),
        mock.patch.object(weight_group, "TIMEOUT_S", deadline),
        mock.patch.object(weight_group, "LEAVE_S", 2.0),
        mock.patch.object(transport, "buckets", lambda tensors, **more: whole(tensors, 500, **more)),
    ):
        sampled = None if vocab_limit is None else TokenIds(vocab_limit)
        made: Any = make_engine(config, read_model_spec(root), Path(root), ranks, EOS, sampled)
        folder = made._mine.folder
        try:
            yield made
        finally:
            made.close()
            dist.barrier()
        assert folder is None or not folder.path.exists()
        alive = [line["pid"] for line in lines(root) if guard.group_members(line["group"])]
        assert not alive or config.rollout.vllm.endpoints


def weights_meet() -> dict[str, Any]:
    """Where the group of a server meets, which the last rank has started."""
    import torch.distributed as dist

    from nemo_oprd.megatron.parallel import init_distributed
    from nemo_oprd.vllm.placement import ServerPlacement
    from nemo_oprd.vllm.weight_group import WeightGroup

    init_distributed()
    controller = dist.get_world_size() - 1
    group = WeightGroup([ServerPlacement(0, controller, 2, "group")], torch.device("cpu"))
    meeting = group.meet({0: 1} if dist.get_rank() == controller else {})
    assert meeting is not None
    return meeting.init_info(0)


def run(
    root: str,
    overrides: list[str],
    plan: list[str],
    *,
    students: int | None = None,
    vocab_limit: int | None = None,
    nodes: bool = False,
    deadline: float = 300.0,
    memory: str | None = None,
    say_after: float = 30.0,
) -> dict[str, Any]:
    """Carries out a plan.

    "load 1" and "update 2" give weights, "change 3" changes them without an update; "kill" ends all servers, "occupy"
    the memory of the GPUs, and "stop" asks the first rank to stop after a moment. "generate" samples a response to each
    prompt, with what an earlier "cancel" has completed as `done`, "generate last" before an update; "full" samples
    while responses can't be kept, "slow" while the first one is kept only when all were asked for. "count 6" samples at
    most 6 tokens per response and counts the bytes of objects.

    Args:
        nodes: every rank claims to be on a machine of its own.
        deadline: seconds after which a broadcast of weights is given up.
        memory: see `shared_gpus`; None: servers don't share GPUs.
        say_after: seconds after which a line says which server is waited for.

    Returns:
        "sampled": per "generate", (ids, log-probabilities, finish reason) of each response, and "metrics";
        "said"; "completed" by each "cancel"; "counted" per "count", (sampled tokens, bytes of the largest object that a
        rank pickled for others); "kept" per call, (index, ids, log-probabilities) of every response that a rank kept,
        by index; and the "error" that ended the plan. "seconds" of each part of the plan, and when the last one ended;
        per rank, "digested" is the number of buckets whose digest it computed.
    """
    import torch.distributed as dist

    found: dict[str, Any] = {"sampled": [], "metrics": [], "completed": [], "counted": [], "kept": [], "error": None}
    found |= {"seconds": [], "digested": 0}
    node = {"SLURMD_NODENAME": f"node{os.environ.get('RANK', '0')}"} if nodes else {}
    with messages("nemo_oprd.vllm") as found["said"], mock.patch.dict(os.environ, node):
        try:
            with (
                shared_gpus(root, memory) if memory else nullcontext(),
                counted_digests(found),
                mock.patch("nemo_oprd.runtime.waiting.SAY_AFTER_S", say_after),
                engine(root, overrides, students, vocab_limit, deadline) as made,
            ):
                _carry_out(plan, made, found, root)
        except ValueError as error:
            found["error"] = str(error)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    for part in parts:
        assert (part["sampled"], part["error"]) == (found["sampled"], found["error"])
    kept = [sorted(one for part in calls for one in part) for calls in zip(*(p["kept"] for p in parts), strict=True)]
    counted = [max(of_ranks) for of_ranks in zip(*(part["counted"] for part in parts), strict=True)]  # equal tokens
    digested = [part["digested"] for part in parts]
    said = [line for part in parts for line in part["said"]]
    return {**found, "kept": kept, "counted": counted, "said": said, "digested": digested}


@contextmanager
def counted_digests(found: dict[str, Any]) -> Iterator[None]:
    from nemo_oprd.vllm import weight_transfer

    class Counting(weight_transfer.Digest):
        def add(self, bucket: Any) -> None:
            found["digested"] += 1
            super().add(bucket)

    with mock.patch.object(weight_transfer, "Digest", Counting):
        yield


@contextmanager
def timed(found: dict[str, Any]) -> Iterator[None]:
    """Notes the seconds of a part of a plan, and when it ended."""
    began = time.monotonic()
    try:
        yield
    finally:
        found["seconds"].append(time.monotonic() - began)
        found["ended_at"] = time.time()


def full(_: dict[int, Any]) -> None:
    """Keeps nothing."""
    raise ValueError("the disk is full")


def slow(root: str, keep: Callable[[dict[int, Any]], None]) -> Callable[[dict[int, Any]], None]:
    """Keeps responses once all were asked for."""

    def keep_later(rollouts: dict[int, Any]) -> None:
        deadline = time.monotonic() + 15
        while len(requests(root)) < len(PROMPTS):
            if time.monotonic() > deadline:
                raise ValueError("while a response was kept, no other one was asked for")
            time.sleep(0.02)
        keep(rollouts)

    return keep_later


@contextmanager
def stopped_soon() -> Iterator[None]:
    """A run whose first rank gets SIGTERM after a moment."""
    import torch.distributed as dist

    from nemo_oprd.runtime.signals import Signals

    with Signals():
        if dist.get_rank() == 0:
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGTERM)).start()
        yield


def _carry_out(plan: list[str], made: Any, found: dict[str, Any], root: str) -> None:
    import torch.distributed as dist

    from nemo_oprd.rollout.engine import GenerationCancelled, Request, SamplingParams

    asked, done, step, changed = [Request(prompt) for prompt in PROMPTS], dict[int, Any](), 0, 0
    sampling = SamplingParams(0.9, 1.0, 6, (7, 1, 0))

    def enough() -> bool:
        """Asked for by the last rank alone."""
        return dist.get_rank() == dist.get_world_size() - 1 and len(requests(root)) >= 5

    def keep(rollouts: dict[int, Any]) -> None:
        found["kept"][-1] += [(i, r.response_ids.tolist(), r.logprobs.tolist()) for i, r in rollouts.items()]

    def carry_out(what: str) -> None:
        nonlocal done, step, changed
        kind, _, number = what.partition(" ")
        if kind in ("generate", "cancel", "slow"):
            found["kept"].append([])
        if kind == "load":
            made.load(weights(int(number)).__getitem__, "a test")
        elif kind == "update":
            step, changed = int(number), int(number)
            made.update_weights(lambda: weights(changed).items(), step)
        elif kind == "change":
            changed = int(number)
        elif kind == "stop":
            signals.enter_context(stopped_soon())
        elif kind == "occupy":
            (Path(root) / "memory").touch()
        elif kind == "kill":
            for server in made._mine.servers.values():
                at = str(server.socket)
                os.kill(next(line["pid"] for line in lines(root) if line["server"] == at), signal.SIGKILL)
        elif kind == "cancel":
            try:
                made.generate(asked, sampling, enough, None, keep)
            except GenerationCancelled as cancelled:
                done = cancelled.completed
            found["completed"].append(len(done))
        elif kind == "count":
            with object_bytes() as sent:
                rollouts = made.generate(asked, replace(sampling, max_new_tokens=int(number)))
            found["counted"].append((sum(len(r.response_ids) for r in rollouts), max(sent)))
        elif kind in ("full", "slow"):
            made.generate(asked, sampling, keep=full if kind == "full" else slow(root, keep))
        else:
            rollouts = made.generate(asked, sampling, lambda: False, done, keep, last=number == "last")
            assert [rollout.prompt_ids.tolist() for rollout in rollouts] == PROMPTS
            assert {rollout.weight_versions[:, 0].item() for rollout in rollouts} == {step}
            found["sampled"].append([(r.response_ids.tolist(), r.logprobs.tolist(), r.finish_reason) for r in rollouts])
            found["metrics"].append(dict(made.metrics))

    with ExitStack() as signals:
        for what in plan:
            with timed(found):
                carry_out(what)
