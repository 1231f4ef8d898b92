"""On-policy representation distillation, start to end: read `train` and you have read the system.

Left to others: what a run holds and what happens around its steps (`run.py`), how a step is made exact under any layout
(`megatron/`, `teacher/`), where rollouts come from (`rollout/`), what is measured on validation sets (`evaluation/`).
Every rank runs this same loop.
"""

from __future__ import annotations

from nemo_oprd.config.schema import Config
from nemo_oprd.run import Run


def train(config: Config) -> None:
    """Distils `config.student` on its own rollouts into the run directory `config.output` (docs/runs.md).

    Raises:
        ValueError: bad configuration, models or data, before anything expensive starts; or `train.stop_after_skipped`
            steps in a row with an update whose loss or gradient is not finite.
        Stopped: the process was asked to stop by a signal; the run has saved and can go on.
    """
    with Run(config) as run:
        run.evaluate_before()
        for step in range(run.first_step, config.train.steps):
            with run.clock("generate"):
                rollouts = run.rollouts(step)
            measured, update = run.learn(step, rollouts)
            with run.clock("sync"):
                run.engine.update_weights(run.system.student)
            run.log_step(step + 1, rollouts, measured, update)
            run.validation.after(run.engine, step + 1)
            run.save_after(step + 1, update)
        run.finish()
