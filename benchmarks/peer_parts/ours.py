"""This project's updates for `benchmarks.peers`: what `nemo_oprd.train` does between sampling and weight transfer."""

from __future__ import annotations

import torch

from benchmarks.peer_parts.cases import BETAS, CLIP, EPS, RATE, WEIGHT_DECAY
from benchmarks.peer_parts.process import WARM_UPS, Measurement
from nemo_oprd import __version__
from nemo_oprd.config.loading import load_config
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.run.models import distiller_for
from nemo_oprd.train import accumulate_gradients

OUTPUT = ["loss.output.weight=1", "loss.representation.layers=none"]
# task -> settings of the loss; all are means over all tokens of the batch, as the peers' are
TASKS = {
    "full_vocab": ["loss.output.kind=full_vocab", *OUTPUT],
    "top_16": ["loss.output.kind=top_k", "loss.output.k=16", *OUTPUT],
    "sampled_token": ["loss.output.kind=sampled_token", *OUTPUT],
    "mse": ["loss.representation.layers=all"],
}


def settings(measured: Measurement) -> list[str]:
    """The command line of a run with this case's loss and the shared settings of the optimizer."""
    spec = measured.spec
    last_k = spec["last_k"]
    rows = ["positions=all"] if last_k is None else ["positions=last_k", f"k={last_k}"]
    return [
        *(f"{role}.hf_path={spec[role]}" for role in ("student", "teacher")),
        f"rollout.replay={spec['rollouts']}",
        "output=unused",
        "precision=fp32",
        "train.tokens_per_microbatch=1024",  # a pack of a batch whose longest sequence has some 1,000 tokens
        f"train.lr={RATE}",
        f"train.clip_grad={CLIP}",
        f"train.weight_decay={WEIGHT_DECAY}",
        f"train.betas={list(BETAS)}",
        f"train.adam_eps={EPS}",
        *(f"loss.representation.{row}" for row in rows),
        "loss.representation.aggregation=token_mean",
        "loss.output.aggregation=token_mean",
        *TASKS[spec["task"]],
    ]


def main() -> None:
    """Builds student and teacher, and measures the updates."""
    measured = Measurement()
    torch.set_num_threads(measured.spec["threads"])
    config = load_config("verify", settings(measured))
    distiller = distiller_for(config)
    student = distiller.student
    rollouts = read_rollouts(str(config.rollout.replay), student.spec.vocab_size)
    measured.ready()
    for step in range(WARM_UPS + measured.spec["updates"]):
        with measured.update():
            batch = distiller.batch(rollouts, distiller.objective_of(step))
            metrics, _ = accumulate_gradients(distiller, batch)
            update = student.optimizer_step(step, batch.objective, metrics)
        assert metrics is not None and update is not None and update.nonfinite_reason is None
        measured.losses.append(metrics.loss)
        measured.norms.append(update.grad_norm)
    trained = (p.numel() for chunk in student.chunks for p in chunk.parameters() if p.requires_grad)
    parameters = sum(trained)
    distiller.close()
    measured.finish(parameters=parameters, version=__version__)


if __name__ == "__main__":
    main()
