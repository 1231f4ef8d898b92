"""`nemo-oprd data`: shows how a run would prepare its prompts, without a model.

It reads the files, and prints the lines of a run's log about the suffix, held-out problems, duplicates, weights and
contamination. If the student's tokenizer exists, it shows a prompt of each data source as the student reads it.
Lengths in tokens are checked by `train` and `doctor`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nemo_oprd.commands.options import add_config, config_of, json_file, origin
from nemo_oprd.config.schema import Config
from nemo_oprd.data.preparation import DataReport, shortened
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.run.checks import check_prompts_given
from nemo_oprd.run.preflight import check_files
from nemo_oprd.run.prompt_files import FORMAT, prepare_prompts, say_shares
from nemo_oprd.runtime.files import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--json", metavar="FILE", help="also write the counts and examples")


def run(options: argparse.Namespace) -> None:
    """Prints one line for each step of the preparation, and an example of each file as the template gets it.

    Raises:
        ValueError: a file cannot be read, or `train` would refuse the prompts.
    """
    file_made = json_file(options, r'\{\s*"format":')
    config = config_of(options)
    check_prompts_given(config)
    check_files(config, "data", origin(options))
    report = DataReport()
    prepared = prepare_prompts(config, report)
    say_shares(config, [len(prompts) for prompts in prepared.files], report)
    read = [entry["prompts"] for entry in report.content["files"]]
    for file, prompts, number in zip(config.data.train_files, prepared.files, read, strict=True):
        print(f"{file}: {number:,} prompts, {len(prompts):,} to train on", end="")
        print(f", e.g. {shortened(prompts[0].text)!r}" if prompts else "")
    report.lines += _rendered(config, [prompt for prompts in prepared.files for prompt in prompts])
    for line in report.lines:
        print(line)
    compared = report.content.get("contamination", {"sets": {}})["sets"]
    clean = [name for name, found in compared.items() if not found["contained"]]
    if clean:
        print(f"data.contamination: no problem of {', '.join(clean)} was found in data.train")
    if file_made is not None:
        text = json.dumps({"format": FORMAT, **report.content}, indent=1, ensure_ascii=False)
        write_atomically(file_made, f"{text}\n")


def _rendered(config: Config, prompts: list[Prompt]) -> list[str]:
    """Returns lines: a prompt of each data source in the student's chat template, and the fields that it leaves out."""
    directory = Path(config.student.hf_path or "")
    if config.student.hf_path is None or not directory.is_dir():
        return ["data.train: no prompt is shown as the student reads it, because student.hf_path is no directory here"]
    from nemo_oprd.data.template_use import examples, template_notes
    from nemo_oprd.data.tokenizer import Tokenizer  # seconds to import

    try:
        tokenizer = Tokenizer.load(directory)
        tokenizer.set_chat_template(config.data.chat_template, config.data.chat_template_args)
        shown = [f"{source}, as the student reads it: {text!r}" for source, text in examples(tokenizer, prompts)]
        return shown + template_notes(tokenizer, prompts, "data.train", "the student")
    except ValueError as error:  # `train` refuses it
        return [f"data.train: no prompt is shown as the student reads it: {error}"]
