"""Greedy evaluation on three sets equals an independent script: transformers' `generate` and its own grading."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import plain_evaluation
import pytest
from pool import Pools

from nemo_oprd.tools.toy import pair
from tests.support import known_sums as doctor_models

LIMIT = 13  # `\boxed{2007}` and the end-of-sequence token


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that solves some of the 36 sums, and a teacher that solves all."""
    root = tmp_path_factory.mktemp("greedy")
    doctor_models.make_pair(root)
    return root


def problems(*pairs: tuple[int, int], form: str = "{}", kind: str = "boxed") -> list[dict[str, str]]:
    return [{"prompt": pair.prompt_text(a, b), "answer": form.format(a + b), "kind": kind} for a, b in pairs]


# the sums that the models have seen; sums that they have not, with reference answers as AIMO has them ("142.0"); both
SETS = {
    "sums": problems(*doctor_models.PROBLEMS),
    "unseen": problems(*((1000 + 7 * i, 1003 + i) for i in range(12)), form="{}.0", kind="number"),
    "mixed": problems(*doctor_models.PROBLEMS[::3], (1001, 1999), (4000, 5000), (9999, 9999), form="{:d}"),
}


def write(rows: list[dict[str, str]], name: str, root: Path) -> Path:
    """The first set as plain JSONL, the others in the conversation shape, the last one as parquet if that is there."""
    file = root / f"{name}.jsonl"
    kept: list[dict[str, Any]] = [{"problem": row["prompt"], "answer": row["answer"]} for row in rows]
    if name != "sums":
        kept = [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "data_source": name,
                "reward_model": {"ground_truth": row["answer"], "style": "rule"},
            }
            for row in rows
        ]
    if name == "mixed":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist(kept), file.with_suffix(".parquet"))
        return file.with_suffix(".parquet")
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return file


def test_the_script_knows_nothing_of_this_project() -> None:
    assert not re.search(r"(?:import|from) nemo_oprd", Path(plain_evaluation.__file__).read_text())


@pytest.mark.parametrize(("role", "tensor"), [("student", 2), pytest.param("teacher", 1, marks=pytest.mark.slow)])
def test_equals_transformers_and_own_grading(
    pools: Pools, models: Path, tmp_path: Path, role: str, tensor: int
) -> None:
    files = ", ".join(f"{name}: {write(rows, name, tmp_path)}" for name, rows in SETS.items())
    output = tmp_path / "evaluation"
    overrides = [
        f"student.hf_path={models / role}", "teacher.hf_path=none", f"data.validation={{{files}}}",
        "evaluation.graders.unseen=number", "evaluation.temperature=0", "evaluation.samples=1",
        f"evaluation.max_new_tokens={LIMIT}", f"rollout.tensor={tensor}", f"output={output}",
    ]  # fmt: skip
    pools[2].run("cases:run_evaluate", overrides=overrides)
    found = json.loads((output / "evaluation.json").read_text())
    solved = {}
    for name, rows in SETS.items():
        expected = plain_evaluation.evaluate(models / role, rows, LIMIT)
        lines = [json.loads(line) for line in (output / "generations" / f"{name}.jsonl").read_text().splitlines()]
        assert [line["response_ids"] for line in lines] == expected.pop("responses")
        assert {metric: found[f"val/{name}/{metric}"] for metric in expected} == expected
        assert found[f"val/{name}/pass@1"] == found[f"val/{name}/maj@1"] == expected["avg@1"]
        solved[name] = expected["avg@1"]
    print(role, solved)
    if role == "teacher":
        assert solved["sums"] == 1 and 0 < solved["mixed"] < 1
    else:
        assert 0 < solved["sums"] < 1
