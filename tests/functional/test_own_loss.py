"""A loss of one's own as docs/losses.md shows it: the page holds the example, and its gradients are the reference's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from bad_inputs import GOLDEN, ROOT
from layout_cases import check_result
from plain_computation import expected_result
from pool import Pools

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import reference
from nemo_oprd.losses.divergences import forward_kl
from nemo_oprd.losses.registry import DIVERGENCES, ROW_LOSSES
from nemo_oprd.rollout.replay import read_rollouts

PAGE = (ROOT / "docs" / "losses.md").read_text()
EXAMPLE = "examples/own_loss.py"
SETTINGS = ["loss.representation.kind=examples.own_loss:huber", "loss.representation.kind_args.delta=0.5"]
VOCABULARY = 61
LAYOUTS = {
    "TP2": ["student.parallel.tensor=2"],
    "PP2": ["student.parallel.pipeline=2", "loss.representation.dim_reduction=sum"],
}
TOLERANCE = 1e-5


def test_the_page_shows_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert (ROOT / EXAMPLE).read_text() in blocks
    assert all(setting in PAGE for setting in SETTINGS)
    assert inspect.getsource(forward_kl) in blocks


def test_the_page_names_every_built_in_kind() -> None:
    for kind in (*ROW_LOSSES, *DIVERGENCES):
        assert f"| `{kind}` |" in PAGE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_against_the_reference(pools: Pools, tmp_path: Path, layout: str) -> None:
    models = [f"{role}.hf_path={GOLDEN / role}" for role in ("student", "teacher")]
    settings = [*models, f"rollout.replay={GOLDEN / 'rollouts.jsonl'}", *SETTINGS, *LAYOUTS[layout]]
    settings.append(f"output={tmp_path / 'out'}")
    printed = pools[2].run("own_loss_cases:verify_against_reference", overrides=settings)
    deviation = re.search(r"largest gradient deviation over \d+ parameters: (\S+)", printed)
    assert deviation is not None and float(deviation[1]) < TOLERANCE, printed

    # the reference with torch's own Huber loss in place of the example's
    config = load_config("verify", settings)

    def huber(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
        value_ND = torch.nn.functional.huber_loss(student_ND, teacher_ND, delta=0.5, reduction="none")
        return value_ND.sum(-1) if dim_reduction == "sum" else value_ND.mean(-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_oprd.distillation.reference.row_loss", lambda loss: huber)
        expected = expected_result(config, read_rollouts(str(config.rollout.replay), VOCABULARY))
    check_result(tmp_path / "out", expected, layout, TOLERANCE)


def test_both_branches_of_the_example_are_used(tmp_path: Path) -> None:
    """Golden states differ by less and by more than delta, or the comparison would see one branch only."""
    models = [f"{role}.hf_path={GOLDEN / role}" for role in ("student", "teacher")]
    replay = f"rollout.replay={GOLDEN / 'rollouts.jsonl'}"
    shares = []

    def seen(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
        shares.append(float(((student_ND - teacher_ND).abs() > 0.5).double().mean()))
        return (student_ND - teacher_ND).square().mean(-1)

    config = load_config("verify", [*models, replay, "output=unused"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_oprd.distillation.reference.row_loss", lambda loss: seen)
        reference(config, read_rollouts(str(config.rollout.replay), VOCABULARY))
    assert 0.05 < sum(shares) / len(shares) < 0.95, shares
