"""The client process of a controller: talks to its servers, and reads and checks what they answer.

`python -m nemo_oprd.rollout.vllm.client_main DESCRIPTOR`: of a socket to the controller (`client_process.py`). It is a
process of its own because reading the answers of a step takes seconds to minutes of Python, which would hold up the
trainer's rank. It imports neither torch nor Megatron, and ends when the controller ends, however that happens.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.rollout.response import Response
from nemo_oprd.rollout.vllm.answers import AnswerCheck
from nemo_oprd.rollout.vllm.channel import Channel
from nemo_oprd.rollout.vllm.client import Client
from nemo_oprd.rollout.vllm.sampling import Claimed, Sampling
from nemo_oprd.rollout.vllm.segments import SegmentWriter
from nemo_oprd.rollout.vllm.server import Server, last_words

_PR_SET_PDEATHSIG = 1


@dataclass
class OthersServer(Server):
    """A server that the controller has started, or has an address of.

    Attributes:
        label: its name for messages.
        log: its log, if it is on this machine.
    """

    label: str = ""
    log: Path | None = None

    def __post_init__(self) -> None:
        """Paths come as text."""
        self.socket = None if self.socket is None else Path(self.socket)
        self.log = None if self.log is None else Path(self.log)

    @property
    def name(self) -> str:
        """For messages."""
        return self.label

    def last_words(self) -> str:
        """The last line of its log that names an error."""
        return "" if self.log is None else last_words(self.log)


class ClientMain:
    """Does what the controller asks for. Everything but `take` runs in the thread of the client's event loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._client = channel, Client()
        self._round: Sampling | None = None
        self._claims: dict[int, asyncio.Future[Claimed | None]] = {}
        self._claim_count = 0

    def take(self, message: dict[str, Any]) -> None:
        """Takes a message of the controller: sample, claimed, died or stop."""
        if message["kind"] == "sample":
            self._client.start(self._sample(message))
        else:
            self._client.call(lambda: getattr(self, f"_{message['kind']}")(message))

    async def _sample(self, message: dict[str, Any]) -> None:
        """One round, of which the controller hears response by response, and at the end how it went."""
        writer = SegmentWriter(lambda file: self._channel.send({"kind": "segment"}, file))

        def deliver(index: int, response: Response, server: int) -> None:
            assert response.logprobs is not None
            segment, offset = writer.write(response.ids, response.logprobs)
            place = {"segment": segment, "offset": offset, "tokens": len(response.ids)}
            about = {"index": index, "finished": response.finished, "server": server}
            self._channel.send({"kind": "response", **about, **place})

        check = AnswerCheck(message["version"], message["known_ids"])
        work = Sampling(self._client, check, message["timeout_s"], self._claim, message["slots"], deliver)
        self._round = work
        try:
            await work.run([OthersServer(**server) for server in message["servers"]])
            self._channel.send({"kind": "over", "died": [*work.died.items()], "error": work.error,
                                "busy_s": [*work.busy_s.items()]})  # fmt: skip
        except BaseException:
            self._channel.send({"kind": "failed", "traceback": traceback.format_exc()})
            raise
        finally:
            self._round = None
            writer.close()

    def _claim(self) -> asyncio.Future[Claimed | None]:
        """Asks the controller for the next request."""
        self._claim_count += 1
        future = self._claims[self._claim_count] = asyncio.get_running_loop().create_future()
        self._channel.send({"kind": "claim", "number": self._claim_count})
        return future

    def _claimed(self, message: dict[str, Any]) -> None:
        """What the controller gives for a claim, which its server may not have lived to see."""
        future, index = self._claims.pop(message["number"]), message["index"]
        claimed = None if index is None else (index, message["body"])
        if not future.cancelled():
            future.set_result(claimed)
        elif claimed is not None and self._round is not None:
            self._round.give_back(claimed)

    def _died(self, message: dict[str, Any]) -> None:
        if self._round is not None:
            self._round.note_death(message["server"], message["why"])

    def _stop(self, _: dict[str, Any]) -> None:
        if self._round is not None:
            self._round.stopped.set()


def _end_with_parent(parent: int) -> None:
    """Lets the kernel end this process when its parent has ended; the end of the channel says the same."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """See the module's docstring."""
    descriptor, parent = map(int, sys.argv[1:])
    _end_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the controller decides when the run ends
    channel = Channel(socket.socket(fileno=descriptor))
    process = ClientMain(channel)
    while (message := channel.receive()) is not None:
        process.take(message)
    os._exit(0)  # whatever the servers still answer, nobody waits for it


if __name__ == "__main__":
    main()
