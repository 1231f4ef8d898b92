"""Compares the settings of a start with those of the run in its directory, before models are built.

`run/config_history.py` finds the settings under which the last kept step ran. Keys that change the training result need
permission (the schema has each key's rule). A model in another directory is the same if its fingerprint is: every start
records the fingerprints of its models in environment.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_oprd.config.loading import as_plain
from nemo_oprd.config.resume_rules import Change, allowed, changes, shown
from nemo_oprd.config.schema import Config
from nemo_oprd.models.fingerprint import fingerprint
from nemo_oprd.run.config_history import config_at, current_config, read_config, starts
from nemo_oprd.runtime.messages import is_first_rank


@dataclass(frozen=True)
class Resume:
    """The relation of a start to the content of its directory.

    Attributes:
        step: steps before the checkpoint to resume from; None for a new run.
        changed: keys whose values differ from those of the last kept step, or of a run that this start overwrites.
        refused: changed keys that alter the training result and are not permitted.
    """

    step: int | None
    changed: list[Change]
    refused: list[Change]


def check_resume(config: Config, step: int | None) -> list[Change]:
    """Returns the permitted changes of a start relative to the last kept step.

    `step`: steps before the checkpoint to resume from; None: there is no checkpoint.

    Raises:
        ValueError: as `compare_settings`; or keys that change the training result differ without permission.
    """
    found = compare_settings(config, step)
    if found.refused:
        raise ValueError(_refusal(config, found.step, found.refused))
    return found.changed


def compare_settings(config: Config, step: int | None) -> Resume:
    """Returns how `config` differs from the run's at `step` (None: a run to overwrite); writes nothing.

    Only the first rank compares fingerprints of models, because it has to read some MB of every file of weights. On
    other ranks a model in another directory counts as the same.

    Raises:
        ValueError: the checkpoint has more steps than `train.steps`, or a file of settings is malformed.
    """
    directory = Path(config.output)
    if step is not None and step > config.train.steps:
        raise ValueError(
            f"train.steps={config.train.steps}: output={config.output} has a checkpoint after {step} steps; expected "
            f"at least {step}: raise train.steps, or choose another output"
        )
    before = config_at(directory, step) if step is not None else _overwritten(directory)
    if before is None:
        return Resume(step, [], [])
    old, new = read_config(before), as_plain(config)
    started_in = [str(start.get("directory", "")) for start in _starts_with(before)]
    changed = changes(old, new, started_in[-1] if started_in else "")
    if is_first_rank():
        changed = _with_models(before, step or 1, changed, old, new)
    else:
        changed = [replace(c, rule="free") if c.key.endswith((".hf_path", ".checkpoint")) else c for c in changed]
    if step is None:  # without a checkpoint, keys that a checkpoint would fix need only permission
        changed = [replace(c, rule="learned") if c.rule == "fixed" else c for c in changed]
    allow = config.train.allow_changes
    refused = [c for c in changed if c.rule == "fixed" or (c.rule == "learned" and not allowed(c, allow))]
    return Resume(step, changed, refused)


def models_of(config: Config) -> dict[str, str]:
    """Returns configuration key -> fingerprint, of the models that exist."""
    found = {key: fingerprint(Path(path)) for key, path in _model_paths(as_plain(config)).items()}
    return {key: value for key, value in found.items() if value is not None}


def _starts_with(file: Path) -> list[dict[str, Any]]:
    return [start for start in starts(file.parent) if start.get("config") == file.name]


def _overwritten(directory: Path) -> Path | None:
    """Returns the settings file of a run that a new one would overwrite; None if metrics.jsonl has no step of it."""
    metrics, file = directory / "metrics.jsonl", current_config(directory)
    if not (metrics.is_file() and file.is_file()):
        return None
    for line in metrics.read_bytes().splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):
            break  # a killed run was writing this line
        if isinstance(step, int) and step > 0:
            return file
    return None


def _refusal(config: Config, step: int | None, refused: list[Change]) -> str:
    """Formats one line that names all refused keys with both values."""
    done = f"step {step} of output={config.output} was made" if step else f"output={config.output} was trained"
    text = f"{done} with other settings, {', '.join(map(str, refused))}; expected the same: "
    never = [change.key for change in refused if change.rule == "fixed"]
    keys = ",".join(change.key for change in refused if change.rule == "learned")
    other = "set them back, or choose another output"
    if never:
        return f"{text}{other} (no run can go on with another {', '.join(never)})"
    what = "go on with" if step else "start over with"
    return f"{text}{other}, or {what} train.allow_changes=[{keys}]"


def _model_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns key -> directory of every model of a configuration."""
    groups = {"student": config.get("student"), "teacher": config.get("teacher")}
    groups |= {f"teachers.{number}": teacher for number, teacher in enumerate(config.get("teachers") or [])}
    return {
        f"{role}.{name}": str(group[name])
        for role, group in groups.items()
        for name in ("hf_path", "checkpoint")
        if isinstance(group, dict) and group.get(name) is not None
    }


def _known_fingerprint(path: str) -> str | None:
    """Returns the fingerprint of an earlier start's model; None if the model is missing or incomplete."""
    try:
        return fingerprint(Path(path))
    except ValueError:  # the directory of checkpoints no longer has a newest one
        return None


def _with_models(
    file: Path, step: int, changed: list[Change], old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[Change]:
    """Corrects `changed` by the models' contents: a model may move, another student in another directory is refused.

    `file` holds `old`. The fingerprints are those of the last start that continued before `step`, the last kept step.
    """
    kept = [each for each in _starts_with(file) if "models" in each and each.get("after_step", 0) < step]
    recorded: dict[str, Any] = kept[-1]["models"] if kept else {}
    by_key = {change.key: change for change in changed}
    before, after = _model_paths(old), _model_paths(new)
    for key, path in after.items():
        if key not in before:
            continue
        known = recorded.get(key) or (_known_fingerprint(before[key]) if key in by_key else None)
        if known is None:
            continue  # an earlier version's run: the same path counts as the same model, another path as another model
        if known == fingerprint(Path(path)):
            if key in by_key:
                by_key[key] = replace(by_key[key], rule="free")
        elif key not in by_key:
            by_key[key] = Change(key, shown(path), "another model there", "learned")
        elif key.startswith("student."):
            by_key[key] = replace(by_key[key], rule="fixed")
    return list(by_key.values())
