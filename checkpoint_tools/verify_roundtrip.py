"""Converts a Hugging Face model to Megatron and back, and compares every tensor bit for bit. Needs no torchrun.

    python checkpoint_tools/verify_roundtrip.py --hf-path MODEL [--work-dir DIR]

Exit code 0: identical, 1: a difference, 2: the model cannot be converted. Needs twice the model's size on disk.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import defaultdict
from pathlib import Path

from _command import add_model, tool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--work-dir",
        metavar="DIR",
        help="keep both conversions in DIR/megatron and DIR/hf (default: a temporary directory, removed at the end)",
    )


def run(options: argparse.Namespace) -> int:
    if options.work_dir:
        return round_trip(Path(options.hf_path), Path(options.work_dir))
    with tempfile.TemporaryDirectory(prefix="roundtrip-") as work:
        return round_trip(Path(options.hf_path), Path(work))


def round_trip(hf_path: Path, work: Path) -> int:
    """Converts to Megatron and back in the directory `work`, prints the comparison; returns the exit code."""
    from _convert import hf_to_megatron, megatron_to_hf

    from nemo_oprd.megatron.weights.hf import HFCheckpoint
    from nemo_oprd.megatron.weights.megatron_checkpoint import ignored_tensors
    from nemo_oprd.models import read_model_spec

    hf_to_megatron(hf_path, work / "megatron")
    megatron_to_hf(work / "megatron", work / "hf")
    before, after = HFCheckpoint(hf_path), HFCheckpoint(work / "hf")
    ignored = ignored_tensors(before, read_model_spec(hf_path))
    names = [name for name in before.keys() if name not in ignored]  # noqa: SIM118 - not a dictionary
    differing = {name: verdict for name in names if (verdict := difference(before, after, name)) is not None}
    for line in table(names, differing):
        print(line)
    for name in ignored:
        print(f"not carried over: {name} (holds nothing of its own)")
    added = sorted(set(after.keys()) - set(names))
    for name in added:
        print(f"not in the source: {name}")
    failed = len(differing) + len(added)
    print(f"{len(names)} tensors compared bit for bit: {f'{failed} differ' if failed else 'all identical'}")
    return 1 if failed else 0


def difference(before: object, after: object, name: str) -> str | None:
    """The difference of one tensor between two `HFCheckpoint`s; None if there is none."""
    import torch

    if name not in after.keys():  # type: ignore[attr-defined]  # noqa: SIM118
        return "missing"
    old, new = before[name], after[name]  # type: ignore[index]
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return f"{old.dtype} {tuple(old.shape)} became {new.dtype} {tuple(new.shape)}"
    # compared as bytes, so that equal NaNs are equal, and 0.0 and -0.0 are not
    same = old.contiguous().view(-1).view(torch.uint8) == new.contiguous().view(-1).view(torch.uint8)
    return None if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} bytes differ"


def table(names: list[str], differing: dict[str, str]) -> list[str]:
    """One line per kind of tensor (all layers together), then one line per difference."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"\.\d+\.", ".*.", name)].append(name)
    width = max(map(len, kinds))
    lines = []
    for kind, members in kinds.items():
        bad = sum(name in differing for name in members)
        lines.append(f"{kind:<{width}}  {len(members):>4}  {'identical' if not bad else f'{bad} differ'}")
    return lines + [f"{name}: {verdict}" for name, verdict in differing.items()]


main = tool("Hugging Face -> Megatron -> Hugging Face, compared bit for bit.", add_arguments, run)


if __name__ == "__main__":
    main()
