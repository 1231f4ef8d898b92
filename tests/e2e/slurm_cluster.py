"""A real Slurm cluster on loopback, for one test session: munged, slurmctld and a slurmd per node. Ten nodes are in the
partition `test`; the two of the partition `gpu` have eight GPUs each, which are empty files.

Runs as root (slurmd wants it); everything lives in a temporary directory and ends with `stop()`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from default_signals import default_signals

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
NODES = tuple(f"n{number}" for number in range(10))
GPU_NODES = ("g0", "g1")
GPUS_PER_NODE = 8
# what a job gets that asks for no memory, and what a node has
DEFAULT_MEMORY_MB, MEMORY_MB = 512, 4096


def missing() -> str | None:
    """Why no cluster can be started here, None if one can."""
    absent = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)} not found)"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return None


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class SlurmCluster:
    """Starts on construction; `environment` is what sbatch needs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._daemons: list[subprocess.Popen] = []
        host = socket.gethostname()
        controller, *ports = _free_ports(1 + len(NODES) + len(GPU_NODES))
        for name in ("state", "munge", "devices", *(f"spool-{node}" for node in (*NODES, *GPU_NODES))):
            (directory / name).mkdir(parents=True, mode=0o755)
        for number in range(GPUS_PER_NODE):
            (directory / "devices" / f"gpu{number}").touch()
        key, munge_socket = directory / "munge" / "key", directory / "munge" / "socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        lines = [
            "ClusterName=loopback",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge_socket}",
            f"StateSaveLocation={directory / 'state'}",
            f"SlurmdSpoolDir={directory}/spool-%n",
            f"SlurmctldPidFile={directory}/ctld.pid",
            f"SlurmdPidFile={directory}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/cons_tres",
            "MpiDefault=none",
            "ReturnToService=2",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1",  # a minute by default
            "GresTypes=gpu",
            "SlurmdParameters=config_overrides",  # more CPUs than the machine has
            f"DefMemPerNode={DEFAULT_MEMORY_MB}",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} State=UNKNOWN "
                + (f"CPUs=16 Gres=gpu:{GPUS_PER_NODE}" if node in GPU_NODES else "CPUs=1")
                + f" RealMemory={MEMORY_MB}"
                for node, port in zip((*NODES, *GPU_NODES), ports, strict=True)
            ),
            f"PartitionName=test Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP",
            f"PartitionName=gpu Nodes={','.join(GPU_NODES)} MaxTime=INFINITE State=UP",
        ]
        configuration = directory / "slurm.conf"
        configuration.write_text("\n".join(lines) + "\n")
        devices = f"{directory}/devices/gpu[0-{GPUS_PER_NODE - 1}]"
        (directory / "gres.conf").write_text(f"NodeName={','.join(GPU_NODES)} Name=gpu File={devices}\n")
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(configuration)}
        files = {"pid-file": "pid", "log-file": "log", "seed-file": "seed", "key-file": "key", "socket": "socket"}
        options = [f"--{option}={directory / 'munge' / name}" for option, name in files.items()]
        self._start(["munged", "--foreground", "--force", *options])
        self._wait(munge_socket.exists, "munged's socket")
        self._start(["slurmctld", "-D", "-f", str(configuration)])
        for node in (*NODES, *GPU_NODES):
            self._start(["slurmd", "-D", "-f", str(configuration), "-N", node])
        self._wait(lambda: self.idle((*NODES, *GPU_NODES)), "idle nodes")

    def run(
        self, command: list[str], environment: dict[str, str] | None = None, **kwargs
    ) -> subprocess.CompletedProcess[str]:
        """A Slurm command against this cluster, with more in its environment."""
        together = {**self.environment, **(environment or {})}
        return subprocess.run(command, env=together, capture_output=True, text=True, timeout=60, **kwargs)

    def wait_for_job(self, job: str, timeout: float) -> str:
        """The final state of a job, e.g. COMPLETED."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            shown = self.run(["scontrol", "show", "job", job]).stdout
            state = next((w.split("=")[1] for w in shown.split() if w.startswith("JobState=")), "GONE")
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return state
            time.sleep(0.3)
        self.run(["scancel", job])
        return "TIMEOUT"

    def stop(self) -> None:
        """Ends all daemons."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def _start(self, command: list[str]) -> None:
        log = (self.directory / f"{command[0]}-{len(self._daemons)}.log").open("w")
        settings: dict[str, Any] = {"env": self.environment, "stdout": log, "stderr": log}
        self._daemons.append(subprocess.Popen(command, preexec_fn=default_signals, **settings))  # jobs inherit it

    def idle(self, nodes: tuple[str, ...] = NODES) -> bool:
        """Whether nothing runs on any of the nodes."""
        states = self.run(["sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%T"]).stdout.split()
        return states == ["idle"] * len(nodes)

    def _wait(self, ready, what: str, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{f.name}: {f.read_text()[-600:]}" for f in self.directory.glob("*.log"))
                self.stop()
                raise TimeoutError(f"no {what} within {timeout} s\n{logs}")
            time.sleep(0.3)
