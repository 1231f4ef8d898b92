"""The optimizer and the schedule of the learning rate of a recipe of NeMo-RL, in this project's keys."""

from __future__ import annotations

from nemo_oprd.commands.from_nemo_rl.recipe import Recipe, Translated, wrong
from nemo_oprd.config.schema import TrainConfig

# torch's own values, which hold where a recipe names none
_LINEAR_START, _LINEAR_END, _LINEAR_STEPS, _CONSTANT_FACTOR = 1 / 3, 1.0, 5, 1 / 3


def translate_optimizer(recipe: Recipe, made: Translated) -> None:
    """Sets train.lr and what belongs to it, after train.steps was set.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """
    megatron = recipe.flag("policy.megatron_cfg.enabled")
    style, warmup = _megatron(recipe, made) if megatron else _torch(recipe, made)
    made.set("train.schedule", style if style in ("constant", "cosine") else "constant")
    if style not in ("constant", "cosine"):
        made.note(f"the schedule {style} of the learning rate: constant is taken")
    steps = made.config.get("train", {}).get("steps", TrainConfig().steps)
    made.set("train.warmup_fraction", round(min(1.0, warmup / steps), 6))
    if warmup > steps:
        made.note(
            f"the warm-up of {warmup} steps is longer than the run of {steps}: here the last step has the full "
            "learning rate"
        )


def _megatron(recipe: Recipe, made: Translated) -> tuple[str, int]:
    """Megatron's optimizer; returns the name of the schedule and the steps of warm-up."""
    key, schedule = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
    _adam(made, f"{key}.optimizer", recipe.text(f"{key}.optimizer", "adam"), "adam")
    for name in ("lr", "min_lr", "weight_decay", "adam_eps"):
        made.set(f"train.{name}", recipe.number(f"{key}.{name}"))
    betas = [recipe.number(f"{key}.adam_beta{number}") for number in (1, 2)]
    if betas != [None, None]:
        defaults = TrainConfig().betas
        made.set("train.betas", [default if b is None else b for b, default in zip(betas, defaults, strict=True)])
    if recipe.names(f"{key}.use_distributed_optimizer"):
        made.set("train.distributed_optimizer", recipe.flag(f"{key}.use_distributed_optimizer"))
    # Megatron clips at its own key; without it, at 1, which is the default here, too
    if recipe.names(f"{key}.clip_grad"):
        made.set("train.clip_grad", recipe.number(f"{key}.clip_grad", 0.0, low=0))
    taken = made.config.get("train", {}).get("clip_grad", TrainConfig().clip_grad)
    unused = recipe.number("policy.max_grad_norm", low=0)
    if unused is not None and unused != taken:
        made.note(f"policy.max_grad_norm={unused}: Megatron clips at {key}.clip_grad, here train.clip_grad={taken}")
    style = recipe.text(f"{schedule}.lr_decay_style", "constant")
    return style, recipe.number(f"{schedule}.lr_warmup_iters", 0, whole=True, low=0)


def _torch(recipe: Recipe, made: Translated) -> tuple[str, int]:
    """torch's optimizer; returns the name of the schedule and the steps of warm-up."""
    key = "policy.optimizer.kwargs"
    name = recipe.text("policy.optimizer.name", "AdamW")
    _adam(made, "policy.optimizer.name", name, "AdamW")
    for ours, theirs in (("lr", "lr"), ("weight_decay", "weight_decay"), ("adam_eps", "eps")):
        made.set(f"train.{ours}", recipe.number(f"{key}.{theirs}"))
    betas = recipe.get(f"{key}.betas")
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise wrong(f"{key}.betas", betas, "a list of two numbers")
        made.set("train.betas", [recipe.number(f"{key}.betas.{number}") for number in (0, 1)])
    if recipe.names("policy.max_grad_norm"):
        made.set("train.clip_grad", recipe.number("policy.max_grad_norm", 0.0, low=0))  # null: no clipping, 0 here
    return _torch_schedule(recipe, made)


def _adam(made: Translated, key: str, name: str, adam: str) -> None:
    """Notes an optimizer other than AdamW, whose name is `adam` in this backend."""
    if name.rpartition(".")[2] != adam:
        made.note(f"{key}={name}: AdamW is taken, the one optimizer here")


def _torch_schedule(recipe: Recipe, made: Translated) -> tuple[str, int]:
    """(Name of the schedule, steps of warm-up) of one of torch's schedulers, or of a list of them in a row."""
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
            made.set("train.min_lr", recipe.number(f"{key}.kwargs.eta_min", low=0))
        elif name == "ConstantLR":
            factor = recipe.number(f"{key}.kwargs.factor", _CONSTANT_FACTOR)
            recipe.get(f"{key}.kwargs")
            if factor != 1:
                made.note(f"{key}=ConstantLR with factor={factor:.6g}: not taken, the learning rate stays train.lr")
        elif name:
            style = name
        if recipe.peek(f"{key}.milestones") == [warmup]:  # others are left over
            recipe.get(f"{key}.milestones")
    return style, warmup


def _linear(recipe: Recipe, made: Translated, key: str, *, first: bool) -> int:
    """The steps of a linear warm-up; 0 for a LinearLR that is none."""
    kwargs = f"{key}.kwargs"
    start = recipe.number(f"{kwargs}.start_factor", _LINEAR_START)
    end = recipe.number(f"{kwargs}.end_factor", _LINEAR_END)
    steps = recipe.number(f"{kwargs}.total_iters", _LINEAR_STEPS, whole=True, low=0)
    what = f"{key}=LinearLR from start_factor={start:.6g} to end_factor={end:.6g} in total_iters={steps}"
    if not first or not start < end or end != 1:
        made.note(f"{what}: not taken; a linear schedule is a warm-up to train.lr at the start only")
        return 0
    if start != 0:
        made.note(f"{what}: the warm-up starts at 0 here")
    return int(steps)
