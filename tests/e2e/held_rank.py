"""The command line, for test_slurm.py. Responses have all tokens that they may have, as if there were no stop ids. Each
rank notes the size of every batch that it has sampled. In a job's first start it holds batch BATCH (from 1; 0: none)
after `HELD_AFTER` tokens, until it is asked to stop, or forgotten by a failed test.

python held_rank.py DIRECTORY BATCH train ...
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from nemo_oprd.cli import main
from nemo_oprd.rollout import decoding as generation
from nemo_oprd.rollout import in_process_engine as megatron_engine

HELD_AFTER = 100
PATIENCE_S = 300
directory, held_batch = Path(sys.argv[1]), int(sys.argv[2])
start, rank = int(os.environ.get("SLURM_RESTART_COUNT", "0")), os.environ["RANK"]
generate, decode = megatron_engine.generate_batch, generation._Batch.decode
begun = 0


def noting(*args: Any, **options: Any) -> Any:
    """In place of `generate_batch`."""
    global begun
    begun += 1
    responses = generate(*args, **{**options, "eos_ids": ()})
    with (directory / f"batches-{start}-{rank}").open("a") as notes:
        notes.write("cancelled\n" if responses is None else f"{len(responses)}\n")
    return responses


def holding(batch: generation._Batch, token: Any, t: int) -> Any:
    """In place of `_Batch.decode`."""
    if (start, begun, t) == (0, held_batch, HELD_AFTER):
        (directory / f"held-{rank}").touch()
        signals = signal.getsignal(signal.SIGUSR1).__self__  # type: ignore[union-attr]
        deadline = time.monotonic() + PATIENCE_S
        while signals.received is None and time.monotonic() < deadline:
            time.sleep(0.01)
    return decode(batch, token, t)


megatron_engine.generate_batch = noting
generation._Batch.decode = holding  # type: ignore[method-assign]
del sys.argv[1:3]
main()
