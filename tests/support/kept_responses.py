"""Kept responses for the tests of `nemo-oprd grade`, and how they run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_oprd.cli import main

TEXTS = [r"so \boxed{4}", r"\boxed{5}", "no box", r"\boxed{1}, no: \boxed{20/2}", r"Answer: 7", r"\boxed{ 07 }"]
ANSWERS = ["4", "10", "7"]


def write_generations(directory: Path, texts: list[str] = TEXTS, name: str = "sums", **changes: Any) -> Path:
    """Two responses to each of the ANSWERS, as `evaluate` writes them; a change to None leaves the field out."""
    lines = []
    for i, text in enumerate(texts):
        line = {
            "problem": i // 2,
            "sample": i % 2,
            "prompt_ids": [1],
            "response_ids": [2] * (i + 1),
            "response": text,
            "finish_reason": "stop" if i % 3 else "length",
            "seed": [0, 2, 0, i],
            "model": "m@0",
            "answer": ANSWERS[i // 2],
            "data_source": "toy",
            **changes,
        }
        lines.append({key: value for key, value in line.items() if value is not None})
    file = directory / "generations" / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def files_of(directory: Path) -> dict[str, str]:
    found = [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.parent.name != "generations" and file.name != ".lock"
    ]
    return {str(file.relative_to(directory)): file.read_text() for file in found}


def grade(*arguments: object) -> None:
    main(["grade", *map(str, arguments)])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        grade(*arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line
