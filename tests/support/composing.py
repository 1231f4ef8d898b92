"""Hydra composes each file of conf/ once in a process: it takes half of the time of loading a configuration."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

from nemo_oprd.config.loading import default_config_dir


def composing_once() -> Any:
    """A patch of `hydra.compose`, as `mock.patch` returns it; files of other folders are composed each time."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    compose = hydra.compose
    composed: dict[tuple[str, ...], Any] = {}
    ours = str(default_config_dir().resolve())

    def cached(name: str, overrides: list[str]) -> Any:
        folders = [element.path for element in GlobalHydra.instance().config_loader().get_search_path().get_path()]
        if ours not in folders:
            return compose(name, overrides=overrides)
        key = (name, *overrides)
        if key not in composed:
            composed[key] = compose(name, overrides=overrides)
        return copy.deepcopy(composed[key])

    return mock.patch("hydra.compose", cached)
