"""`nemo-oprd families`: which model families run, and by which route models in given directories would.

Without a directory it lists the families, their builders, their tests, and the refused features, from tables that are
written by hand beside the code that they describe. With directories it reads each one's config.json, and no weights.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Literal

from nemo_oprd.commands.options import json_file
from nemo_oprd.models import FAMILIES, read_hf_config, read_model_spec
from nemo_oprd.models.architecture import source_dtype
from nemo_oprd.models.megatron_bridge_families import KINDS, NEEDED_VERSION, REFUSED_FAMILIES
from nemo_oprd.models.quantization import KEY, known_quantization
from nemo_oprd.run.provider import BRIDGE, find_family
from nemo_oprd.runtime.files import write_atomically
from nemo_oprd.tools.plan.parameters import model_parameters

_HEADINGS = ("family", "route", "layouts compared with transformers", "engines", "refused")
_ANSWER_HEADINGS = ("directory", "family", "route", "parameters", "weights", "layers", "kv heads", "why")
_OWN_LAYOUTS = "TP, SP, PP, VPP, CP, DP, recompute"
# the refused special parts of each own family are reported when its config.json is read
_ENGINES = {"own": "in-process, vllm", "bridge": "in-process without a cache (slow); vllm not tried"}


Route = Literal["own", "bridge", "served", "refused"]


@dataclass(frozen=True)
class ModelRoute:
    """The answer for the model in a directory; a row of the table, and an object in the file of `--json`.

    Attributes:
        family: `model_type`; None if there is no readable config.json.
        route: `own` and `bridge`: as student or teacher, built by this project or with `provider=bridge`; `served`: as
            a frozen teacher with `teacher.engine=vllm`, where vLLM has the architecture; or `refused`.
        parameters: of the whole model; None if its sizes are not known here.
        weights: the format of its files, such as bfloat16 or fp8.
        layers, kv_heads: decoder layers, and key/value heads of a layer; None if not known.
        why: the reason for a refusal, or a note.
    """

    directory: str
    family: str | None
    route: Route
    parameters: int | None = None
    weights: str | None = None
    layers: int | None = None
    kv_heads: int | None = None
    why: str = ""


def answer(directory: str) -> ModelRoute:
    """Returns how the model in a directory can be used; reads its config.json, but no weights."""
    try:
        hf_config = read_hf_config(directory)
    except ValueError as error:
        return ModelRoute(directory, None, "refused", why=str(error))
    model_type = str(hf_config.get("model_type"))
    route: Route = "own" if model_type in FAMILIES else "bridge"
    if route == "bridge" and not _bridge_is_installed() and model_type in KINDS:
        return ModelRoute(
            directory, model_type, "bridge", why="Megatron-Bridge, which knows its sizes, is not installed"
        )
    try:
        family = find_family(BRIDGE, hf_path=directory) if route == "bridge" and _bridge_is_installed() else None
        spec = read_model_spec(directory, family)
    except ValueError as error:
        return _served(directory, hf_config, str(error))
    sizes = spec.num_layers, spec.num_kv_heads
    return ModelRoute(directory, model_type, route, model_parameters(spec), weights_in_words(hf_config), *sizes)


def _served(directory: str, hf_config: dict, why: str) -> ModelRoute:
    """Returns the answer for a model that the trainer does not build, for the reason `why`."""
    from nemo_oprd.models.served import read_served_spec

    model_type = str(hf_config.get("model_type"))
    try:
        spec = read_served_spec(directory)
    except ValueError as error:
        return ModelRoute(directory, model_type, "refused", why=f"{why}; and as a served teacher: {error}")
    return ModelRoute(
        directory, model_type, "served", layers=spec.num_layers, weights=weights_in_words(hf_config), why=why
    )


def weights_in_words(hf_config: dict) -> str:
    """Returns the dtype of a model's weights or, for a quantised model, its format, even if it can't be read here."""
    found, settings = known_quantization(hf_config), hf_config.get(KEY)
    if found is not None:
        return found.label
    if isinstance(settings, dict) and settings.get("quant_method"):
        return str(settings["quant_method"])
    return source_dtype({**hf_config, **(hf_config.get("text_config") or {})})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directories", nargs="*", metavar="DIR", help="answer for the models in these directories")
    parser.add_argument("--json", metavar="FILE", help="also write the answers there")


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
    """Prints the table of families, or of the answers for directories.

    Raises:
        ValueError: --json without a directory, or its file can't be written.
    """
    file = json_file(options, r'\[\s*\{\s*"directory":')
    if file is not None and not options.directories:
        raise ValueError(f"--json {file} without a directory; expected one: nemo-oprd families DIR --json {file}")
    if options.directories:
        answers = [answer(directory) for directory in options.directories]
        _print([_ANSWER_HEADINGS, *map(_in_words, answers)])
        if file is not None:
            write_atomically(file, json.dumps([asdict(each) for each in answers], indent=1) + "\n")
        return
    _print([_HEADINGS, *rows()])
    version = ".".join(map(str, NEEDED_VERSION))
    installed = _bridge_is_installed()
    where = "installed here" if installed else "not installed here (scripts/setup_nemo_bridge.sh, docs/nemo.md)"
    print(f"route bridge: provider=bridge; Megatron-Bridge, {version} or later for special parts, is {where}")


def _in_words(found: ModelRoute) -> tuple[str, ...]:
    size = "" if found.parameters is None else _count_in_words(found.parameters)
    counts = ("" if count is None else str(count) for count in (found.layers, found.kv_heads))
    return found.directory, str(found.family), found.route, size, found.weights or "", *counts, found.why


def _count_in_words(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1000:.1f} K"


def _print(table: list[tuple[str, ...]]) -> None:
    """Prints rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _bridge_is_installed() -> bool:
    try:
        return find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:  # without Megatron-core
        return False
