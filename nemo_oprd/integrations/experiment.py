"""The run directory and the resume decision of `exp_manager`, for runs of this project. Does not import NeMo.

`exp_manager` belongs to Lightning's loop. It chooses `exp_dir/name/version` (or `explicit_log_dir`), moves the files of
an earlier start into `run_0`, `run_1`, ..., and writes `cmd-args.log` and `git-info.log`. Its checkpoints, loggers and
callbacks need a Lightning trainer that fits a model. Here the run writes its own checkpoints and metrics into the
directory `oprd` below, where `exp_manager` moves nothing, and this module refuses keys whose work Lightning would do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_oprd.config.schema import Config
from nemo_oprd.run.checkpoint_directory import find_checkpoint

# The section `exp_manager` of a program's configuration. Its keys are NeMo's, and so are the defaults except `name` and
# those of resuming: a job that starts again goes on.
DEFAULTS: dict[str, Any] = {
    "exp_dir": None,
    "explicit_log_dir": None,
    "name": "oprd",
    "version": None,
    "use_datetime_version": True,
    "resume_if_exists": True,
    "resume_past_end": False,
    "resume_ignore_no_checkpoint": True,
    "files_to_copy": None,
    "seconds_to_sleep": 5,
}
# NeMo's keys that need Lightning's loop, and this project's replacement of each
COUNTERPARTS = {
    "create_checkpoint_callback": "train.save_every, train.keep_checkpoints and train.keep_best",
    "checkpoint_callback_params": "train.save_every, train.keep_checkpoints and train.keep_best",
    "resume_from_checkpoint": "student.checkpoint",
    "create_tensorboard_logger": "logging.tensorboard",
    "summary_writer_kwargs": "logging.tensorboard",
    "create_wandb_logger": "logging.wandb",
    "wandb_logger_kwargs": "logging.wandb",
    "create_preemption_callback": "nothing: a run that gets SIGTERM or SIGUSR1 saves and stops",
    "max_time_per_run": "sbatch --signal=B:USR1@300, after which a run saves and stops",
    "ema": "nothing for the student; teacher.weights=ema is a teacher that is its moving average",
    "log_step_timing": "nothing: metrics.jsonl has the seconds of every phase",
}
_OFF = (
    "create_checkpoint_callback create_tensorboard_logger create_preemption_callback log_step_timing "
    "disable_validation_on_resume log_tflops_per_sec_per_gpu"
)


def experiment_settings(section: dict[str, Any], processes: int) -> dict[str, Any]:
    """Returns the argument `cfg` of `exp_manager` for a job of `processes` ranks.

    Keys that the program's `section` lacks have their defaults.

    Raises:
        ValueError: a key needs Lightning's loop or is none of `DEFAULTS`, or ranks would choose different directories.
    """
    for key, value in section.items():
        if key in DEFAULTS or value in (None, False):
            continue
        if key in COUNTERPARTS:
            raise ValueError(
                f"exp_manager.{key}={value} is served by Lightning's loop, which does not run; expected it left out: "
                f"use {COUNTERPARTS[key]}"
            )
        raise ValueError(f"exp_manager.{key}={value}: expected one of {', '.join(DEFAULTS)}; remove it")
    settings = {key: section.get(key, default) for key, default in DEFAULTS.items()}
    if processes > 1 and not (settings["resume_if_exists"] or settings["version"] or settings["explicit_log_dir"]):
        raise ValueError(
            f"exp_manager.resume_if_exists=false with {processes} ranks and no version: each rank would name a "
            "directory after its own clock; expected one name: set exp_manager.version or exp_manager.explicit_log_dir"
        )
    # `check_resume` decides on existing checkpoints and complete runs
    return {
        **settings,
        **dict.fromkeys(_OFF.split(), False),
        "resume_ignore_no_checkpoint": True,
        "resume_past_end": True,
    }


def run_directory(log_dir: Path) -> Path:
    """Returns the run directory of this project in the directory of `exp_manager`."""
    return log_dir / "oprd"


def check_resume(section: dict[str, Any], config: Config) -> None:
    """Applies the conventions of `exp_manager` to the checkpoints of this project.

    Raises:
        ValueError: a checkpoint exists and `resume_if_exists` is false; none exists and
            `resume_ignore_no_checkpoint` is false; or the run is complete and `resume_past_end` is false.
    """
    settings, output = {**DEFAULTS, **section}, Path(config.output)
    latest, _ = find_checkpoint(output / "checkpoints")
    if latest is None:
        if settings["resume_if_exists"] and not settings["resume_ignore_no_checkpoint"]:
            raise ValueError(
                f"{output}: no checkpoint, and exp_manager.resume_ignore_no_checkpoint=false; expected a run to "
                "resume: correct exp_dir and name, or set it to true"
            )
        return
    if not settings["resume_if_exists"]:
        raise ValueError(
            f"{output}: there is a checkpoint after step {latest}, and exp_manager.resume_if_exists=false; expected a "
            "new directory: choose another name or version, or set resume_if_exists=true"
        )
    exported = not config.train.export_hf or (output / "hf").is_dir()
    if latest >= config.train.steps and exported and not settings["resume_past_end"]:
        raise ValueError(
            f"{output}: all {config.train.steps} steps are done, and exp_manager.resume_past_end=false; expected "
            "something left to do: raise train.steps, or set resume_past_end=true"
        )
