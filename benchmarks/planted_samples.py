"""The faults and the healthy pairs of `planted_faults.py` that show in responses and forward passes.

The models are those of `known_sums.py`: a student that knows half of 36 sums, and a teacher that knows all.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from benchmarks.planted_cases import Case
from tests.support.planted_models import edit_json, edit_tensors

SETTINGS = (
    "precision=fp32",
    "rollout.max_new_tokens=40",
    "evaluation.max_new_tokens=40",
    "train.tokens_per_microbatch=512",
    "train.steps=20",
    "train.prompts_per_step=8",
)


def sample_overrides(config: str, root: Path) -> list[str]:
    """The settings that put the trained models into a shipped configuration."""
    settings = [f"student.hf_path={root / 'student'}", f"teacher.hf_path={root / 'teacher'}", f"output={root / 'run'}"]
    settings += [f"data.train={root / 'prompts' / 'train.jsonl'}", *SETTINGS]
    settings += [f"data.validation={{heldout: {root / 'prompts' / 'heldout.jsonl'}}}"]
    if config == "quickstart":
        settings += ["student.parallel.tensor=1", "student.checkpoint=null", "teacher.checkpoint=null"]
    return settings


def _shuffled(root: Path) -> None:
    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        order = torch.randperm(25, generator=torch.Generator().manual_seed(0))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][order].clone()

    edit_tensors(root / "teacher", shuffle)


def _massive(root: Path) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:, 7] = 20.0
        for name, tensor in tensors.items():
            if name.endswith(("layernorm.weight", "norm.weight")):
                tensor[7] = 0.0

    edit_tensors(root / "teacher", plant)


def _noisy(root: Path) -> None:
    def disturb(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for tensor in tensors.values():
            tensor += 0.01 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    shutil.rmtree(root / "teacher")
    shutil.copytree(root / "student", root / "teacher")
    edit_tensors(root / "teacher", disturb)


def _damaged(root: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for tensor in tensors.values():
            tensor += 2 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    edit_tensors(root / "teacher", damage)


EXCHANGED = ("student.hf_path={root}/teacher", "teacher.hf_path={root}/student")
SAMPLED_HEALTHY = [
    Case("trained pair: oprd_1p5b", None),
    Case("trained pair: quickstart", None, config="quickstart"),
    Case("trained pair: opd_full_1p5b", None, config="opd_full_1p5b"),
]
SAMPLED_FAULTS = [
    Case("shuffled rows of the vocabulary", "distributions-unrelated", (), _shuffled),
    Case("exchanged models", "teacher-worse", EXCHANGED),
    Case("teacher no better", "teacher-not-better", (), _noisy),
    Case("noise in the teacher's weights", "teacher-worse", (), _damaged),
    Case("a limit that cuts", "responses-cut", ("rollout.max_new_tokens=9",)),
    Case("a grader of another format", "teacher-solves-nothing", ("evaluation.graders={heldout: answer_line}",)),
    Case("massive activations", "massive-activations", (), _massive),
    Case("student without its end", "stop-id-not-sampled", (),
         lambda root: edit_json(root / "student" / "generation_config.json", eos_token_id=[2])),
]  # fmt: skip
