"""The number of samples of the doctor, and the configuration that it builds its models from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_oprd.config.rollout_schema import RolloutConfig
from nemo_oprd.config.schema import Config
from nemo_oprd.run.engine_kinds import ENGINES


@dataclass(frozen=True)
class Settings:
    """The size of the samples."""

    prompts: int = 16  # training prompts of which one response each is sampled
    problems: int = 32  # validation problems that student and teacher answer once each
    max_new_tokens: int = 512  # the longest response, where the run's own limit is not shorter

    def __post_init__(self) -> None:
        """Raises ValueError for a size below 1."""
        for name in ("prompts", "problems", "max_new_tokens"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option}={getattr(self, name)}: expected at least 1; choose a larger number")


def for_diagnosis(config: Config, settings: Settings) -> Config:
    """Returns `config` with a small sample and, unless the teacher reads text, both models' distributions measured.

    The default engine, which needs no installation, replaces recorded rollouts, because the current student is to be
    checked, and servers that others run (`rollout.vllm.endpoints`), because a run may be sampling from them. Dedicated
    servers run on the student's GPUs here, so that no others are needed; they end before the models are built. There is
    no correction, which needs log-probabilities of another engine. Whether the run's evaluations can sample the teacher
    is checked after the files, whose findings say why not.
    """
    rollout = replace(
        config.rollout,
        engine=RolloutConfig().engine if not_sampled(config) else config.rollout.engine,
        vllm=replace(config.rollout.vllm, placement="colocated"),
        per_prompt=1,
        max_new_tokens=min(config.rollout.max_new_tokens, settings.max_new_tokens),
        replay=None,
        save=False,
        correction="off",
    )
    limit = min(evaluation_limit(config), settings.max_new_tokens)
    watch = 0 if config.teacher.reads == "text" else 1
    return replace(
        config,
        rollout=rollout,
        evaluation=replace(config.evaluation, max_new_tokens=limit, teacher=False),
        logging=replace(config.logging, output_metrics_every=watch),
    )


def not_sampled(config: Config) -> str | None:
    """The source of the run's responses, if the doctor samples from another one; else None."""
    if config.rollout.replay is not None:
        return "recorded rollouts"
    kind = ENGINES[config.rollout.engine]
    return f"the servers of {kind.key}.endpoints" if kind.groups(config.rollout, 1).placement == "elsewhere" else None


def evaluation_limit(config: Config) -> int:
    """The most tokens of a response in the run's evaluations."""
    return config.evaluation.max_new_tokens or config.rollout.max_new_tokens
