"""What the pool's workers run: the canary on the models of a configuration, perhaps with something planted."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from nemo_oprd.config.loading import load_config


def proofs(overrides: list[str], cache: str, plant: str | None = None) -> list[tuple[str, bool, str, dict]]:
    """(key, refused, line, layer -> deviation of the worst row) of student and teachers, as they are built.

    Args:
        cache: XDG_CACHE_HOME.
        plant: the name of a function below, which changes the student.
    """
    from nemo_oprd.canary.layer_by_layer import layered_states
    from nemo_oprd.run import canary
    from nemo_oprd.run.models import build_distiller, make_plan, world_size
    from nemo_oprd.run.resolve import resolve

    plan = make_plan(resolve(load_config("verify", overrides), world_size()))
    distiller = build_distiller(plan)
    if plant is not None and distiller.student.role.is_member:
        with torch.no_grad():
            globals()[plant](distiller.student)
    # another process for each of them would import transformers again; test_canary.py of the unit tests starts it
    there = mock.patch.object(canary, "reference_states", layered_states)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=cache), there:
        found = list(canary.prove_models(plan, distiller))
    return [(p.key, p.refused, p.line, {} if p.verdict is None else p.verdict.worst) for p in found]


def train(overrides: list[str], cache: str, *, rotated_otherwise: bool) -> tuple[str, list[str]]:
    """(The error of `train`, or "", what it logged), if own families were built by another program.

    Args:
        cache: XDG_CACHE_HOME.
        rotated_otherwise: whether the models' frequencies are not those of their config.
    """
    import cases
    import doctor_cases

    from nemo_oprd.canary.layer_by_layer import layered_states
    from nemo_oprd.run import canary

    lines = _Lines()
    logging.getLogger("nemo_oprd").addHandler(lines)
    with ExitStack() as stack:
        stack.callback(logging.getLogger("nemo_oprd").removeHandler, lines)
        stack.enter_context(mock.patch.dict(os.environ, XDG_CACHE_HOME=cache))
        stack.enter_context(mock.patch.object(canary, "reference_states", layered_states))
        stack.enter_context(mock.patch.object(canary, "OWN", "another program"))
        if rotated_otherwise:
            stack.enter_context(doctor_cases.rotated_otherwise())
        try:
            cases.run_train(overrides)
        except ValueError as error:
            return str(error), lines.found
    return "", lines.found


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _layer(student: Any, number: int) -> Any:
    """This rank's layer `number`, if it has it."""
    layers = [layer for chunk in student.chunks for layer in chunk.decoder.layers if layer.layer_number == number]
    return layers[0] if layers else None


def rank_stale(student: Any) -> None:
    """The last tensor rank has other weights of one projection."""
    layer = _layer(student, 3)
    if layer is not None and student.role.member_coords.tensor == student.role.layout.tensor - 1:
        layer.mlp.linear_fc2.weight.mul_(1.001)


def heads_permuted(student: Any) -> None:
    """Two queries of one group of heads are exchanged on every tensor rank."""
    layer = _layer(student, 2)
    if layer is not None:
        weight = layer.self_attention.linear_qkv.weight
        groups = weight.view(student.spec.num_kv_heads // student.role.layout.tensor, 4, -1, weight.shape[1])
        groups.copy_(groups[:, [1, 0, 2, 3]])


def rotary_base(student: Any) -> None:
    """All frequencies are a little lower."""
    for chunk in student.chunks:
        chunk.frequencies.inv_freq.mul_(0.99)


def norm_less_one(student: Any) -> None:
    """The final norm multiplies by w - 1."""
    for chunk in student.chunks:
        if chunk.decoder.final_layernorm is not None:
            chunk.decoder.final_layernorm.weight.sub_(1)


def layers_exchanged(student: Any) -> None:
    """Two layers have each other's number."""
    for chunk in student.chunks:
        for layer in chunk.decoder.layers:
            layer.layer_number = {3: 4, 4: 3}.get(layer.layer_number, layer.layer_number)
