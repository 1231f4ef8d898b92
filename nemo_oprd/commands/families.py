"""`nemo-oprd families`: lists the supported model families, their builders, their tests, and the refused features.

The tables are written by hand beside the code that they describe; nothing is built or measured here.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from nemo_oprd.models import FAMILIES
from nemo_oprd.models.megatron_bridge_families import KINDS, NEEDED_VERSION, REFUSED_FAMILIES

_HEADINGS = ("family", "route", "layouts compared with transformers", "engines", "refused")
_OWN_LAYOUTS = "TP, SP, PP, VPP, CP, DP, recompute"
# the refused special parts of each own family are reported when its config.json is read
_ENGINES = {"own": "in-process, vllm", "bridge": "in-process without a cache (slow); vllm not tried"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no option."""


def rows() -> list[tuple[str, str, str, str, str]]:
    """Returns the lines of the table, without the headings."""
    found = [
        (name, "own", f"{_OWN_LAYOUTS}{', EP' if name in ('mixtral', 'qwen3_moe') else ''}", _ENGINES["own"], "")
        for name in sorted(FAMILIES)
    ]
    with_vllm = "in-process without a cache (slow), vllm"
    tried = dict.fromkeys(("gemma", "gemma3_text", "gpt_oss"), with_vllm)
    found += [
        (name, "bridge", kind.layouts, tried.get(name, _ENGINES["bridge"]), kind.refused)
        for name, kind in KINDS.items()
    ]
    return found + [(name, "refused", "", "", reason) for name, reason in REFUSED_FAMILIES.items()]


def run(options: argparse.Namespace) -> None:
    """Prints the table, and whether Megatron-Bridge is installed here."""
    table = [_HEADINGS, *rows()]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADINGS))]
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    version = ".".join(map(str, NEEDED_VERSION))
    installed = _bridge_is_installed()
    where = "installed here" if installed else "not installed here (scripts/setup_nemo_bridge.sh, docs/nemo.md)"
    print(f"route bridge: provider=bridge; Megatron-Bridge, {version} or later for special parts, is {where}")


def _bridge_is_installed() -> bool:
    try:
        return find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:  # without Megatron-core
        return False
