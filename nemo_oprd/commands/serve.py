"""`serve`: runs a vLLM server in the foreground, for the student (`rollout.vllm`) or a teacher (`teacher.vllm`)."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from nemo_oprd.commands.options import add_config, config_of
from nemo_oprd.config.schema import Config
from nemo_oprd.run.resolve import resolve_model, resolve_served, servers_ids
from nemo_oprd.runtime.gpus import check_promise
from nemo_oprd.runtime.signals import END_SIGNALS, JOB_SIGNALS
from nemo_oprd.vllm.endpoint import MOST_SOCKET_BYTES
from nemo_oprd.vllm.launch import (
    DTYPES,
    TEACHER_KEY,
    TEACHER_VARIABLES,
    check_head_size,
    check_model,
    find_python,
    student_arguments,
    teacher_arguments,
)
from nemo_oprd.vllm.server_lifecycle import server_command, server_environment
from nemo_oprd.vllm.worker.nemo_oprd_middleware import TOKEN_FILE, read_tokens

# a teacher's server puts the id of its start into each answer
_GENERATION_BITS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--role",
        choices=("student", "teacher"),
        default="student",
        help="student: one run at a time samples, and pushes weights; teacher: any number of runs ask for states "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--teacher", type=int, default=0, metavar="N", help="of several teachers, which one, from 0 (default: 0)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--uds", type=Path, metavar="PATH", help="listen on a Unix socket instead")
    parser.add_argument(
        "--token-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="file of mode 0600 with the token that callers need (docs/security.md); made if there is none",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the server. A student's replaces this process; for a teacher's, returns 0 after a signal, else 1.

    Every request but /health needs a token of `--token-file`. A student's server has no weights until a run transfers
    some, and the first run that connects owns the server until that run ends. A teacher's server refuses every request
    that would change it, so several runs can share it.

    Raises:
        ValueError: the model, vLLM's environment, the token file or the path of the socket is wrong.
    """
    config = config_of(options)
    listen = ["--host", options.host, "--port", str(options.port)]
    if options.uds is not None:
        listen = ["--uds", str(_socket_path(options.uds))]
    if options.role == "student":
        _serve_student(config, options, listen)
    return _serve_teacher(config, options, listen)


def _serve_student(config: Config, options: argparse.Namespace, listen: list[str]) -> NoReturn:
    """Replaces this process with the server; returns only by raising an error."""
    student = resolve_model(config.student, "student")
    spec = student.spec
    check_model(config.rollout.vllm.tensor, spec)
    python = find_python(config.rollout.vllm)
    devices = _devices(config.rollout.vllm.tensor)  # after the checks that need no torch
    if devices is None:
        check_head_size(spec)
    cuda, sampled = devices is not None, servers_ids(config, student)
    arguments = student_arguments(config, spec, student.directory, sampled, cuda=cuda)
    token_file = _token_file(options.token_file)
    command = server_command(python, arguments, [*listen, "--middleware", "nemo_oprd_middleware.Middleware"])
    os.umask(0o077)  # only this user may access the socket and the files that vLLM writes
    os.execve(python, command, server_environment(devices) | {TOKEN_FILE: str(token_file)})


def _serve_teacher(config: Config, options: argparse.Namespace, listen: list[str]) -> int:
    """Runs the server under a guard, which ends it and removes its folder in shared memory when this process ends."""
    python = find_python(config.teacher.vllm, TEACHER_KEY)
    if options.teacher not in config.served_teachers:
        raise ValueError(
            f"--teacher {options.teacher}: the teachers with engine=vllm are {config.served_teachers or 'none'}, "
            f"counted from 0, of {len(config.teacher_sources)}; expected one of them: give its number, or set "
            "teacher.engine=vllm"
        )
    teacher = resolve_served(config, options.teacher)
    devices = _devices(config.teacher.vllm.tensor)
    from nemo_oprd.vllm.teacher_canary import Canary
    from nemo_oprd.vllm.teacher_servers import longest_sequence
    from nemo_oprd.vllm.transport import SharedFolder
    from nemo_oprd.vllm.worker import nemo_oprd_guard as guard
    from nemo_oprd.vllm.worker.nemo_oprd_files import FOLDER
    from nemo_oprd.vllm.worker.nemo_oprd_requests import GENERATION

    longest = longest_sequence(config, Canary(teacher.spec, teacher.directory, DTYPES[config.precision], None))
    arguments = teacher_arguments(config, teacher.directory, longest, cuda=devices is not None)
    token_file = _token_file(options.token_file, TEACHER_KEY)
    command = server_command(
        python, arguments, [*listen, "--middleware", "nemo_oprd_teacher_middleware.TeacherMiddleware"]
    )
    with closing(SharedFolder()) as folder:
        environment = server_environment(devices) | {
            TOKEN_FILE: str(token_file),
            FOLDER: str(folder.path),
            "VLLM_RPC_BASE_PATH": str(folder.path),
            GENERATION: str(secrets.randbits(_GENERATION_BITS)),
            guard.SHARED_NAMES: f"{folder.path.name}_server_",
            **TEACHER_VARIABLES,
        }
        process = guard.start(command, folder.path, JOB_SIGNALS, env=environment)
        assert process.stdin is not None
        for number in END_SIGNALS:
            signal.signal(number, lambda *_: process.stdin and process.stdin.close())
        process.wait()
        was_asked = process.stdin.closed
        process.stdin.close()
    return 0 if was_asked else 1


def _devices(tensor: int) -> tuple[str, ...] | None:
    """Returns all devices in CUDA_VISIBLE_DEVICES, or the first `tensor` ones if it is unset; None without CUDA."""
    check_promise()
    import torch

    if not torch.cuda.is_available():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(visible.split(",")) if visible else tuple(map(str, range(tensor)))


def _token_file(path: Path, key: str = "rollout.vllm") -> Path:
    """Returns the server's token file and prints its path; creates it with a fresh token if it is missing."""
    path, made = path.expanduser().absolute(), ""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise ValueError(f"--token-file {path} can't be made ({error.strerror}); choose another place") from None
    else:
        made = ", made now"
        with open(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    try:
        read_tokens(str(path))
    except ValueError as error:
        raise ValueError(f"--token-file {error}") from None
    print(f"token file{made}: {path}; runs need {key}.token_file={path}", flush=True)
    return path


def _socket_path(path: Path) -> Path:
    """Returns the absolute path of a Unix socket to create; raises ValueError if it cannot be created."""
    path = path.expanduser().absolute()
    if len(os.fsencode(path)) > MOST_SOCKET_BYTES:
        raise ValueError(
            f"--uds {path} has {len(os.fsencode(path))} bytes, expected at most {MOST_SOCKET_BYTES}, as for any Unix "
            "socket: choose a shorter path"
        )
    if path.is_socket() or path.exists() or not path.parent.is_dir():
        what = "exists" if path.parent.is_dir() else "is in no directory"
        raise ValueError(f"--uds {path} {what}; expected a new name in a directory: choose another path")
    return path
