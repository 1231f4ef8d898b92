"""Servers of a teacher that others run (`teacher.vllm.endpoints`), which several runs may use at the same time.

`nemo-oprd serve --role teacher` starts them. States come back as HTTP answers, through the middleware in
`vllm/worker/nemo_oprd_teacher_middleware.py`, so a server may be on any machine. A server that was started anew has
another
generation: it counts as dead, and has to pass the canary before the next request.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.config.schema import Config
from nemo_oprd.vllm.client import CALL_TIMEOUT_S, Client
from nemo_oprd.vllm.endpoint import Endpoint, guest
from nemo_oprd.vllm.server import Server, ServerDied
from nemo_oprd.vllm.teacher_launch import KEY, MAX_SEQUENCES
from nemo_oprd.vllm.teacher_requests import Answer, Request
from nemo_oprd.vllm.worker.nemo_oprd_requests import ROOM, STATES, read_answer

logger = logging.getLogger(__name__)

# the share of a machine's free memory that the answers of its ranks may take
HOST_SHARE = 0.25


def shared_endpoint(config: Config, number: int, url: str) -> Endpoint:
    """Makes the client side of a server at `url`, without a lease.

    Raises:
        ValueError: the token file holds no token.
    """
    settings = config.teacher.vllm
    return Endpoint(
        number,
        MAX_SEQUENCES,
        settings.max_restarts,
        generation=1,
        key=KEY,
        role="the teacher's vLLM server",
        url=url,
        headers=guest(str(settings.token_file), config.output),
    )


@dataclass(frozen=True)
class AnswerBodies:
    """Parses the answers in HTTP bodies; a `Reader` of `Sampling`.

    Attributes:
        requests: those under way, by index.
        width, dtype: of the teacher's states.
        generations: server's name -> the generation that has passed the canary.
        sizes: bytes of the answers, by index.
    """

    requests: Mapping[int, Request]
    width: int
    dtype: str
    generations: Mapping[str, int]
    sizes: Mapping[int, int]

    def path_of(self, index: int) -> str:
        """Returns the path of a request."""
        return f"{STATES}/{self.requests[index].ask.name}?bytes={self.sizes[index]}"

    def read(self, index: int, answer: bytes, most: int, server: str) -> Answer:
        """See `Reader`."""
        request = self.requests[index]
        header, values = read_answer(io.BytesIO(answer), len(answer), f"what {server} sent")
        known = self.generations[server]
        if "error" not in header and header.get("generation") != known:
            raise ServerDied(f"{server} was started anew")
        expected = request.ask.header(request.ids, self.width, self.dtype, known)
        return request.read(header, values, server, expected)


def server_room(client: Client, server: Server) -> int:
    """Reads how many bytes of answers a server can hold; raises ServerDied or ServerRefused as `Client.post`."""
    return int(client.run(client.post(server, ROOM, timeout=CALL_TIMEOUT_S, read=int)))


def host_room(ranks: int) -> int:
    """Computes how many bytes of answers one of `ranks` ranks of this machine may hold."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free: dict[str, Any] = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
    return int(int(free["MemAvailable"]) * 1024 * HOST_SHARE) // ranks
