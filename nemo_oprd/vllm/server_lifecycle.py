"""Interface of a vLLM server, a local one that this process starts and restarts, and its command and environment."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nemo_oprd.runtime.messages import ON_STDOUT
from nemo_oprd.runtime.signals import JOB_SIGNALS
from nemo_oprd.vllm.worker import nemo_oprd_guard as guard
from nemo_oprd.vllm.worker.nemo_oprd_files import FOLDER
from nemo_oprd.vllm.worker.nemo_oprd_requests import GENERATION

logger = logging.getLogger(__name__)

WORKER_FOLDER = Path(__file__).parent / "worker"
# variables of this process that would mean something else to the server
_PRIVATE = (
    "PYTORCH_",  # sleep mode has an allocator of its own, which refuses expandable segments
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC"),
    *("PYTHON", "VIRTUAL_ENV", "VLLM_"),
)
_LOG_LINES = 400
_LOG_BYTES = 200_000
# seconds between two reads of a server's files in shared memory
NOTE_EVERY_S = 5.0


class ServerDied(Exception):  # noqa: N818 - not an error of this program
    """Raised if a server is gone, or does not answer. The run restarts its own servers and waits for endpoints."""


class ServerRefused(ValueError):  # noqa: N818 - named like ServerDied
    """Raised if a server does not fit the run, or refuses a request; a retry does not help."""


@dataclass
class Server:
    """One server and its address; `number` is its index among all servers of the run.

    Attributes:
        generation: how often it was started; clients of an earlier process have to connect again.
        pushed: the version of the weights that it has; None before the first ones.
        is_ready: whether this start has passed all checks of the run.
        false_starts: how often in a row it died before it was ready.
        in_flight: requests that it may work on at the same time.
        max_restarts: how often it may die.
        key, role: the group of its settings, and its role, for messages.
        socket: the path of its Unix socket, if it listens on one; `base_url` then names no port.
        headers: of every call but health checks; they hold secrets.
    """

    number: int
    in_flight: int
    max_restarts: int = 0
    generation: int = 0
    pushed: str | None = None
    is_ready: bool = False
    false_starts: int = 0
    base_url: str = "http://localhost"
    socket: Path | None = None
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    key: str = "rollout.vllm"
    role: str = "vLLM server"

    @property
    def name(self) -> str:
        """The name of the server in messages."""
        return f"{self.role} {self.number}"

    def check_alive(self) -> None:
        """Raises ServerDied if the server is known to have ended."""

    def revive(self, why: str) -> None:
        """Restarts the dead server. Raises ServerRefused if it died too often, or twice before it was ready."""
        self.false_starts = 0 if self.is_ready else self.false_starts + 1
        self.is_ready, self.pushed = False, None
        if self.false_starts > 1:
            raise ServerRefused(
                f"{why}; it died twice before it was ready, expected a server that starts: read {self.log_name}"
            )
        self.restart(why)

    def restart(self, why: str) -> None:
        """Starts the server again, or leaves that to its owner. Raises ServerRefused if it died too often."""
        raise NotImplementedError

    @property
    def log_name(self) -> str:
        """The name of the server's log in messages."""
        return "its log"

    def check_deaths(self, why: str, where: str = "") -> None:
        """Raises ServerRefused if no restart is left. `why`: the reason of the last death; `where` ends the message."""
        if self.generation > self.max_restarts:
            said = self.last_words()
            raise ServerRefused(
                f"{self.name} died {self.generation} times, the last time because: {why}{'' if said in why else said}; "
                f"expected at most {self.max_restarts} deaths ({self.key}.max_restarts){where}"
            )

    def close(self) -> None:
        """Ends the server if it belongs to this run."""

    def last_words(self) -> str:
        """Returns the server's last log line for messages; empty if its log is elsewhere."""
        return ""


@dataclass
class LocalServer(Server):
    """A server in a process group of its own on this machine.

    Attributes:
        python: interpreter of vLLM's environment.
        flags: see `common_arguments`.
        devices: CUDA devices that it sees; None: without CUDA.
        log: the file to which it appends its output.
        variables: environment variables in addition to those of all servers.
        directory: a directory of this process, which this user alone can enter, for the server's sockets; the guard
            removes it when this process ends. Its path is short: a socket's path has at most 107 bytes.
    """

    python: Path = Path()
    flags: list[str] = field(default_factory=list)
    devices: tuple[str, ...] | None = None
    log: Path = Path()
    directory: Path = Path()
    variables: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen | None = None
    _shared_memory: set[str] = field(default_factory=set)
    _noted_at: float = -NOTE_EVERY_S

    def start(self) -> None:
        """Starts the server behind a new guard, at a new socket; it answers half a minute to some minutes later."""
        self.generation += 1
        self.socket = self.directory / f"server_{self.number}_{self.generation}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = server_command(self.python, self.flags, ["--uds", str(self.socket)])
        with self.log.open("ab") as log:
            log.write(f"\n--- start {self.generation}: {' '.join(command)}\n".encode())
            log.flush()
            environment = server_environment(self.devices) | {
                guard.SHARED_NAMES: self._shared_names,
                FOLDER: str(self.directory),
                "VLLM_RPC_BASE_PATH": str(self.directory),  # of the sockets between the server's own processes
                GENERATION: str(self.generation),
                **self.variables,
            }
            self._process = guard.start(
                command, self.directory, JOB_SIGNALS, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def _shared_names(self) -> str:
        """The first part of the names of this start's files in shared memory."""
        return f"{self.directory.name}_{self.number}_{self.generation}_"

    def check_alive(self) -> None:
        """Raises ServerDied if the server's guard, and thus the server, has ended; notes the server's mapped files."""
        process = self._process  # another thread may close the server
        if process is None or process.poll() is not None:
            raise ServerDied(f"{self.name} has ended{self.last_words()}")
        self.remember_shared_memory()

    def remember_shared_memory(self) -> None:
        """Notes the server's mapped files, to remove them if the server and its guard are killed.

        It scans all processes of the machine, so it does nothing within some seconds after the last scan.
        """
        process = self._process
        if process is not None and time.monotonic() >= self._noted_at + NOTE_EVERY_S:
            self._noted_at = time.monotonic()
            self._shared_memory |= guard.mapped_shared_memory(guard.group_members(process.pid))

    def restart(self, why: str) -> None:
        """Ends the rest of the server and starts it again, after a pause that doubles with every restart."""
        self.check_deaths(why, f": its log is {self.log}")
        logger.warning(f"{self.name} is restarted ({self.generation} of {self.max_restarts}): {why}", extra=ON_STDOUT)
        self.close()
        time.sleep(min(0.5 * 2 ** (self.generation - 1), 30.0))
        self.start()

    def close(self) -> None:
        """Ends the server and its guard, and removes their shared memory."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the guard has ended already
            process.stdin.write(b"e")
            process.stdin.close()
        try:
            process.wait(timeout=3 * guard.GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # the guard may have been killed
        guard.clean_up(process.pid, self._shared_memory, str(self.directory), self._shared_names)
        self._shared_memory = set()
        if self.socket is not None:
            self.socket.unlink(missing_ok=True)

    @property
    def log_name(self) -> str:
        """The path of the log."""
        return str(self.log)

    def last_words(self) -> str:
        """Returns the last line of the log that names an error, or the last line."""
        return last_words(self.log)


def last_words(log: Path) -> str:
    """Returns the last line since the last start that names an error, or the last line; empty without a log."""
    try:
        with log.open("rb") as file:  # a dying server may write a traceback for each of its requests
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            _, marker, text = file.read().decode(errors="replace").rpartition("\n--- start ")
    except OSError:
        return ""
    said = text.splitlines()[1:] if marker else text.splitlines()  # without the line of the start itself
    lines = [line.strip() for line in said[-_LOG_LINES:] if line.strip()]
    errors = [line for line in lines if "Error" in line and "Engine core" not in line]
    return f"; it said: {(errors or lines or ['nothing'])[-1][:300]}"


def server_command(python: Path, flags: list[str], listen: list[str]) -> list[str]:
    """Returns a server's command. `flags`: see `common_arguments`; `listen`: its address and further middleware."""
    return [str(python), str(WORKER_FOLDER / "nemo_oprd_serve.py"), *flags, *listen]


def server_environment(devices: tuple[str, ...] | None) -> dict[str, str]:
    """Returns a server's environment: this process's, without the variables of this rank and of this interpreter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE)}
    threads = os.environ.get("NEMO_OPRD_VLLM_THREADS", "1")
    kept |= {
        "PYTHONPATH": str(WORKER_FOLDER),
        "VLLM_SERVER_DEV_MODE": "1",  # weight updates, pause and collective calls
        # the processes of a server are on one machine, so their connections to each other need no other address
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_PLUGINS": "",  # plugins of other packages in the environment must not change the sampling
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # vLLM's own key guards sampling alone, and would refuse the calls of a run, which has another key or none
    theirs = {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and name != "VLLM_API_KEY"}
    kept = theirs | kept
    if devices is None:
        kept.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        kept.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        kept |= {"OMP_NUM_THREADS": threads, "TORCH_COMPILE_DISABLE": "1"}  # compiling takes 30 s of the first requests
    else:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        kept.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # `VocabularyMask` has the interface of the first runner
    return kept
