"""Translation of a NeMo-RL recipe's optimizer and learning-rate schedule to this project's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nemo_oprd.config.schema import TrainConfig
from nemo_oprd.integrations.from_nemo_rl.recipe import Reader, Recipe, Row, Translated, wrong


def _if_there(read: Callable[..., Any], default: Any) -> Reader:
    """Makes a reader: `default` for a null key, and None, which leaves our default, for a missing one."""
    return lambda recipe, key: read(recipe, key, default=default) if recipe.names(key) else None


def _adam_betas(recipe: Recipe, key: str) -> list[float] | None:
    """Reads Megatron's two keys; the default here replaces a missing one."""
    betas = [recipe.number(f"{key}{number}") for number in (1, 2)]
    given = [default if beta is None else beta for beta, default in zip(betas, TrainConfig().betas, strict=True)]
    return None if betas == [None, None] else given


def _list_of_betas(recipe: Recipe, key: str) -> list[float] | None:
    betas = recipe.get(key)
    if betas is None:
        return None
    if not isinstance(betas, list) or len(betas) != 2:
        raise wrong(key, betas, "a list of two numbers")
    return [recipe.number(f"{key}.{number}") for number in (0, 1)]


_NO_CLIPPING_FOR_NULL = _if_there(Recipe.not_negative, default=0.0)
_MEGATRON = "policy.megatron_cfg.optimizer"
_MEGATRON_OPTIMIZER: tuple[Row, ...] = (
    *((f"{_MEGATRON}.{name}", f"train.{name}", Recipe.number) for name in ("lr", "min_lr", "weight_decay", "adam_eps")),
    (f"{_MEGATRON}.adam_beta", "train.betas", _adam_betas),
    (f"{_MEGATRON}.use_distributed_optimizer", "train.distributed_optimizer", _if_there(Recipe.flag, default=False)),
    # Megatron clips at its own key; without it, at 1, which is the default here, too
    (f"{_MEGATRON}.clip_grad", "train.clip_grad", _NO_CLIPPING_FOR_NULL),
)
_TORCH_OPTIMIZER: tuple[Row, ...] = (
    ("policy.optimizer.kwargs.lr", "train.lr", Recipe.number),
    ("policy.optimizer.kwargs.weight_decay", "train.weight_decay", Recipe.number),
    ("policy.optimizer.kwargs.eps", "train.adam_eps", Recipe.number),
    ("policy.optimizer.kwargs.betas", "train.betas", _list_of_betas),
    ("policy.max_grad_norm", "train.clip_grad", _NO_CLIPPING_FOR_NULL),
)
# whether Megatron trains -> (the key of the optimizer's name, AdamW's name, the optimizer's other keys)
_OPTIMIZERS: dict[bool, tuple[str, str, tuple[Row, ...]]] = {
    True: (f"{_MEGATRON}.optimizer", "adam", _MEGATRON_OPTIMIZER),
    False: ("policy.optimizer.name", "AdamW", _TORCH_OPTIMIZER),
}


def translate_optimizer(recipe: Recipe, made: Translated) -> None:
    """Sets train.lr and what belongs to it, after train.steps was set. Raises ValueError for a wrong value."""
    megatron = recipe.flag("policy.megatron_cfg.enabled")
    key, adam, rows = _OPTIMIZERS[megatron]
    name = recipe.text(key, adam)
    if name.rpartition(".")[2] != adam:
        made.note(f"{key}={name}: AdamW is taken, the one optimizer here")
    made.take(recipe, rows)
    style, warmup = _megatron_schedule(recipe, made) if megatron else _torch_schedule(recipe, made)
    made.set("train.schedule", style if style in ("constant", "cosine") else "constant")
    if style not in ("constant", "cosine"):
        made.note(f"the schedule {style} of the learning rate: constant is taken")
    steps = made.get("train.steps", TrainConfig().steps)
    made.set("train.warmup_fraction", round(min(1.0, warmup / steps), 6))
    if warmup > steps:
        made.note(
            f"the warm-up of {warmup} steps is longer than the run of {steps}: here the last step has the full "
            "learning rate"
        )


def _megatron_schedule(recipe: Recipe, made: Translated) -> tuple[str, int]:
    """Returns (name of the schedule, steps of warm-up); notes a gradient clipping that Megatron does not read."""
    taken, unused = made.get("train.clip_grad", TrainConfig().clip_grad), recipe.not_negative("policy.max_grad_norm")
    if unused is not None and unused != taken:
        made.note(
            f"policy.max_grad_norm={unused}: Megatron clips at {_MEGATRON}.clip_grad, here train.clip_grad={taken}"
        )
    style = recipe.text("policy.megatron_cfg.scheduler.lr_decay_style", "constant")
    return style, recipe.not_negative("policy.megatron_cfg.scheduler.lr_warmup_iters", 0, whole=True)


def _torch_schedule(recipe: Recipe, made: Translated) -> tuple[str, int]:
    """Returns (name of the schedule, steps of warm-up) of one of torch's schedulers, or of a list of them in a row."""
    given = recipe.peek("policy.scheduler")
    keys = ["policy.scheduler"] if isinstance(given, dict) else []
    if isinstance(given, list):
        keys = [f"policy.scheduler.{number}" for number in range(len(given))]
    style, warmup = "constant", 0
    for key in keys:
        name = recipe.text(f"{key}.name", "").rpartition(".")[2]
        if name == "LinearLR":
            warmup += _linear(recipe, made, key, first=key == keys[0])
        elif name == "CosineAnnealingLR":
            style = "cosine"
            made.set("train.min_lr", recipe.not_negative(f"{key}.kwargs.eta_min"))
        elif name == "ConstantLR":
            factor = recipe.number(f"{key}.kwargs.factor", 1 / 3)
            recipe.get(f"{key}.kwargs")
            if factor != 1:
                made.note(f"{key}=ConstantLR with factor={factor:.6g}: not taken, the learning rate stays train.lr")
        elif name:
            style = name
        if recipe.peek(f"{key}.milestones") == [warmup]:  # other milestones stay unread and get a note
            recipe.get(f"{key}.milestones")
    return style, warmup


def _linear(recipe: Recipe, made: Translated, key: str, *, first: bool) -> int:
    """Returns the steps of a linear warm-up, with torch's defaults; 0 for a LinearLR that is no warm-up."""
    kwargs = f"{key}.kwargs"
    start, end = recipe.number(f"{kwargs}.start_factor", 1 / 3), recipe.number(f"{kwargs}.end_factor", 1.0)
    steps = recipe.not_negative(f"{kwargs}.total_iters", 5, whole=True)
    what = f"{key}=LinearLR from start_factor={start:.6g} to end_factor={end:.6g} in total_iters={steps}"
    if not first or not start < end or end != 1:
        made.note(f"{what}: not taken; a linear schedule is a warm-up to train.lr at the start only")
        return 0
    if start != 0:
        made.note(f"{what}: the warm-up starts at 0 here")
    return int(steps)
