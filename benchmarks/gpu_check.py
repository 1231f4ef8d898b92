"""Checks what a GPU computes, how much memory a step needs, and how fast it is: `scripts/gpu_check.sh`.

This file imports only the standard library before it has found that the packages are there, because it must be able
to report missing ones. `gpu_parts/registry.py` has the parts, `gpu_parts/runner.py` runs them. Results go to a line per
part and a table on stdout, and after every part to DIR/gpu_check.json; the output of the parts goes to
DIR/gpu_check.log.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()

import argparse  # noqa: E402
import importlib.util  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NoReturn  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.gpu_parts.registry import PARTS  # noqa: E402

# import name -> package name, for all packages that the parts import; requirements-cpu.txt has the versions
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
    "math_verify": "math-verify",
    "latex2sympy2_extended": "latex2sympy2_extended",
    "httpx2": "httpx2",
    "httpcore2": "httpcore2",
    "truststore": "truststore",
}
MINUTES, QUICK_MINUTES, REHEARSAL_MINUTES, MOST_MINUTES = 5.0, 10.0, 15.0, 15.0
# an answer without cuInit: a process that has asked CUDA itself can't be forked
SET = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


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


def broken_engine() -> str | None:
    """Why Transformer Engine does not load, though it is installed: Megatron-core imports it, and would fail too."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    import torch  # noqa: F401  its libraries find CUDA's once torch has loaded them

    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()}"
    return None


def names(text: str) -> tuple[str, ...]:
    """The parts in an argument, without spaces.

    Raises:
        argparse.ArgumentTypeError: there is no such part.
    """
    found = tuple(text.split(","))
    unknown = [name for name in found if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {','.join(PARTS)}; choose from these")
    return found


class Parser(argparse.ArgumentParser):
    """A parser whose error is one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="gpu_check.sh", description="Is what this GPU computes right, how much memory does a step need, how fast?"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers (default: DIR/gpu_check.json)")
    text = (
        f"time limit of the whole check, at most {MOST_MINUTES:.0f} (default: {MINUTES:.0f}; with --quick "
        f"{QUICK_MINUTES:.0f}, with --rehearse {REHEARSAL_MINUTES:.0f}); more time is for the parts of less value"
    )
    parser.add_argument("--minutes", type=float, metavar="N", help=text)
    parser.add_argument("--parts", type=names, metavar="NAMES", help=f"only these, of {','.join(PARTS)}")
    parser.add_argument("--layers", type=int, metavar="N", help="depth of the 1.5B (default: as many layers as fit)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="tiny shapes; works without a GPU")
    mode.add_argument(
        "--rehearse", action="store_true", help="the parts that measure memory, on a fake device; needs no GPU"
    )
    parser.add_argument("--beside", type=Path, metavar="FILE", help="JSON of another check, for columns of the table")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="directory for temporary files (default: the system's)"
    )
    options = parser.parse_args()
    if options.minutes is None:
        options.minutes = QUICK_MINUTES if options.quick else REHEARSAL_MINUTES if options.rehearse else MINUTES
    if not 0 < options.minutes <= MOST_MINUTES:
        parser.error(
            f"--minutes {options.minutes:g}: expected more than 0 and at most {MOST_MINUTES:.0f}; choose such a number"
        )
    if options.layers is not None and options.layers < 1:
        parser.error(f"--layers {options.layers}: expected at least 1; choose a larger number")
    if options.beside is not None and not options.beside.is_file():
        parser.error(f"--beside {options.beside}: expected the JSON file of an earlier check; there is no such file")
    return options


def main() -> None:
    """Exit status: 0 if all parts are ok or skipped, 1 if a part is not, 2 if packages are missing or do not load."""
    options = parse_arguments()
    missing = missing_packages()
    if missing:
        command = f"{sys.executable} -m pip install {' '.join(missing)}"
        print(f"not installed: {', '.join(missing)}; {command}  (without an index: --wheels DIR)", file=sys.stderr)
        sys.exit(2)
    for name, value in SET.items():
        os.environ.setdefault(name, value)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for programs that parts start
    reason = broken_engine()
    if reason is not None:
        print(
            f"Transformer Engine is installed and does not load ({reason}); expected one built for this torch, with "
            "all that it imports: install what it lacks, or remove it (scripts/gpu_wheels.sh --te brings one)",
            file=sys.stderr,
        )
        sys.exit(2)
    from benchmarks.gpu_parts.runner import Options, check

    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    file = (options.json or output / "gpu_check.json").resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the `finally` clauses remove files and processes
    scratch = Path(tempfile.mkdtemp(prefix="gpu_check_", dir=options.scratch))
    chosen = Options(
        output, file, scratch, options.minutes, options.parts, options.quick, options.layers, options.rehearse,
        options.beside,
    )  # fmt: skip
    try:
        ok = check(chosen, STARTED)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
