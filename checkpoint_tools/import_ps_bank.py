"""Converts a bridge that the paper's own code made (ps_bank.pt) to one for `bridge.path`. Needs no torchrun.

python checkpoint_tools/import_ps_bank.py --ps-bank ps_bank.pt --student MODEL --teacher MODEL --output BRIDGE
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _command import tool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ps-bank", required=True, metavar="FILE", help="the file; no code from it is run")
    for role in ("student", "teacher"):
        parser.add_argument(
            f"--{role}", required=True, metavar="DIR", help=f"the {role} that the file was made with: its config.json"
        )
    parser.add_argument("--output", required=True, metavar="DIR", help="the bridge; must not exist or be empty")


def run(options: argparse.Namespace) -> None:
    from _ps_bank import import_ps_bank

    from nemo_oprd.bridge.artifact import save_bridge
    from nemo_oprd.distillation.objective import model_identity
    from nemo_oprd.models import read_model_spec

    output = Path(options.output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists and is not an empty directory; choose another output or remove it")
    # the file names no tokenizers, so the bridge records none, and a run compares none with its own
    student, teacher = (
        model_identity(read_model_spec(directory), directory) for directory in (options.student, options.teacher)
    )
    bridge = import_ps_bank(options.ps_bank, student, teacher)
    save_bridge(bridge, output)
    print(f"{output}: rank {bridge.rank}, layer pairs {' '.join(pair.key for pair in sorted(bridge.pairs))}")


main = tool("ps_bank.pt of the paper's code -> bridge directory (docs/bridge.md).", add_arguments, run)


if __name__ == "__main__":
    main()
