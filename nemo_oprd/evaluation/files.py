"""Where the files of an evaluation are, and how their lines are read and written. Imports no torch.

OUTPUT/generations/SET.jsonl        the responses (`generations.py` writes them)
OUTPUT/grades/SET.jsonl             one grade per response, in the same order
OUTPUT/grades/.SET.part.jsonl       the grades so far, while a set is graded
OUTPUT/disagreements/SET.jsonl      the responses about which text comparison and math-verify disagree
OUTPUT/evaluation.json              metric -> value
OUTPUT/differences.json             metric -> difference from another evaluation (`nemo-oprd grade` writes it)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nemo_oprd.runtime.files import parse_json, replacing, why_no_file

GENERATIONS, GRADES, DISAGREEMENTS = "generations", "grades", "disagreements"
ABOUT, METRICS, DIFFERENCES = "about.json", "evaluation.json", "differences.json"
# fields of a response's line that come from the problem, not from sampling
FACTS = ("answer", "data_source", "subject", "level")


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line; the file appears whole, flushed to the disk. Raises OSError as `replacing`."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_lines(path: Path, expected: str, fix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Where, object) for each line that is not blank; `where` names the file and the line, from 1.

    Raises:
        ValueError: there is no such file, or a line is not a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path}: {why_no_file(path, '.jsonl')}, expected {expected}; {fix}")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            record = parse_json(line, where, expected, fix)
            if not isinstance(record, dict):
                raise ValueError(f"{where} is {type(record).__name__}, expected {expected}; {fix}")
            yield where, record
