"""Bad input: one line that names the value, the expectation and the fix, before anything expensive, from one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input_case import Case, Place
from bad_input_cases import CASES
from bad_input_cases.run_directories import SECRET
from bad_inputs import DOCUMENT, arguments_of, contents, document, fresh, readable, run

MESSAGES: dict[str, str] = {}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("good"))
    place.make()
    return place


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(good: Place, tmp_path: Path, case: Case) -> None:
    place = fresh(good, tmp_path / "case")
    case.prepare(place)
    before = contents(place.root)
    status, out, err = run(case, place)
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for text in case.says:
        assert text.replace("{root}", str(place.root)).replace("{{", "{").replace("}}", "}") in err
    assert SECRET not in err
    assert contents(place.root) == before
    MESSAGES[case.name] = readable(case, err.strip().removeprefix("error: "), place)


def test_there_are_enough_cases_with_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 70


def test_the_document_shows_these_messages() -> None:
    if len(MESSAGES) < len(CASES):
        pytest.skip("needs all cases to have run")
    assert DOCUMENT.read_text() == document(MESSAGES), "run python tests/functional/bad_inputs.py --write"


# an unknown key with two ranks is in tests/e2e/test_readme.py, too: test_a_mistake_is_one_line
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("unknown key", marks=pytest.mark.slow),
        pytest.param("key as a setting", marks=pytest.mark.slow),
        "world that does not fit",
    ],
)
def test_one_rank_speaks(good: Place, tmp_path: Path, name: str) -> None:
    """Two real ranks: one line from rank 0, nothing from the other, status 2."""
    case = next(case for case in CASES if case.name == name)
    place = fresh(good, tmp_path / "case")
    case.prepare(place)
    overrides = ["student.parallel.tensor=3"] if name == "world that does not fit" else []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    ended = subprocess.run(
        [*torchrun, "--redirects", "3", "--log-dir", str(tmp_path / "logs"), "-m", "nemo_oprd"]
        + arguments_of(case, place)
        + overrides,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = {log.parent.name: log.read_text() for log in (tmp_path / "logs").rglob("std*.log")}
    texts = [text for text in said.values() if text]
    assert ended.returncode != 0
    assert len(texts) == 1 and texts[0].startswith("error: ") and texts[0].count("\n") == 1, (said, ended.stderr)
    assert SECRET not in texts[0]
    assert "exitcode  : 2 " in ended.stderr
    assert not place.output.exists()
