"""`serve`: a vLLM server for the student of a configuration, in the foreground, for `rollout.vllm.endpoints`."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

from nemo_oprd.commands.options import add_config, config_of
from nemo_oprd.rollout.vllm.launch import check_head_size, check_model, find_python, server_arguments
from nemo_oprd.rollout.vllm.server import server_command, server_environment
from nemo_oprd.setup.resolve import resolve_model, servers_limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")


def run(options: argparse.Namespace) -> NoReturn:
    """Replaces this process by the server; returns only by an error.

    The server has no weights until a run pushes some. Its calls need no authentication: whoever reaches `--host` and
    `--port` can change the weights, so `--host` should be 127.0.0.1 or an address of a private network.

    Raises:
        ValueError: the model or vLLM's environment is wrong.
    """
    config = config_of(options)
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
    os.execve(python, server_command(python, arguments, options.host, options.port), server_environment(devices))
