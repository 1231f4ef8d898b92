"""The keys that all vLLM servers of a run have, whatever they do: `rollout.vllm` and `teacher.vllm`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import (
    STRICT,
    FilePath,
    Free,
    Interpreter,
    Learned,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Share,
    Size,
)

# flags of vLLM that no server of a run takes, and why
_LISTENS = "a run alone says where its servers listen and who may call them"
_SHOWS = "the configuration is saved with the run, and all users of a machine see the arguments of its programs"
_NOT_FLAGS = dict.fromkeys(
    ("--host", "--port", "--uds", "--grpc", "--grpc-port", "--api-key", "--middleware", "--root-path"), _LISTENS
)
_NOT_FLAGS |= {"--hf-token": _SHOWS, "--config": "a file could hold any other argument"}


def check_flags(flags: Sequence[str | int | float]) -> None:
    """Raises ValueError for flags that would let others in, or would show a secret to them.

    vLLM takes `_` for `-`, every unambiguous beginning of a flag for the flag, and what follows `=`, `.` or `+` for a
    part of its value; beginnings that it refuses itself are refused here, too.
    """
    for flag in map(str, flags):
        name = re.split(r"[=.+]", flag, maxsplit=1)[0].replace("_", "-")
        meant = next(
            (each for each in _NOT_FLAGS if len(name) > 2 and name[:2] == "--" and each.startswith(name)), None
        )
        if meant is not None:
            short = "" if name == meant else f", which vLLM may read as {meant}"
            raise ValueError(
                f"{{key}}.flags holds {name}{short}, but {_NOT_FLAGS[meant]}; expected other arguments of vLLM: remove "
                "it (docs/security.md)"
            )


@dataclass(config=STRICT)
class ServerConfig:
    """vLLM servers that a run starts, watches and ends, or that somebody else runs."""

    python: Free[Interpreter | None] = None
    """interpreter of vLLM's environment; null: the project's `.venv-vllm`"""
    endpoints: Free[list[str]] = field(default_factory=list)
    """addresses of servers that somebody else runs

    Without any, the run starts `replicas` servers of `tensor` workers each. `http://HOST:PORT`, `https://HOST:PORT`
    or `unix:///PATH`.
    """
    token_file: Free[FilePath | None] = None
    """file of mode 0600 with the token of the servers at `endpoints` (docs/security.md)

    `nemo-oprd serve --token-file FILE` makes one. Its first line is sent.
    """
    placement: Free[Literal["colocated", "dedicated"]] = "colocated"
    """servers on the student's machines and GPUs, or on the last ranks of the job

    These last replicas * tensor ranks, of several teachers so many for each, hold servers and nothing else.
    """
    replicas: Free[Size | None] = None
    """number of servers; null: all of the student's GPUs, or one

    One without GPUs, and with `placement: dedicated`.
    """
    tensor: Free[Size] = 1
    """workers (tensor-parallel ranks) of a server"""
    gpu_memory_utilization: Free[Literal["auto"] | Share] = "auto"
    """fraction of a GPU's memory that a server takes; auto: 0.4 beside the student, 0.9 of a GPU of its own

    Servers of several teachers beside the student divide the 0.4 of auto.
    """
    flags: Learned[list[str | int | float]] = field(default_factory=list)
    """further arguments of a server"""
    start_timeout: Free[PositiveFloat] = 900.0
    """seconds until a server must be ready"""
    request_timeout: Free[PositiveFloat] = 7200.0
    """seconds until a request must be answered"""
    max_restarts: Free[NonNegativeInt] = 10
    """restarts of one server before the run ends"""

    @model_validator(mode="after")
    def _check(self) -> ServerConfig:
        check_flags(self.flags)
        if self.endpoints and (self.replicas is not None or self.placement == "dedicated"):
            raise ValueError(  # {key}: rollout.vllm or teacher.vllm
                f"{{key}}.endpoints={self.endpoints} with replicas={self.replicas} and placement="
                f"{self.placement}: expected either servers that are there or servers that this run starts; leave one "
                "of the two out"
            )
        return self

    @property
    def memory_share(self) -> float:
        """The fraction of a GPU's memory that a server takes."""
        if self.gpu_memory_utilization != "auto":
            return self.gpu_memory_utilization
        return 0.4 if self.placement == "colocated" else 0.9


@dataclass(config=STRICT)
class TeacherServerConfig(ServerConfig):
    """The servers of `teacher.engine=vllm` (docs/teacher_placement.md)."""

    check_every: Free[NonNegativeInt] = 50
    """steps after which every server shows its states of the canary again; 0: at starts only (docs/canary.md)"""
    ahead_gib: Free[NonNegativeFloat] = 0.0
    """GiB of shared memory on a machine for states that are asked for as responses finish; 0: none"""
