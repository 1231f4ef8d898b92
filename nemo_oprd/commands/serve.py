"""`serve`: a vLLM server for the student of a configuration, in the foreground, for `rollout.vllm.endpoints`."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path
from typing import NoReturn

from nemo_oprd.commands.options import add_config, config_of
from nemo_oprd.rollout.vllm.launch import check_flags, check_head_size, check_model, find_python, server_arguments
from nemo_oprd.rollout.vllm.server import server_command, server_environment
from nemo_oprd.rollout.vllm.worker.nemo_oprd_door import TOKEN_FILE, read_tokens
from nemo_oprd.setup.resolve import resolve_model, servers_limit

# of the path of a Unix socket on Linux
MOST_SOCKET_BYTES = 107


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
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


def run(options: argparse.Namespace) -> NoReturn:
    """Replaces this process by the server; returns only by an error.

    The server has no weights until a run pushes some. Every call but /health needs a token of `--token-file`, and the
    first run that calls has the server for itself until it ends.

    Raises:
        ValueError: the model, vLLM's environment, the token file or the path of the socket is wrong.
    """
    config = config_of(options)
    check_flags(config.rollout.vllm)
    listen = ["--host", options.host, "--port", str(options.port)]
    if options.uds is not None:
        listen = ["--uds", str(_socket_path(options.uds))]
    student = resolve_model(config.student, "student")
    spec = student.spec
    check_model(config.rollout.vllm.tensor, spec)
    python = find_python(config.rollout.vllm)
    import torch  # after the checks that need none of it

    cuda = torch.cuda.is_available()
    if not cuda:
        check_head_size(spec)
    arguments = server_arguments(config, spec, student.directory, servers_limit(config, student), cuda=cuda)
    devices = None
    if cuda:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = tuple(visible.split(",")) if visible else tuple(map(str, range(config.rollout.vllm.tensor)))
    token_file = _token_file(options.token_file)
    command = server_command(python, arguments, [*listen, "--middleware", "nemo_oprd_door.Door"])
    os.umask(0o077)  # the socket, and what vLLM writes, are for this user alone
    os.execve(python, command, server_environment(devices) | {TOKEN_FILE: str(token_file)})


def _token_file(path: Path) -> Path:
    """The file with the tokens of the server, which is made with a fresh one if there is none; says where it is."""
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
    print(f"token file{made}: {path}; runs need rollout.vllm.token_file={path}", flush=True)
    return path


def _socket_path(path: Path) -> Path:
    """The absolute path of a Unix socket to make; ValueError if that is impossible."""
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
