"""What the pool's workers run: the student's log-probabilities of sampled tokens, at a layout."""

from __future__ import annotations

import numpy as np

from nemo_oprd.data.token_ids import TokenIds


def student_logprobs(overrides: list[str], count: int, sampled: TokenIds | None) -> tuple[np.ndarray, ...]:
    """(response, token, log-probability) of `count` tokens, the same on every rank."""
    import cases
    import torch.distributed as dist

    from nemo_oprd.config.loading import load_config
    from nemo_oprd.distillation import sampling_check

    distiller, rollouts = cases.models_and_rollouts(overrides)
    table = sampling_check._draw(rollouts, count, 0, 1)
    config = load_config("verify", overrides)
    found = sampling_check.student_logprobs(distiller.student, rollouts, table, config, sampled)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found.tobytes())
    assert set(everyone) == {found.tobytes()}
    return table.response, table.token, found


def check(overrides: list[str], change: dict[str, float]) -> tuple[dict[str, float], str | None]:
    """(Metrics, message) of the check of an engine that samples from the student, but with `change` in its settings."""
    from dataclasses import replace

    import cases

    from nemo_oprd.batch.token_table import make_rows
    from nemo_oprd.batch.types import Rollout
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.distillation import sampling_check

    distiller, rollouts = cases.models_and_rollouts(overrides)
    config = load_config("verify", overrides)
    sampled = [Rollout(r.prompt_ids, r.response_ids, finish_reason="stop") for r in rollouts if len(r.response_ids)]
    table = make_rows(sampled, positions="all", k=1, position="predicting", aggregation="token_mean")
    settings = load_config("verify", [*overrides, *(f"{key}={value}" for key, value in change.items())])
    values = sampling_check.student_logprobs(distiller.student, sampled, table, settings, None)
    parts = [values[table.response == i].tolist() for i in range(len(sampled))]
    sampled = [replace(rollout, logprobs=part) for rollout, part in zip(sampled, parts, strict=True)]
    # recorded rollouts are not checked, so the setting that names them goes
    config = replace(config, rollout=replace(config.rollout, replay=None))
    try:
        return sampling_check.SamplingCheck(config, None)(distiller.student, sampled, 1), None
    except ValueError as error:
        return {}, str(error)
