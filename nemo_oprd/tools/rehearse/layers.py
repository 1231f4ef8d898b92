"""Chooses the layers that a rehearsal builds: Megatron's local ones, or Transformer Engine's, whose files it needs."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nemo_oprd.run.provider import OWN
from nemo_oprd.runtime.files import cache_directory
from nemo_oprd.tools.plan.gpus import Layers

if TYPE_CHECKING:
    from nemo_oprd.config.schema import Config
    from nemo_oprd.tools.rehearse.recorder import Recorder

# Loads Transformer Engine's own Python layer: the files of its wheel, on functions that compute nothing.
#
# The wheel `transformer-engine` holds Python files only; what it calls, `transformer_engine_torch`, is compiled against
# CUDA. `te_functions.py` takes its place. The files are not changed: packages that they import but never run here
# (triton, onnx, ...) get stand-ins during the import, if they are not installed.


# the environment variable by which a user names a folder with the files
FOLDER_VARIABLE = "NEMO_OPRD_TE_FILES"
# Megatron-core below this version, the versions of the files that it accepts (pyproject.toml), and the tested one
_ACCEPTED = (("0.17", ">=2.10,<2.12", "2.11.0"), ("1000", ">=2.10", "2.20.2"))
# imported by the files, and run for FP8, ONNX and debugging only
_NEVER_RUN = ("nvdlfw_inspect", "onnx", "onnxscript", "triton")


def folder() -> Path:
    """Returns the folder of Transformer Engine's files: `FOLDER_VARIABLE`, or a folder in the user's cache."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen) if chosen else cache_directory() / f"transformer_engine-{accepted()[1]}"


def accepted() -> tuple[SpecifierSet, str]:
    """Returns the versions of Transformer Engine that the installed Megatron-core accepts, and the tested one."""
    core = Version(importlib.metadata.version("megatron-core"))
    specifier, tested = next((row[1:] for row in _ACCEPTED if core < Version(row[0])), _ACCEPTED[-1][1:])
    return SpecifierSet(specifier), tested


def version() -> str:
    """Returns the version of Transformer Engine's files in `folder`.

    Raises:
        ValueError: there are no files, or Megatron-core refuses their version; the message says how to get them.
    """
    found = [each.version for each in importlib.metadata.distributions(path=[str(folder())]) if _is_it(each)]
    wanted, tested = accepted()
    if not found or not wanted.contains(found[0]):
        what = f"version {found[0]}" if found else "nothing"
        raise ValueError(
            f"--layers te: {folder()} holds {what} of Transformer Engine; expected the Python files of a version "
            f"{wanted}, which need neither CUDA nor a compiler: pip install --no-deps --upgrade --target {folder()} "
            f"transformer-engine=={tested}"
        )
    return found[0]


def _is_it(distribution: importlib.metadata.Distribution) -> bool:
    return distribution.name.lower().replace("_", "-") == "transformer-engine"


def install(functions: types.ModuleType) -> None:
    """Imports Transformer Engine with `functions` as `transformer_engine_torch`; call it before importing Megatron.

    Raises:
        ValueError: as `version`.
    """
    version()
    sys.path.insert(0, str(folder()))
    # otherwise the package looks for CUDA's libraries, and torch.compile would look for a GPU's compiler
    os.environ.update(NVTE_PROJECT_BUILDING="1", NVTE_TORCH_COMPILE="0")
    sys.modules["transformer_engine_torch"] = functions
    importlib.import_module("torch._dynamo")  # it asks for triton, which must not be a stand-in

    absent = tuple(name for name in _NEVER_RUN if importlib.util.find_spec(name) is None)
    finder = _Absent(absent)
    sys.meta_path.append(finder)
    try:
        common = _without_libraries()
        package: Any = importlib.import_module("transformer_engine")
        package.common = common
        importlib.import_module("transformer_engine.pytorch")  # whose failure the package passes over
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
            del sys.modules[name]
    _take_fake_tensors()


def _without_libraries() -> Any:
    """Returns `transformer_engine.common`, imported without its package, and kept from loading the compiled part."""
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(folder() / "transformer_engine")]
    sys.modules["transformer_engine"] = package
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    del sys.modules["transformer_engine"]
    return common


def _take_fake_tensors() -> None:
    """Lets Transformer Engine, which chooses attention's kernel by the class of the queries, accept fake tensors."""
    utils: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    torch: Any = importlib.import_module("torch")
    choose = utils.get_attention_backend

    def chosen(attention_params: Any) -> Any:
        return choose(dataclasses.replace(attention_params, qkv_type=torch.Tensor))

    utils.get_attention_backend = chosen


class _Absent(importlib.machinery.PathFinder):
    """Finds stand-ins for packages that are not installed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(  # type: ignore[override]
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns a spec of a module that has every attribute; None for other packages."""
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Returns a module that has every attribute."""
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs nothing."""


class _Anything(types.ModuleType):
    """A module with every attribute; each works as a decorator, as a base class, and as the result of its call."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates else _Anything(self.__name__)

    def __getitem__(self, _: Any) -> Any:
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()


Choice: TypeAlias = Literal["local", "te"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
# a choice -> its name in `plan`, and in the environment variable by which a job chooses layers
NAMES: dict[Choice, Layers] = {"local": "local", "te": "transformer_engine"}


def check(choice: Choice, config: Config) -> None:
    """Checks the choice of layers before anything is started.

    Raises:
        ValueError: the choice is `te`, but a job would not take Transformer Engine's layers, or their files are not
            here; or it is another one, but Megatron-Bridge builds a model, always with Transformer Engine's layers.
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
    version()


def provided_models(config: Config) -> list[str]:
    """Returns the settings by which Megatron-Bridge builds models of a run, such as "student.provider=bridge"."""
    teachers = [
        (f"teachers[{number}]" if config.teachers else "teacher", source.provider)
        for number, source in enumerate(config.teacher_sources)
    ]
    models = [("student", config.student.provider), *teachers]
    return [f"{key}.provider={provider}" for key, provider in models if provider != OWN]


def make_bridge_importable(choice: Choice, config: Config) -> None:
    """Lets Megatron-Bridge, which imports Transformer Engine, read configs in the command's own process.

    If Transformer Engine is not installed, its Python files are imported with stand-ins, as in a rank's process.
    """
    if choice == "te" and provided_models(config) and find_spec("transformer_engine") is None:
        from nemo_oprd.tools.rehearse.te_functions import Functions

        install(Functions(folder(), lambda *_: None, lambda *_: None))


def stack(choice: Choice, config: Config) -> dict[str, str]:
    """Describes the rehearsed stack for the report: packages with their versions, and the layers."""
    packages = {
        "torch": importlib.metadata.version("torch"),
        "megatron-core": importlib.metadata.version("megatron-core"),
    }
    if choice == "te":
        packages["transformer-engine"] = version()
    if provided_models(config):
        packages["megatron-bridge"] = importlib.metadata.version("megatron-bridge")
    return packages | {"layers": NAMES[choice]}


def choose(choice: Choice, recorder: Recorder) -> None:
    """Makes the models take these layers; call it in a rank's process between the imports of torch and Megatron."""
    if choice == "te":
        from nemo_oprd.tools.rehearse.te_functions import Functions

        install(Functions(folder(), recorder.call, recorder.mistake))
    from nemo_oprd.megatron.model import LAYERS_VARIABLE

    if choice == "local":  # Transformer Engine's optimizer, where it is installed, would look for a driver
        from nemo_oprd.megatron.cpu_patches import take_torch_optimizer

        take_torch_optimizer()
    os.environ[LAYERS_VARIABLE] = NAMES[choice]
