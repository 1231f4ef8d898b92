"""Checks whether this machine's GPU computes correct numbers, and measures its speed: `scripts/gpu_check.sh`.

Each phase runs in a separate process with a time limit, so that a phase that fails or hangs does not affect the others.
This file imports only the standard library, because it must be able to report missing packages. Results go to a table
on stdout and, after every phase, to DIR/gpu_check.json; the output of the phases goes to DIR/gpu_check.log. The exit
status is 0 only if all phases are ok or skipped. The check uses one GPU, and for `two_ranks` a second one where it is;
other layouts are tested on the CPU (tests/functional/test_layouts.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
# phase -> time limit in seconds, in the order in which the phases run
PHASES = {
    "environment": 90,
    "golden_fp32": 120,
    "golden_bf16": 150,
    "guard": 90,
    "decoding": 90,
    "two_ranks": 90,
    "training": 150,
    "save": 90,
    "resume": 60,
    "models": 120,
    "step_recompute_none": 150,
    "step_recompute_full": 150,
    "generation": 120,
    "generation_16k": 120,
}
# phase -> the phase whose files it reads
NEEDS = {
    "resume": "save",
    "step_recompute_none": "models",
    "step_recompute_full": "models",
    "generation": "models",
    "generation_16k": "models",
}
# import name -> package name, for all packages that the phases import; requirements-cpu.txt has the versions
REQUIRED = {
    "torch": "torch",
    "numpy": "numpy",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "packaging": "packaging",
    "megatron.core": "megatron-core",
    "einops": "einops",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "antlr4": "antlr4-python3-runtime",
    "filelock": "filelock",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "yaml": "PyYAML",
    "tqdm": "tqdm",
}
# reserved at the end, so that the report is written before the deadline
REPORT_SECONDS = 5
# processes of phases, which must end with this process
_running: set[subprocess.Popen] = set()
# the measurements of a phase that did not finish
NOTHING: dict[str, Any] = {"numbers": {}, "lines": []}


def missing_packages() -> list[str]:
    """Required packages that are not installed, with the versions that the tests use; nothing is imported."""
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    # a line with a marker is for Pythons before or from 3.12 on; packaging, which could tell, may be missing itself
    other = "<" if sys.version_info >= (3, 12) else ">="
    wanted = [line.partition(";") for line in lines if "==" in line and not line.startswith("#")]
    pinned = {text.partition("==")[0]: text.strip() for text, _, marker in wanted if f"n {other}" not in marker}

    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # the parent package of a dotted name
            return False

    return [pinned[package] for name, package in REQUIRED.items() if not found(name)]


def last_line(text: str) -> str:
    """The last line that is not blank: an exception's message, if there is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run_phase(name: str, limit: float, arguments: list[str], scratch: Path, log: Path) -> dict[str, Any]:
    """Runs one phase in its own process group, which is killed after `limit` seconds.

    Returns:
        {"status": "ok" | "skipped: ..." | "failed: ..." | "timeout ...", "seconds", "numbers", "lines"}.
    """
    output, result = scratch / f"{name}.log", scratch / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.phase", name, str(result), "--scratch", str(scratch), *arguments]
    start = time.monotonic()
    with output.open("w") as file:
        code = run_limited(command, limit, scratch, file)
    seconds = round(time.monotonic() - start, 1)
    text = output.read_text(errors="replace")
    with log.open("a") as file:
        file.write(f"==== {name}\n{text}\n")
    measured = json.loads(result.read_text()) if result.exists() else {}
    if code is None:
        status = f"timeout after {limit:.0f} s"
    elif code != 0:
        status = f"failed: {measured.get('error') or last_line(text)}"
    elif measured["problems"]:
        status = f"failed: {'; '.join(measured['problems'])}"
    else:
        status = "ok" if measured["skipped"] is None else f"skipped: {measured['skipped']}"
    return {"status": status, "seconds": seconds, **{key: measured.get(key, empty) for key, empty in NOTHING.items()}}


def run_limited(command: list[str], limit: float, directory: Path, output: IO[str]) -> int | None:
    """The exit status; None if the whole process group was killed after `limit` seconds."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT, process_group=0
    )
    _running.add(process)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _running.discard(process)


def show(name: str, phase: dict[str, Any]) -> None:
    """Prints the phase's rows of the table."""
    print(f"{name:<21}{phase['seconds']:>7.1f} s  {phase['status']}", flush=True)
    for line in phase["lines"]:
        print(f"{'':<32}{line}", flush=True)


def check(options: argparse.Namespace, scratch: Path) -> bool:
    """Runs the phases within `options.minutes`; True if all are ok."""
    deadline = time.monotonic() + options.minutes * 60 - REPORT_SECONDS
    arguments = ["--quick"] if options.quick else []
    arguments += ["--layers", str(options.layers)] if options.layers else []
    log = options.output / "gpu_check.log"
    log.unlink(missing_ok=True)
    phases: dict[str, Any] = {}
    report: dict[str, Any] = {"ok": False, "quick": options.quick, "started": time.time(), "phases": phases}
    begun: dict[str, Future] = {}

    def timed(name: str) -> dict[str, Any]:
        if name in NEEDS:
            begun[NEEDS[name]].result()
        left = deadline - time.monotonic()
        if left > 0:
            return run_phase(name, min(PHASES[name], left), arguments, scratch, log)
        return {"status": "not run: no time left", "seconds": 0.0, **NOTHING}

    print(f"{'phase':<21}{'time':>9}  result")
    pool = ThreadPoolExecutor(options.jobs)
    try:
        for name in PHASES:
            begun[name] = pool.submit(timed, name)
        for name in PHASES:
            phases[name] = begun[name].result()
            show(name, phases[name])
            skipped = [name for name, phase in phases.items() if phase["status"].startswith("skipped")]
            bad = [name for name, phase in phases.items() if phase["status"] != "ok" and name not in skipped]
            report["ok"] = not bad and len(phases) == len(PHASES)
            report["seconds"] = round(time.time() - report["started"], 1)
            (options.output / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in tuple(_running):  # left over only if this process is stopped early
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    fine = f"{len(PHASES) - len(skipped)} phases ok, skipped: {', '.join(skipped)}"
    fine = fine if skipped else f"all {len(PHASES)} phases ok"
    verdict = f"not ok: {', '.join(bad)} (see {log})" if bad else fine
    print(f"{verdict}; {report['seconds']:.0f} s, {options.output / 'gpu_check.json'}")
    return report["ok"]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Does this GPU compute correctly, and how fast?")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of the whole check (default: 10)")
    parser.add_argument(
        "--layers", type=int, help="depth of the 1.5B-shaped models (default: as many layers as fit, at most 28)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes; works without a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="phases at a time; with more than 1, times are meaningless")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="directory for up to 8 GB of temporary files (default: /tmp)"
    )
    options = parser.parse_args()
    if options.layers is not None and options.layers < 1:
        parser.error(f"--layers {options.layers}: expected at least 1")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: expected at least 1")
    return options


def main() -> None:
    """Exit status: 0 if all phases are ok or skipped, 1 if a phase is not, 2 if packages are missing."""
    options = parse_arguments()
    missing = missing_packages()
    if missing:
        command = f"{sys.executable} -m pip install {' '.join(missing)}"
        print(f"not installed: {', '.join(missing)}; {command}  (without an index: --wheels DIR)", file=sys.stderr)
        sys.exit(2)
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the `finally` clauses remove models and processes
    scratch = Path(tempfile.mkdtemp(prefix="gpu_check_", dir=options.scratch))
    try:
        ok = check(options, scratch)
    finally:
        shutil.rmtree(scratch)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
