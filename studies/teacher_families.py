"""Which model families a teacher's vLLM server computes as transformers does: tiny random models on a CPU, TP1 and TP2.

    python -m studies.teacher_families [--families a,b,..] [--tensors 1,2] [--results FILE] [--table]

Each case is a server of `tests/e2e/vllm_teacher.py`, in float32, with prompts of up to 300 tokens in chunks of 128: its
canary, then all rows of all layers against transformers' own, and log-probability and entropy of its head. A case that
the canary refuses, or that does not start, is kept with its reason. Cases that are in the file of results are not run
again; `--table` runs nothing. Needs vLLM's environment (scripts/setup_vllm.sh); a case takes a minute of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CASE = ROOT / "tests" / "e2e" / "vllm_teacher.py"
RESULTS = ROOT / "studies" / "results" / "teacher_families.json"
FAMILIES = (
    "qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "granite", "glm4", "gpt2", "olmo2",
    "stablelm", "gpt_neox", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "falcon_h1", "cohere2", "deepseek_v3",
)  # fmt: skip
PATIENCE_S = 900
# what a canary refuses, a server's start ends with, or transformers says
_REASON = re.compile(r"(?:ServerRefused|ValueError|CanaryRefused): (.*)")
# the exception that a line of a server's log ends with; not one in the middle of a warning
_RAISED = re.compile(r"(?:^|\] )\s*(\w+(?:Error|Exception): .*)", re.MULTILINE)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="default: all of them")
    parser.add_argument("--tensors", default="1,2", help="workers of a server, default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    return parser.parse_args(given)


def run_case(family: str, tensor: int) -> dict[str, Any]:
    """What one server has shown: deviations by layer, or the reason why it may not teach."""
    with tempfile.TemporaryDirectory(prefix="nemo_oprd_") as folder:
        environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(CASE), family, str(tensor), folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        results = Path(folder) / "results.json"
        found = json.loads(results.read_text()) if results.exists() else {}
        logs = [log.read_text(errors="replace") for log in sorted((Path(folder) / "vllm").glob("*.log"))]
    case: dict[str, Any] = {"family": family, "tensor": tensor}
    if done.returncode == 0:
        return case | {key: found[key] for key in ("worst", "logprob_gap")}
    reasons = _REASON.findall(done.stderr) or done.stderr.strip().splitlines() or ["no message"]
    reason = reasons[-1]
    if "died twice" in reason:  # its log says why
        reason = (_RAISED.findall("\n".join(logs)) or [reason])[0]
    return case | {"refused": reason.replace(folder, "DIR").replace(str(ROOT), "ROOT")[:600]}


def table(cases: list[dict[str, Any]]) -> str:
    """Markdown: per family the worst row of the best and of the worst layer, and log-probabilities, by TP size."""
    by_family: dict[str, dict[int, dict[str, Any]]] = {}
    for case in cases:
        by_family.setdefault(case["family"], {})[case["tensor"]] = case
    lines = ["| family | TP1 | TP2 | TP1, log-probability, entropy | TP2 |", "|---|---|---|---|---|"]
    for family, found in by_family.items():
        cells = [_states(found.get(tensor)) for tensor in (1, 2)]
        cells += [_logprobs(found.get(tensor)) for tensor in (1, 2)]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _states(case: dict[str, Any] | None) -> str:
    if case is None:
        return "not run"
    if "refused" in case:
        return "refused"
    first, *_, last = case["worst"].values()
    return f"{max(case['worst'].values()):.1e} ({first:.1e} .. {last:.1e})"


def _logprobs(case: dict[str, Any] | None) -> str:
    return "" if case is None or "refused" in case else f"{case['logprob_gap']:.1e}"


def main() -> None:
    """See the module's docstring."""
    options = arguments()
    cases = json.loads(options.results.read_text()) if options.results.exists() else []
    known = {(case["family"], case["tensor"]) for case in cases}
    for family in () if options.table else options.families.split(","):
        for tensor in map(int, options.tensors.split(",")):
            if (family, tensor) not in known:
                cases.append(run_case(family, tensor))
                print(json.dumps(cases[-1]), flush=True)
                options.results.parent.mkdir(parents=True, exist_ok=True)
                options.results.write_text(json.dumps(cases, indent=1) + "\n")
    print(table(cases))


if __name__ == "__main__":
    main()
