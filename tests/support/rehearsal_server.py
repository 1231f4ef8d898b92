"""Rehearses many ranks for the price of one import of torch and Megatron.

`python -m tests.support.rehearsal_server` reads tasks of `rank.py`, one per line. Each runs in a child that is forked
off this process, which has imported what a rehearsal needs and has rehearsed nothing itself; a line on stdout says that
the task has ended. `Rehearsals` starts such a process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.config.loading import load_config
from nemo_oprd.run.resolve import resolve
from nemo_oprd.tools.plan.estimate import Lengths, estimate
from nemo_oprd.tools.plan.gpus import GPUS, Cluster
from nemo_oprd.tools.rehearse import disagreements, rank, ranks_of_interest, report, shim

# what a rehearsed rank imports once torch.cuda was replaced
PRELOADED = (
    "nemo_oprd.train",
    "nemo_oprd.megatron.weights.megatron_checkpoint",
    "nemo_oprd.tools.rehearse.phases",
    "nemo_oprd.tools.rehearse.stand_ins",
    "nemo_oprd.tools.rehearse.host_values",
    "nemo_oprd.tools.rehearse.recorder",
    "nemo_oprd.tools.rehearse.fake_cuda",
    "nemo_oprd.tools.rehearse.stand_ins",
    "nemo_oprd.tools.rehearse.device_kernels",
)
GPU = "h100"


@dataclass(frozen=True)
class Rehearsed:
    """What the rehearsals of some ranks of one run say: parts of the command's JSON, and what each process saw."""

    reports: list[dict[str, Any]]
    disagreements: list[str]
    found: dict[int, dict[str, Any]]

    @property
    def mistakes(self) -> list[dict[str, Any]]:
        """Those of all ranks."""
        return [mistake for one in self.reports for mistake in one["mistakes"]]


class Rehearsals:
    """A process that rehearses one rank after the other."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def close(self) -> None:
        """Ends the process."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def __enter__(self) -> Rehearsals:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def layout(
        self,
        config_name: str,
        overrides: list[str],
        ranks: int,
        *,
        prompt: int,
        response: int,
        only: Sequence[int] | None = None,
        ends_only: bool = False,
        load: str = "balanced",
    ) -> Rehearsed:
        """Rehearses the ranks of interest of a run, or those in `only`; every response has the run's longest length.

        Args:
            ends_only: of the ranks of interest the first and the last one.
            load: how tokens spread over experts.
        """
        overrides = [*overrides, f"rollout.max_new_tokens={response}"]
        run_spec = resolve(load_config(config_name, overrides), ranks)
        planned = estimate(run_spec, Cluster(ranks, GPUS[GPU], 8, "local"), Lengths(prompt, response))
        task = {
            "ranks": ranks,
            "gpu_bytes": int(GPUS[GPU].memory),
            "gpus_per_node": 8,
            "config_name": config_name,
            "config_dir": None,
            "overrides": overrides,
            "prompt_tokens": prompt,
            "response_tokens": response,
            "experts_load": load,
            "layers": "local",
            "phases": [],
        }
        chosen = list(only or ranks_of_interest(run_spec, planned))
        if ends_only:
            chosen = sorted({chosen[0], chosen[-1]})
        found = {one: self.rank(task | {"rank": one}) for one in chosen}
        reports = [report(one, run_spec, planned, seen) for one, seen in found.items()]
        return Rehearsed(reports, disagreements(found), found)

    def rank(self, task: dict[str, Any]) -> dict[str, Any]:
        """What the process of one rank saw, with its largest host memory in `host_bytes`.

        Raises:
            ValueError: the rank's process refused the configuration.
        """
        server = self._server
        assert server.stdin is not None and server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            server.stdin.write(json.dumps(task | {"result": str(result)}) + "\n")
            server.stdin.flush()
            said = server.stdout.readline()
            assert result.is_file(), f"rank {task['rank']} ended without a result; the server said {said!r}"
            found: dict[str, Any] = json.loads(result.read_text()) | json.loads(said)
        if "error" in found:
            raise ValueError(found["error"])
        return found


def serve() -> None:
    """See the module's docstring."""
    shim.load()
    import torch
    import torch.nn.attention.bias  # before the functions of torch.cuda are replaced

    from nemo_oprd.tools.rehearse import fake_cuda

    torch.set_num_threads(1)
    # each child does it again, with a memory of its own
    fake_cuda.install(0, live=lambda: 0, peak=lambda: 0, wait=lambda what: None)
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        started = time.monotonic()
        child = os.fork()
        if not child:
            sys.stdout = sys.stderr  # the answers are this process's
            rank.carry_out(json.loads(line))
        _, _, used = os.wait4(child, 0)
        seconds = round(time.monotonic() - started, 1)
        said = {"host_bytes": used.ru_maxrss * 1024, "cpu_seconds": round(used.ru_utime + used.ru_stime, 1)}
        print(json.dumps(said | {"seconds": seconds}), flush=True)


if __name__ == "__main__":
    serve()
