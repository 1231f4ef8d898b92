"""Whose layers a rehearsal builds: Megatron's local ones, or Transformer Engine's, whose files must be there."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from nemo_oprd.commands.plan.gpus import Layers
from nemo_oprd.commands.rehearse import te_package

if TYPE_CHECKING:
    from nemo_oprd.commands.rehearse.recorder import Recorder
    from nemo_oprd.config.schema import Config

Choice: TypeAlias = Literal["local", "te"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
# a choice -> its name in `plan`, and in the environment variable by which a job chooses layers
NAMES: dict[Choice, Layers] = {"local": "local", "te": "transformer_engine"}


def check(choice: Choice, config: Config) -> None:
    """Before anything is started.

    Raises:
        ValueError: the layers are Transformer Engine's, and a job would not take them, or their files are not here.
    """
    if choice != "te":
        return
    if config.precision != "bf16":
        raise ValueError(
            f"--layers te with precision={config.precision}: a job takes Megatron's local layers then; expected "
            "precision=bf16: rehearse with --layers local"
        )
    te_package.version()


def stack(choice: Choice) -> dict[str, str]:
    """What is rehearsed, for the report: packages with their versions, and the layers."""
    packages = {"torch": version("torch"), "megatron-core": version("megatron-core")}
    if choice == "te":
        packages["transformer-engine"] = te_package.version()
    return packages | {"layers": NAMES[choice]}


def choose(choice: Choice, recorder: Recorder) -> None:
    """In the process of a rank, after torch and before Megatron is imported: makes the models take these layers."""
    if choice == "te":
        from nemo_oprd.commands.rehearse.te_functions import Functions

        te_package.install(Functions(te_package.folder(), recorder.call, recorder.mistake))
    from nemo_oprd.models.megatron.model import LAYERS_VARIABLE

    os.environ[LAYERS_VARIABLE] = NAMES[choice]
