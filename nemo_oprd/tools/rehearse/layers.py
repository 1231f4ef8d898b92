"""Chooses the layers that a rehearsal builds: Megatron's local ones, or Transformer Engine's, whose files it needs."""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from nemo_oprd.run.provider import OWN
from nemo_oprd.tools.plan.gpus import Layers
from nemo_oprd.tools.rehearse import te_package

if TYPE_CHECKING:
    from nemo_oprd.config.schema import Config
    from nemo_oprd.tools.rehearse.recorder import Recorder

Choice: TypeAlias = Literal["local", "te"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
# a choice -> its name in `plan`, and in the environment variable by which a job chooses layers
NAMES: dict[Choice, Layers] = {"local": "local", "te": "transformer_engine"}


def check(choice: Choice, config: Config) -> None:
    """Before anything is started.

    Raises:
        ValueError: the layers are Transformer Engine's, and a job would not take them, or their files are not here; or
            they are not, and Megatron-Bridge builds a model, which has no others.
    """
    provided = provided_models(config)
    if choice != "te":
        if provided:
            raise ValueError(
                f"--layers {choice} with {provided[0]}: Megatron-Bridge builds Transformer Engine's layers; expected "
                "te: rehearse with --layers te (docs/rehearsal.md)"
            )
        return
    if config.precision != "bf16":
        raise ValueError(
            f"--layers te with precision={config.precision}: a job takes Megatron's local layers then; expected "
            "precision=bf16: rehearse with --layers local"
        )
    te_package.version()


def provided_models(config: Config) -> list[str]:
    """The settings by which Megatron-Bridge builds models of a run, such as "student.provider=bridge"."""
    teachers = [
        (f"teachers[{number}]" if config.teachers else "teacher", source.provider)
        for number, source in enumerate(config.teacher_sources)
    ]
    models = [("student", config.student.provider), *teachers]
    return [f"{key}.provider={provider}" for key, provider in models if provider != OWN]


def make_bridge_importable(choice: Choice, config: Config) -> None:
    """Lets Megatron-Bridge read configs in the command's own process, for which it imports Transformer Engine.

    Where it is not installed, the files that a rank's process takes stand in for it here, too.
    """
    if choice == "te" and provided_models(config) and find_spec("transformer_engine") is None:
        from nemo_oprd.tools.rehearse.te_functions import Functions

        te_package.install(Functions(te_package.folder(), lambda *_: None, lambda *_: None))


def stack(choice: Choice, config: Config) -> dict[str, str]:
    """Describes the rehearsed stack for the report: packages with their versions, and the layers."""
    packages = {"torch": version("torch"), "megatron-core": version("megatron-core")}
    if choice == "te":
        packages["transformer-engine"] = te_package.version()
    if provided_models(config):
        packages["megatron-bridge"] = version("megatron-bridge")
    return packages | {"layers": NAMES[choice]}


def choose(choice: Choice, recorder: Recorder) -> None:
    """Makes the models take these layers; call it in a rank's process between the imports of torch and Megatron."""
    if choice == "te":
        from nemo_oprd.tools.rehearse.te_functions import Functions

        te_package.install(Functions(te_package.folder(), recorder.call, recorder.mistake))
    from nemo_oprd.megatron.model import LAYERS_VARIABLE

    if choice == "local":  # Transformer Engine's optimizer, where it is installed, would look for a driver
        from nemo_oprd.megatron.cpu_patches import take_torch_optimizer

        take_torch_optimizer()
    os.environ[LAYERS_VARIABLE] = NAMES[choice]
