"""Prepares the prompt files of a configuration by the keys of `data`, and writes OUTPUT/data.json. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nemo_oprd.config.schema import Config
from nemo_oprd.data.preparation import DataReport, Preparation, PreparedPrompts, decontaminate, prepare, say_suffix
from nemo_oprd.data.prompts import HELD_OUT, Prompt, load_prompts
from nemo_oprd.data.text import with_suffix
from nemo_oprd.runtime.files import read_json, write_atomically

REPORT = "data.json"
FORMAT = 1


def prepare_prompts(config: Config, report: DataReport) -> PreparedPrompts:
    """Reads the training prompts and makes the preparation that needs no tokenizer; `report` records it.

    Raises:
        ValueError: as `prepare` and `decontaminate`, or a validation set cannot be read.
    """
    settings = _settings(config)
    prepared = prepare(settings, report)
    return decontaminate(settings, prepared, _sets_to_compare(config, prepared, report), report)


def held_out_problems(config: Config) -> list[Prompt]:
    """Returns the problems that `data.held_out` sets aside; reads no file if there are none.

    Raises:
        ValueError: there are no training prompts, or as `prepare`.
    """
    if not config.data.held_out:
        return []
    if config.data.train is None:
        raise ValueError(
            f"data.held_out={config.data.held_out} with data.train=null: expected training prompts to set a part of "
            "aside; set data.train=FILE, or data.held_out=0"
        )
    return prepare(_settings(config), DataReport()).held_out


def training_prompts(config: Config) -> list[Prompt]:
    """Returns the prompts of all training files, with the suffix, including the held-out ones.

    Raises:
        ValueError: a file cannot be read.
    """
    files = [with_suffix(load_prompts(file), config.data.suffix)[0] for file in config.data.train_files]
    return [prompt for prompts in files for prompt in prompts]


def validation_problems(config: Config) -> dict[str, list[Prompt]]:
    """Returns the problems of all validation sets, with the suffix.

    Raises:
        ValueError: as `held_out_problems`, or a file cannot be read.
    """
    sets = {
        name: with_suffix(load_prompts(path), config.data.suffix)[0] for name, path in config.data.validation.items()
    }
    return sets | ({HELD_OUT: held_out_problems(config)} if config.data.held_out else {})


def say_shares(config: Config, sizes: Sequence[int], report: DataReport) -> None:
    """Reports each file's share of a step's prompts, if files have weights; `sizes`: the files' numbers of prompts."""
    weights = config.data.train
    if not isinstance(weights, dict):
        return
    total = sum(weights.values())
    report.content["shares"] = {file: weight / total for file, weight in weights.items()}
    shares = zip(report.content["shares"].items(), sizes, strict=True)
    parts = (f"{share:.1%} from {file} ({size:,} prompts)" for (file, share), size in shares)
    report.say(f"data.train: {', '.join(parts)}")


def write_report(report: DataReport, directory: Path) -> str | None:
    """Writes OUTPUT/data.json; returns a warning if an earlier start of the run had other training prompts."""
    file, warning = directory / REPORT, None
    if file.exists():
        before = read_json(file, "what was done to the prompts", "remove the file")
        if before.get("fingerprint") != report.content["fingerprint"]:
            warning = (
                f"{file}: the earlier start had other training prompts ({before.get('prompts')} then, "
                f"{report.content['prompts']} now; a chat template that writes the date makes other prompts every "
                "day), so the steps from here on visit other prompts than they would have"
            )
    write_atomically(file, json.dumps({"format": FORMAT, **report.content}, indent=1, ensure_ascii=False) + "\n")
    return warning


def _settings(config: Config) -> Preparation:
    data, weighted = config.data, isinstance(config.data.train, dict)
    return Preparation(data.train_files, weighted, data.suffix, data.held_out, data.deduplicate, data.contamination)


def _sets_to_compare(config: Config, prepared: PreparedPrompts, report: DataReport) -> dict[str, list[Prompt]]:
    """Returns the validation sets that exist, with the suffix. A set that the run does not evaluate need not exist."""
    sets: dict[str, list[Prompt]] = {}
    for name, path in config.data.validation.items():
        if not config.evaluation.every and not Path(path).is_file():
            report.say(f"data.validation.{name}={path}: there is no such file, so data.train is not compared with it")
            continue
        sets[name], counts = with_suffix(load_prompts(path), config.data.suffix)
        say_suffix(counts, f"data.validation.{name}", config.data.suffix, report)
    return sets | ({HELD_OUT: prepared.held_out} if prepared.held_out else {})
