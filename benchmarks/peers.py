"""Compares CPU seconds and memory of whole updates with TRL's `DistillationTrainer` and with a plain loop.

    python -m benchmarks.peers [--json FILE] [--peers trl,plain] [--full] [--quick]

Every product makes the same update: the same float32 weights and tokens, AdamW over as many parameters, one norm
clipped. It is checked: losses and gradient norms of all updates must agree (`TOLERANCE`), or the benchmark ends with an
error. An update is a forward pass of the teacher, forward and backward passes of the student, and the optimizer's step;
nothing is sampled, except in the rows of sampling.

Each measurement is a process of its own, whose first update warms up. The products take turns, in another order each
time, and nothing else is measured meanwhile. CPU seconds are those of the process and its ended children (`getrusage`),
summed over ranks; the peak of memory is `ru_maxrss`, summed over ranks, start included. A ratio is the peer's median
over ours; its spread is from the least to the most ratio of one turn. TRL needs scripts/setup_peers.sh.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peer_parts.cases import CASES, FULL, OURS, PLAIN, PRODUCTS, TRL, Case, tiny

ROOT = Path(__file__).parent.parent
TRL_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
# largest relative difference between the products' losses, and between their gradient norms, in every update: float32
# sums in another order, before and after the weights have changed. Another loss, mask, mean or learning rate differs by
# more: with random weights, one update changes the loss itself by some thousandths.
TOLERANCE = 1e-4
TIMEOUT_S = 1800
COLUMNS = ("cpu_seconds", "wall_seconds", "peak_rss_mb")
HEAD = "| task | batch | peer | CPU s: ours | peer | ratio (spread) | peak MB: ours | peer |\n" + "|---" * 8 + "|"
STARTS = {"ready": "start to ready", "first": "start to the first update"}


class MismatchError(Exception):
    """Two products did not compute the same."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= {TRL, PLAIN}:
            raise argparse.ArgumentTypeError(f"{text}: expected {TRL}, {PLAIN}, or both with a comma")
        return found

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text}: expected a number of 1 or more")
        return int(text)

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows there")
    parser.add_argument("--peers", metavar="NAMES", type=names, default=[TRL, PLAIN], help="trl,plain, or one of them")
    parser.add_argument("--task", metavar="NAME", help="only the batches of this task, such as mse")
    parser.add_argument("--repeats", metavar="N", type=positive, default=2, help="turns (2)")
    parser.add_argument("--updates", metavar="N", type=positive, default=1, help="measured updates of a process (1)")
    parser.add_argument("--threads", metavar="N", type=positive, default=1, help="compute threads of a process (1)")
    parser.add_argument("--full", action="store_true", help="also longer responses, ranks, last-k, samples, sampling")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models and batches, one turn: a test of the machinery"
    )
    return parser.parse_args(given)


def missing_peer(peers: Sequence[str], python: Path = TRL_PYTHON) -> str | None:
    """Why a peer can't run, in one line; None if all can."""
    if TRL in peers and not (python.parent.parent / "ready").is_file():
        return (
            f"--peers {','.join(peers)}: {python.parent.parent.name} is missing or incomplete; expected TRL there: "
            "bash scripts/setup_peers.sh makes it (--peers plain leaves TRL out)"
        )
    return None


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The batches that are measured, with the peers that were chosen."""
    found = []
    for case in (*CASES, *(FULL if options.full else ())):
        peers = tuple(peer for peer in case.peers if (TRL if peer == TRL else PLAIN) in options.peers)
        if peers and options.task in (None, case.task):
            made = Case(**{**asdict(case), "peers": peers})
            found.append(tiny(made) if options.quick else made)
    return found


def command_of(task: str, product: str) -> list[str]:
    """The command of a measured process, without its two arguments."""
    python, module = sys.executable, "ours" if product == OURS else "plain"
    if task == "sampling":
        module = "sampling"
    elif product == TRL:
        python, module = str(TRL_PYTHON), "trl_trainer"
    return [python, "-m", f"benchmarks.peer_parts.{module}"]


def environment(threads: int) -> dict[str, str]:
    """Variables of the measured processes. Threads that wait must not count as work, so they sleep."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    # no model is fetched: all are written by `prepare.py`
    shared = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **shared, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(command: list[str], spec: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """The measurements of the ranks' processes, which run at the same time."""
    source = scratch / "spec.json"
    source.write_text(json.dumps(spec))
    ranks, common = spec["ranks"], environment(spec["threads"])
    if ranks > 1:
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(free_port())}
    running = []
    for rank in range(ranks):
        target, log = scratch / f"rank{rank}.json", scratch / f"rank{rank}.log"
        target.unlink(missing_ok=True)
        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else common
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, str(source), str(target)], env=own, cwd=scratch, stdout=output, stderr=subprocess.STDOUT
            )
        running.append((process, target, log))
    try:
        for process, _, log in running:
            if process.wait(TIMEOUT_S):
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    finally:
        for process, *_ in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [json.loads(target.read_text()) for _, target, _ in running]


def combined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One measurement of all ranks: CPU seconds and memory summed, wall seconds of the slowest."""

    def over_ranks(stamps: Sequence[dict[str, float]]) -> dict[str, float]:
        kinds: dict[str, Callable[..., float]] = {"cpu_seconds": sum, "wall_seconds": max, "peak_rss_mb": sum}
        return {name: kinds[name](stamp[name] for stamp in stamps) for name in stamps[0]}

    updates = [over_ranks(of_ranks) for of_ranks in zip(*(rank["updates"] for rank in ranks), strict=True)]
    update = {name: statistics.fmean(each[name] for each in updates) for name in COLUMNS[:2]}
    peak = sum(rank["peak_rss_mb"] for rank in ranks)
    return {
        "update": {**update, "peak_rss_mb": peak},
        **{name: over_ranks([rank[name] for rank in ranks]) for name in STARTS},
    }


def computed(product: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a product computed: losses and norms by update, and the number of trained parameters.

    This project's ranks all have the loss of the batch; the ranks of the peers have shares of it.
    """
    losses = [list(of_ranks) for of_ranks in zip(*(rank["losses"] for rank in ranks), strict=True)]
    whole = {OURS: lambda shares: shares[0], TRL: statistics.fmean}.get(product, sum)
    return {
        "loss": [whole(shares) for shares in losses],
        "gradient norm": ranks[0]["norms"],
        "number of parameters": [ranks[0]["parameters"]],
    }


def check_agreement(case: Case, found: dict[str, dict[str, Any]]) -> None:
    """Compares what the products computed with what this project did.

    Raises:
        MismatchError: they differ by more than `TOLERANCE`.
    """
    for product in case.peers:
        for name, expected in found[OURS].items():
            got, largest = found[product][name], 0.0 if name == "number of parameters" else TOLERANCE
            for number, (ours, other) in enumerate(zip(expected, got, strict=True), 1):
                if not math.isclose(ours, other, rel_tol=largest, abs_tol=0.0):
                    raise MismatchError(
                        f"{case.task}, {case.batch}: the {name} of update {number} is {ours!r} here and {other!r} in "
                        f"the {PRODUCTS[product]}; expected a relative difference of at most {largest}"
                    )


def measure(case: Case, options: argparse.Namespace, scratch: Path) -> dict[str, list[dict[str, Any]]]:
    """Product -> its measurement in each turn."""
    models = {role: str(scratch / f"{case.shape}_{role}") for role in ("student", "teacher")}
    spec = {**asdict(case), **models, "rollouts": str(scratch / "rollouts.jsonl")}
    spec |= {"updates": options.updates, "threads": options.threads}
    source = scratch / "prepared.json"
    source.write_text(json.dumps(spec))
    prepare = [sys.executable, "-m", "benchmarks.peer_parts.prepare", str(source)]
    subprocess.run(prepare, env=environment(options.threads), check=True)
    turns: dict[str, list[dict[str, Any]]] = {product: [] for product in case.products}
    for turn in range(1 if options.quick else options.repeats):
        values = {}
        for product in case.products if turn % 2 == 0 else reversed(case.products):
            ranks = run_ranks(command_of(case.task, product), {**spec, "product": product}, scratch)
            turns[product].append(combined(ranks))
            values[product] = computed(product, ranks)
        check_agreement(case, values)
    return turns


def rows_of(task: str, batch: str, turns: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """The rows of one batch: ours and each peer's, the medians over the turns, and the ratios of the turns."""
    rows: list[dict[str, Any]] = []
    for product, of_turns in turns.items():
        medians = {name: statistics.median(turn[name] for turn in of_turns) for name in COLUMNS}
        row: dict[str, Any] = {"task": task, "batch": batch, "product": product, **medians}
        row |= {"ratio": None, "ratios": []}
        if product != OURS:
            row["ratio"] = row["cpu_seconds"] / rows[0]["cpu_seconds"]
            pairs = zip(turns[OURS], of_turns, strict=True)
            row["ratios"] = [theirs["cpu_seconds"] / ours["cpu_seconds"] for ours, theirs in pairs]
        rows.append(row)
    return rows


def all_rows(case: Case, turns: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of a case, and those of its start."""

    def part(name: str) -> dict[str, list[dict[str, float]]]:
        return {product: [turn[name] for turn in of_turns] for product, of_turns in turns.items()}

    rows = rows_of(case.task, case.batch, part("update"))
    for name, task in STARTS.items() if case.start else ():
        rows += rows_of(task, f"{case.task}, {case.batch}", part(name))
    return rows


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table's lines, one for each peer; `rows` begin with ours of each batch."""
    ours: dict[str, Any] = {}
    for row in rows:
        if row["product"] == OURS:
            ours = row
            continue
        ratios = row["ratios"]
        cells = [row["task"], row["batch"], PRODUCTS[row["product"]]]
        cells += [f"{each['cpu_seconds']:.2f}" for each in (ours, row)]
        cells += [f"{row['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        cells += [f"{each['peak_rss_mb']:,.0f}" for each in (ours, row)]
        yield f"| {' | '.join(cells)} |"


def main(given: Sequence[str] | None = None) -> int:
    """Prints the table; returns 2 if a peer is not installed, 1 if two products did not compute the same."""
    options, begun = arguments(given), time.monotonic()
    problem = missing_peer(options.peers)
    if problem is None and not chosen_cases(options):
        problem = f"--task {options.task}: expected a task with a chosen peer; leave it out, or add --full"
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    found: list[dict[str, Any]] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for case in chosen_cases(options):
            try:
                rows = all_rows(case, measure(case, options, Path(scratch)))
            except MismatchError as error:
                print(error, file=sys.stderr)
                return 1
            print(*lines(rows), sep="\n", flush=True)
            found += rows
    if options.json is not None:
        kept = [{name: value for name, value in row.items() if name != "ratios"} for row in found]
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"\n{(time.monotonic() - begun) / 60:.1f} minutes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
