"""`serve`: a vLLM server for the student of a configuration, in the foreground, for `rollout.vllm.endpoints`."""

from __future__ import annotations

import os

from nemo_oprd.config.schema import Config
from nemo_oprd.models import read_model_spec
from nemo_oprd.rollout.vllm.launch import check_head_size, check_model, find_python, server_arguments
from nemo_oprd.rollout.vllm.server import WORKER_FOLDER, server_environment
from nemo_oprd.setup.preflight import known_ids, model_directory


def serve(config: Config, host: str, port: int) -> None:
    """Replaces this process by the server; returns only by an error.

    The server has no weights until a run pushes some. Its calls need no authentication: whoever reaches `host` and
    `port` can change the weights, so `host` should be 127.0.0.1 or an address of a private network.

    Raises:
        ValueError: the model or vLLM's environment is wrong.
    """
    directory = model_directory(config.student)
    spec = read_model_spec(directory)
    check_model(config, spec)
    python = find_python(config)
    import torch  # after the checks that need none of it

    cuda = torch.cuda.is_available()
    if not cuda:
        check_head_size(spec)
    arguments = server_arguments(config, spec, directory, known_ids(config), cuda=cuda)
    devices = None
    if cuda:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = tuple(visible.split(",")) if visible else tuple(map(str, range(config.rollout.vllm.tensor)))
    command = [str(python), str(WORKER_FOLDER / "nemo_oprd_serve.py"), *arguments, "--host", host, "--port", str(port)]
    os.execve(python, command, server_environment(devices))
