"""What the ranks tell each other of a teacher's servers once these have proven themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nemo_oprd.models.megatron.parallel import everyones
from nemo_oprd.rollout.vllm.server import Server
from nemo_oprd.teacher_servers.launch import KEY, MAX_SEQUENCES


@dataclass
class KnownServers:
    """Of the servers that this rank asks.

    Attributes:
        generations: server's name -> which start of it has proven itself; an answer names the start that it is from.
        rooms: server's number -> bytes of answers that it holds at a time; of servers elsewhere.
    """

    generations: dict[str, int] = field(default_factory=dict)
    rooms: dict[int, int] = field(default_factory=dict)

    def share(self, own: dict[int, Server], servers: dict[int, Server], mine: set[int], *, elsewhere: bool) -> None:
        """Tells all ranks of `own` servers, and learns of those that other ranks start or prove. Every rank calls this.

        Args:
            own: this rank's servers, by number.
            servers: those that this rank asks; servers of its machine are added.
            mine: the numbers of all servers that this rank asks.
            elsewhere: whether somebody else runs all servers, so that every rank knows their addresses.
        """
        told = {
            number: (self.generations.get(server.name, 0), self.rooms.get(number, 0), str(server.socket))
            for number, server in own.items()
        }
        for number, (generation, room, at) in ((n, facts) for part in everyones(told) for n, facts in part.items()):
            if number in own or number not in mine:
                continue
            server = servers.setdefault(number, _neighbour(number))
            if not elsewhere:
                server.socket = Path(at)
            self.generations[server.name], self.rooms[number] = generation, room


def _neighbour(number: int) -> Server:
    """A server that another rank of this machine has started."""
    return Server(number, MAX_SEQUENCES, key=KEY, role="the teacher's vLLM server")
