"""Composes a configuration from the defaults of the schema, a YAML file in conf/ and the command line, in this order.

Hydra composes the YAML (so `defaults:` lists and groups work) and parses the overrides; pydantic checks the result. A
loaded configuration consists of plain dataclasses. `from_composed` is the part after composition, for programs whose
own Hydra composes (`nemo_oprd.integrations.hydra_config`). Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from nemo_oprd.config.messages import build, check_key, refuse_secrets, takes, without_secrets
from nemo_oprd.config.overrides import key_of, parse
from nemo_oprd.config.schema import Config
from nemo_oprd.config.yaml_files import composed_files

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

P = ParamSpec("P")


def default_config_dir() -> Path:
    """Returns `conf/` of the source tree, or the copy in an installed wheel."""
    package = Path(__file__).parent.parent
    packaged = package / "_conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def _hiding_secrets(load: Callable[P, Config]) -> Callable[P, Config]:
    """Wraps `load`: its errors quote no password of an address, though several libraries put values into messages."""

    @functools.wraps(load)
    def hiding(*args: P.args, **kwargs: P.kwargs) -> Config:
        try:
            return load(*args, **kwargs)
        except ValueError as error:
            if (hidden := without_secrets(str(error))) != str(error):
                raise ValueError(hidden) from None
            raise

    return hiding


@_hiding_secrets
def load_config(name: str, overrides: list[str] | None = None, config_dir: str | Path | None = None) -> Config:
    """Composes configuration `name` with Hydra-style `overrides` (`train.lr=1e-4`, `loss=group_entry`) and checks it.

    Raises:
        ValueError: no such configuration, an unknown key (the nearest known one is named), a value of the wrong type or
            out of range, or values that contradict each other.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    directory = Path(config_dir or default_config_dir()).resolve()
    if not directory.is_dir():
        raise ValueError(f"--config-dir {config_dir}: no such directory; expected one with {name}.yaml in it")
    name = name.removesuffix(".yaml")
    if Path(name).is_absolute() or not (directory / f"{name}.yaml").is_file():
        given = Path(f"{name}.yaml")
        if given.is_file():
            raise ValueError(
                f"--config-name {name}: is a path, expected a name of a file in --config-dir ({directory}); write "
                f"--config-dir {given.parent} --config-name {given.stem}"
            )
        known = sorted(file.stem for file in directory.glob("*.yaml"))
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise ValueError(
            f"--config-name {name}: no {name}.yaml in {directory}, expected one of {known}"
            + (f"; did you mean {near[0]!r}?" if near else "; choose one, or name its directory with --config-dir")
        )
    groups, settings = _parsed(list(overrides or []), directory)
    composed_files(directory, name, {each.key_or_group: each.value() for each in groups})
    try:
        with initialize_config_dir(version_base=None, config_dir=str(directory)):
            composed = compose(name, overrides=[str(o.input_line) for o in groups])
        merged = _with_defaults(composed)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        raise _not_composed(name, error) from error
    for key, value in settings:
        _check_number(key, merged)
        _open_groups(key, merged)
        try:
            OmegaConf.update(merged, key, value, merge=False, force_add=True)
        except OmegaConfBaseException as error:
            raise ValueError(
                f"command line: {key}={value} can't be set, because the key above it holds no group of keys; expected "
                f"another value there: set {key.rpartition('.')[0]} as a whole"
            ) from error
    wholes = [key for key, value in settings if value is None or isinstance(value, dict)]
    if wholes:
        try:
            merged = _with_defaults(merged)  # a group set as a whole may lack keys
        except OmegaConfBaseException as error:
            raise ValueError(
                f"command line: {' or '.join(wholes)} is set to a group of keys, or to null, where the schema has "
                "something else; expected a value of its type: correct it"
            ) from error
    return _checked(merged, name, {key for key, _ in settings})


def origin_of(
    key: str, *, name: str, overrides: list[str] | None = None, config_dir: str | Path | None = None
) -> Path | None:
    """Returns the file that sets `key` (teachers by number, `teachers[0].hf_path`) in a configuration of `load_config`.

    Returns None for a key that the command line sets, by itself or with its group, and for a default.
    """
    directory = Path(config_dir or default_config_dir()).resolve()
    groups, settings = _parsed(list(overrides or []), directory)
    whole = key.replace("[", ".").replace("]", "")
    if any(f"{whole}.".startswith(f"{given}.") for given, _ in settings):
        return None
    choices = {each.key_or_group: each.value() for each in groups}
    listed = key.partition("[")[0]  # a list is set as a whole
    found = [each.path for each in composed_files(directory, name.removesuffix(".yaml"), choices) if each.holds(listed)]
    if not found:
        return None
    return found[-1].relative_to(Path.cwd()) if found[-1].is_relative_to(Path.cwd()) else found[-1]


def _parsed(overrides: list[str], directory: Path) -> tuple[list[Override], list[tuple[str, Any]]]:
    """Returns (choices of files in folders of `directory`, key and value of all other overrides)."""
    groups: list[Override] = []
    settings: list[tuple[str, Any]] = []
    for text in overrides:
        key = key_of(text)
        folder = directory / key
        if folder.is_dir():
            groups.append(parse(text, may_be_text=False, may_be_list=True))
            chosen = groups[-1].value()
            known = sorted(file.stem for file in folder.glob("*.yaml"))
            for name in chosen if isinstance(chosen, list) else [chosen]:
                if name is not None and not (folder / f"{str(name).removesuffix('.yaml')}.yaml").is_file():
                    raise ValueError(f"{key}={name}: no {name}.yaml in {folder}, expected one of {known}; choose one")
            continue
        check_key(Config, key, "command line")
        is_text, is_list, is_group = takes(Config, key)
        parsed = parse(text, may_be_text=is_text, may_be_list=is_list, may_be_group=is_group)
        settings.append((key, parsed.value()))
    return groups, settings


@_hiding_secrets
def from_composed(composed: Any, name: str, overridden: Collection[str] = (), sections: Collection[str] = ()) -> Config:
    """Returns the checked configuration in `composed`, which Hydra has composed; missing keys get their defaults.

    Args:
        composed: a DictConfig, or a dict.
        name: the configuration's name in messages.
        overridden: dotted keys that the command line set. A model there replaces the model of the file.
        sections: top-level keys that belong to another program; interpolations may lead into them.

    Raises:
        ValueError: as `load_config`, and for an interpolation that leads nowhere.
    """
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = _with_defaults(composed)
    except OmegaConfBaseException as error:
        raise _not_composed(name, error) from error
    return _checked(merged, name, set(overridden), sections)


def _with_defaults(composed: Any) -> Any:
    """Returns a DictConfig of `composed` in which missing keys have their defaults."""
    from omegaconf import OmegaConf

    return OmegaConf.merge(OmegaConf.create(dataclasses.asdict(Config())), composed)


def _checked(merged: Any, name: str, overridden: set[str], sections: Collection[str] = ()) -> Config:
    """Checks `merged`, which has every key, as `from_composed` does; returns the configuration."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

    from nemo_oprd.config.checks import check

    try:
        _replace_model_sources(merged, overridden)
        plain = OmegaConf.to_container(merged, resolve=True)
    except InterpolationResolutionError as error:
        key = str(getattr(error, "full_key", ""))
        where = "command line" if key in overridden else f"configuration {name}"
        raise ValueError(
            f"{where}: {key} holds an interpolation that leads nowhere ({str(error).splitlines()[0]}); expected "
            "${KEY} with a key of the configuration, or ${oc.env:NAME} for a variable of the environment: correct it"
        ) from error
    except OmegaConfBaseException as error:
        raise _not_composed(name, error) from error
    assert isinstance(plain, dict)
    refuse_secrets(plain, "")
    config: Config = build(Config, {key: value for key, value in plain.items() if key not in sections})
    check(config)
    return config


def _not_composed(name: str, error: Exception) -> ValueError:
    missing = getattr(error, "missing_cfg_file", None)
    if missing:
        return ValueError(
            f"configuration {name}: its list `defaults` names {missing}, and there is no {missing}.yaml; expected a "
            "file beside it, or in a folder there: correct the list"
        )
    said = " ".join(str(error).split()) or "a key or a value that can't be read"
    if isinstance(error, RecursionError):
        said = "groups or lists inside each other without end"
    return ValueError(f"configuration {name}: {said}; expected YAML in {name}.yaml: correct it")


def _check_number(key: str, merged: Any) -> None:
    """Raises ValueError if a key below `teachers` does not begin with the number of one of them."""
    from omegaconf import OmegaConf

    names = key.split(".")
    number = int(names[1]) if names[0] == "teachers" and names[1:] and names[1].isdecimal() else None
    teachers = OmegaConf.select(merged, "teachers", throw_on_resolution_failure=False)
    count = len(teachers) if OmegaConf.is_list(teachers) else 0
    if len(names) > 1 and names[0] == "teachers" and (number is None or number >= count):
        raise ValueError(
            f"{key}: the configuration has {count} teachers, counted from 0; expected one of them: list "
            "them in a file, or all on the command line, teachers=[{...},{...}]"
        )


def _open_groups(key: str, merged: Any) -> None:
    """Gives empty groups above a key their defaults; raises ValueError if one of them holds a value."""
    from omegaconf import OmegaConf

    names, node = key.split("."), merged
    for depth, name in enumerate(names[:-1], start=1):
        if name not in node or OmegaConf.is_interpolation(node, name):
            return
        value = None if OmegaConf.is_missing(node, name) else node[name]
        if not OmegaConf.is_dict(value):
            default: Any = dataclasses.asdict(Config())
            for group in names[:depth]:
                default = default.get(group) if isinstance(default, dict) else None
            if not isinstance(default, dict):  # a list, or names of the user's choice
                return
            if value is not None:
                group = ".".join(names[:depth])
                raise ValueError(f"{group}={value!r}: expected a group of keys; set {key} in its place")
            node[name] = default
        node = node[name]


def _replace_model_sources(merged: Any, overridden: set[str]) -> None:
    """Sets the file's `checkpoint` to null if the command line sets `hf_path` alone, and the reverse."""
    from omegaconf import OmegaConf

    for role in ("student", "teacher"):
        for given, other in (("hf_path", "checkpoint"), ("checkpoint", "hf_path")):
            is_set = f"{role}.{given}" in overridden and OmegaConf.is_dict(merged[role])  # else `build` refuses it
            if is_set and merged[role][given] is not None and f"{role}.{other}" not in overridden:
                merged[role][other] = None


def as_plain(config: Config) -> dict[str, Any]:
    """Returns the complete configuration as YAML holds it: nested dicts, lists and scalars."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return dict(plain(dataclasses.asdict(config)))


def to_yaml(config: Config) -> str:
    """Returns the complete configuration as YAML; `load_config` reads it back."""
    import yaml

    return yaml.safe_dump(as_plain(config), sort_keys=False)
