"""Converts a configuration that NeMo's `hydra_runner` has composed to this project's `Config`.

`hydra_runner` registers a schema, composes the YAML file and the command line, and passes the result on. `schema`
returns the schema to register, and `from_nemo` treats a composed configuration as `nemo-oprd` does: defaults, types,
ranges, rules and messages are those of docs/configuration.md. Neither imports NeMo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nemo_oprd.config.loading import from_composed
from nemo_oprd.config.schema import Config


def schema(**sections: dict[str, Any]) -> dict[str, Any]:
    """Returns every key of `Config` and of the program's sections, without values, for `hydra_runner(schema=...)`.

    With a key in the schema, the command line needs no `+` before it. The values are missing (`???`), because Hydra
    merges a schema over the files in the `defaults:` list of the configuration and would overwrite their values.
    `hydra_runner(schema=Config)` itself fails: OmegaConf knows no `Literal`. `from_nemo` checks types.
    """
    return _without_values({**dataclasses.asdict(Config()), **sections})


def section(cfg: Any, name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the program's own section `name` of `cfg`, with the defaults of the keys that have no value there."""
    from omegaconf import OmegaConf

    merged: Any = OmegaConf.merge(cfg, {name: OmegaConf.merge(defaults, cfg.get(name) or {})})
    plain: Any = OmegaConf.to_container(merged[name], resolve=True)
    return dict(plain)


def _without_values(keys: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_values(value) if isinstance(value, dict) else "???" for name, value in keys.items()}


def from_nemo(
    cfg: Any, *, sections: Collection[str] = ("exp_manager", "tokenizer"), output: str | Path | None = None
) -> Config:
    """Checks the configuration in `cfg` and returns it as a `Config`.

    Keys on the Hydra program's command line act as on that of `nemo-oprd`: `student.hf_path=DIR` also
    replaces the `student.checkpoint` of the file.

    Args:
        cfg: the argument of the decorated function, or a dict.
        sections: top-level keys that belong to the program and not to this project.
        output: the run directory, in place of the key `output`.

    Raises:
        ValueError: an unknown key (the nearest known one is named), a value of the wrong type or out of range, values
            that contradict each other, or an interpolation that leads nowhere.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    name, overridden = "of the program", []
    if HydraConfig.initialized():
        name = str(HydraConfig.get().job.config_name)
        parsed = OverridesParser.create().parse_overrides(list(HydraConfig.get().overrides.task))
        overridden = [str(override.key_or_group) for override in parsed]
    if output is not None:
        cfg = OmegaConf.merge(cfg, {"output": str(output)})
    return from_composed(cfg, name, overridden, sections)
