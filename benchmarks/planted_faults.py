"""Plants faults into tiny models, prompts and settings, one at a time, and counts what `nemo-oprd doctor` says of them.

    python -m benchmarks.planted_faults [--json FILE] [--only NAME] [--static]

A fault is `named` if the expected code is among the findings, a `symptom` if there is another warning or something
wrong, and `missed` if there is neither. A healthy pair with a warning, or something wrong, is a false alarm. Both start
from the shipped configurations. Most cases need no forward pass; `planted_samples.py` has those that do. The exit code
is 1 if a healthy pair raises an alarm, or less than nine of ten faults are named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.planted_cases import FAULTS, HEALTHY, Case, base_overrides
from benchmarks.planted_samples import SAMPLED_FAULTS, SAMPLED_HEALTHY, sample_overrides
from tests.support.planted_models import make_world

NAMED = 0.9


@dataclass(frozen=True)
class Result:
    """What the doctor said of one case.

    Attributes:
        expected: the code of the fault; None: the pair is healthy.
        outcome: named, symptom or missed; of a healthy pair quiet or false alarm.
        found: the codes of warnings and of what is wrong, and `refused` if `train` would refuse the run at once.
    """

    case: str
    expected: str | None
    outcome: str
    found: tuple[str, ...]
    lines: tuple[str, ...]

    @staticmethod
    def of(case: Case, found: list[Any]) -> Result:
        codes = tuple(finding.code for finding in found if finding.code is not None)
        if case.code is None:
            outcome = "false alarm" if codes else "quiet"
        elif case.code in codes:
            outcome = "named"
        else:
            outcome = "symptom" if codes else "missed"
        return Result(case.name, case.code, outcome, codes, tuple(f.line for f in found if f.code is not None))


def run_case(case: Case, world: Path, *, sampled: bool) -> Result:
    """Plants a case into a copy of `world`, and asks the doctor."""
    from nemo_oprd.config.loading import load_config

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "world"
        shutil.copytree(world, root)
        if case.plant is not None:
            case.plant(root)
        common = (sample_overrides if sampled else base_overrides)(case.config, root)
        config = load_config(case.config, [*common, *(text.replace("{root}", str(root)) for text in case.overrides)])
        return Result.of(case, _whole_visit(config) if sampled else _static_visit(config))


def _static_visit(config: Any) -> list[Any]:
    from nemo_oprd.run.models import RunFiles
    from nemo_oprd.run.resolve import resolve_models
    from nemo_oprd.tools.doctor.examination import static_findings

    return list(static_findings(config, RunFiles(config, resolve_models(config))))


def _whole_visit(config: Any) -> list[Any]:
    """The findings of `doctor` in this process."""
    import torch

    from nemo_oprd.run.resolve import resolve
    from nemo_oprd.tools.doctor import examination as command
    from nemo_oprd.tools.doctor.findings import SampleSizes, for_diagnosis

    made: list[Any] = []
    make = command.Report

    def report(**arguments: bool) -> Any:
        made.append(make(**arguments))
        return made[-1]

    torch.manual_seed(0)
    with mock.patch.object(command, "Report", report), redirect_stdout(StringIO()):
        sizes = SampleSizes(prompts=6)
        command.doctor(config, resolve(for_diagnosis(config, sizes), 1), sizes)
    return list(made[0].findings)


def run(cases: Sequence[Case], world: Path, *, sampled: bool) -> list[Result]:
    """All cases, each in a copy of `world`; prints a line for each."""
    results = []
    for case in cases:
        results.append(run_case(case, world, sampled=sampled))
        found = ", ".join(results[-1].found) or "-"
        print(f"{results[-1].outcome:<12} {case.name:<40} {case.code or 'healthy':<36} {found}", flush=True)
    return results


def table(results: Sequence[Result]) -> str:
    """The Markdown table of docs/doctor.md: how many faults of each group were named."""
    groups = {"settings, prompts and files": [], "responses and forward passes": []}  # type: dict[str, list[Result]]
    late = {case.name for case in (*SAMPLED_FAULTS, *SAMPLED_HEALTHY)}
    for result in results:
        groups["responses and forward passes" if result.case in late else "settings, prompts and files"].append(result)
    lines = ["| seen in | faults | named | by a symptom | missed | healthy pairs | false alarms |", "|---" * 7 + "|"]
    for name, members in [*groups.items(), ("all", list(results))]:
        counts = Counter(result.outcome for result in members)
        faults = counts["named"] + counts["symptom"] + counts["missed"]
        healthy = counts["quiet"] + counts["false alarm"]
        values = (faults, counts["named"], counts["symptom"], counts["missed"], healthy, counts["false alarm"])
        lines.append(f"| {name} | {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def single_process() -> None:
    """The environment of one rank, for the process group that the doctor joins."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in values.items():
        os.environ.setdefault(name, value)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the results")
    parser.add_argument("--only", metavar="NAME", help="the cases whose name, or code, holds this text")
    parser.add_argument("--static", action="store_true", help="only the cases that need no forward pass")
    options = parser.parse_args()

    def chosen(cases: Sequence[Case]) -> list[Case]:
        return [case for case in cases if options.only is None or options.only in f"{case.name}|{case.code}"]

    single_process()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as directory:
        files = chosen([*HEALTHY, *FAULTS])
        if files:
            make_world(Path(directory) / "files")
            results += run(files, Path(directory) / "files", sampled=False)
        sampled = [] if options.static else chosen([*SAMPLED_HEALTHY, *SAMPLED_FAULTS])
        if sampled:
            from tests.support.known_sums import make_pair

            make_pair(Path(directory) / "sums")
            results += run(sampled, Path(directory) / "sums", sampled=True)
    print(table(results))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    faults = [result for result in results if result.expected is not None]
    named = sum(result.outcome == "named" for result in faults)
    alarms = sum(result.outcome == "false alarm" for result in results)
    return int(alarms > 0 or named < NAMED * len(faults))


if __name__ == "__main__":
    sys.exit(main())
