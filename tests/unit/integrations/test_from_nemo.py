"""Configurations that another program's Hydra has composed, and the conventions of NeMo's `exp_manager`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from nemo_oprd.config.loading import default_config_dir, load_config
from nemo_oprd.config.overrides import as_overrides
from nemo_oprd.config.schema import Config
from nemo_oprd.integrations import experiment
from nemo_oprd.integrations.hydra_config import from_nemo, schema, section

MODELS = ["student.hf_path=a", "teacher.hf_path=b"]
SHIPPED = sorted(file.stem for file in default_config_dir().glob("*.yaml"))


def composed(name: str, *overrides: str) -> Any:
    """As `hydra_runner` composes: the schema is registered under the name of the file, in the mode of Hydra 1.1."""
    store = ConfigStore.instance()
    store.store(name=name, node=schema(exp_manager=experiment.DEFAULTS))
    try:
        with initialize_config_dir(version_base="1.1", config_dir=str(default_config_dir())):
            return compose(name, overrides=list(overrides), return_hydra_config=True)
    finally:
        del store.repo[f"{name}.yaml"]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a function under `hydra_runner` receives, with Hydra's own part where Hydra keeps it."""
    monkeypatch.setattr(HydraConfig, "cfg", None, raising=False)

    def run(name: str, *overrides: str) -> Any:
        cfg = composed(name, *overrides)
        HydraConfig.instance().set_config(cfg)
        return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])

    yield run
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize("name", SHIPPED)
def test_the_same_configuration_as_by_our_own_loader(name: str, runner: Any) -> None:
    overrides = [*(MODELS if name == "verify" else []), "train.lr=1e-3", "train.betas=[0.8,0.9]"]
    assert from_nemo(runner(name, *overrides)) == load_config(name, overrides)


def test_a_model_on_the_command_line_replaces_the_files(runner: Any) -> None:
    config = from_nemo(runner("quickstart", "student.hf_path=x"))
    assert (config.student.hf_path, config.student.checkpoint) == ("x", None)
    assert config == load_config("quickstart", ["student.hf_path=x"])
    HydraConfig.instance().cfg = None  # without Hydra there is no command line: a checkpoint, and its config.json
    both = from_nemo({"student": {"hf_path": "x", "checkpoint": "y"}, "teacher": {"hf_path": "b"}}).student
    assert (both.hf_path, both.checkpoint) == ("x", "y")


def test_keys_in_the_users_groups_need_a_plus(runner: Any) -> None:
    config = from_nemo(runner("quickstart", "+data.validation.more=f.jsonl"))
    assert config.data.validation == {"heldout": "runs/toy/prompts/heldout.jsonl", "more": "f.jsonl"}


def test_sections_of_the_program() -> None:
    """They are left out, and interpolations may lead into them; `output` replaces the run directory."""
    cfg = {"exp_manager": {"name": "n"}, "output": "runs/${exp_manager.name}", "student": {"hf_path": "a"},
           "teacher": {"hf_path": "${student.hf_path}"}}  # fmt: skip
    config = from_nemo(cfg)
    assert (config.output, config.teacher.hf_path, config.train.steps) == ("runs/n", "a", Config().train.steps)
    assert from_nemo(cfg, output=Path("runs/b")).output == "runs/b"


def test_a_section_has_the_defaults_where_it_says_nothing(runner: Any) -> None:
    cfg = runner("quickstart", "exp_manager.name=n", "exp_manager.exp_dir=${output}/e")
    expected = {**experiment.DEFAULTS, "name": "n", "exp_dir": "runs/quickstart/e"}
    assert section(cfg, "exp_manager", experiment.DEFAULTS) == expected
    assert section({}, "exp_manager", {"name": "oprd"}) == {"name": "oprd"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"trainer": {"devices": 2}}, "configuration: unknown key 'trainer'"),
        ({"train": {"stepz": 1}}, "unknown key 'train.stepz'; did you mean 'train.steps'?"),
        ({"train": {"steps": "many"}}, "train.steps='many': expected an integer"),
        ({"output": "${nowhere}"}, "Interpolation key 'nowhere' not found"),
        ({"wandb_api_key": "x"}, "expected no secrets in a configuration"),
        ({"student": {"hf_path": None}}, "expected a model; set hf_path"),
    ],
)
def test_mistakes(more: dict, message: str) -> None:
    with pytest.raises(ValueError, match="^[^\n]*$") as raised:
        from_nemo({"student": {"hf_path": "a"}, "teacher": {"hf_path": "b"}, **more})
    assert message in str(raised.value)


def test_settings_for_exp_manager() -> None:
    given = {"exp_dir": "runs", "name": "a", "create_wandb_logger": False, "checkpoint_callback_params": None}
    settings = experiment.experiment_settings(given, processes=2)
    assert (settings["exp_dir"], settings["name"], settings["resume_if_exists"]) == ("runs", "a", True)
    # Lightning's own parts are off, also those that NeMo has on by default
    assert not settings["create_checkpoint_callback"] and not settings["create_tensorboard_logger"]
    assert "create_wandb_logger" not in settings


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"create_checkpoint_callback": True}, "use train.save_every, train.keep_checkpoints and train.keep_best"),
        ({"create_wandb_logger": True}, "exp_manager.create_wandb_logger=True is served by Lightning's loop"),
        ({"max_time_per_run": "00:03:55:00"}, "sbatch --signal"),
        ({"create_clearml_logger": True}, "expected one of exp_dir, explicit_log_dir, name"),
        ({"resume_if_exists": False}, "with 2 ranks and no version"),
    ],
)
def test_settings_that_need_lightning(section: dict, message: str) -> None:
    with pytest.raises(ValueError, match="^[^\n]*$") as raised:
        experiment.experiment_settings(section, processes=2)
    assert message in str(raised.value)


def test_one_rank_or_a_named_directory_needs_no_resume() -> None:
    assert not experiment.experiment_settings({"resume_if_exists": False}, 1)["resume_if_exists"]
    assert experiment.experiment_settings({"resume_if_exists": False, "version": "v1"}, 2)["version"] == "v1"


def run_in(directory: Path, *, saved: int | None, steps: int = 4, exported: bool = False) -> Config:
    """The configuration of a run whose newest checkpoint is after step `saved`."""
    if saved is not None:
        checkpoint = directory / "checkpoints" / f"iter_{saved:07d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"format": 2, "step": saved, "files": {}}))
    if exported:
        (directory / "hf").mkdir(parents=True)
    return load_config("verify", [*MODELS, f"output={directory}", f"train.steps={steps}"])


@pytest.mark.parametrize(
    ("section", "run"),
    [
        ({}, {"saved": None}),
        ({}, {"saved": 2}),
        ({}, {"saved": 4}),  # the export is missing
        ({"resume_past_end": True}, {"saved": 4, "exported": True}),
        ({"resume_if_exists": False}, {"saved": None}),
        ({"resume_ignore_no_checkpoint": False}, {"saved": 2}),
    ],
)
def test_resumes(section: dict, run: dict, tmp_path: Path) -> None:
    experiment.check_resume(section, run_in(tmp_path / "run", **run))


@pytest.mark.parametrize(
    ("section", "run", "message"),
    [
        ({"resume_if_exists": False}, {"saved": 2}, "there is a checkpoint after step 2"),
        ({"resume_ignore_no_checkpoint": False}, {"saved": None}, "expected a run to resume"),
        ({}, {"saved": 4, "exported": True}, "all 4 steps are done"),
    ],
)
def test_does_not_resume(section: dict, run: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        experiment.check_resume(section, run_in(tmp_path / "run", **run))


def test_groups_of_a_launcher_are_overrides() -> None:
    """Every kind of value arrives, as our loader reads it."""
    text = "it's {prompt}, a=b: [1] \\frac \\\\' \\"
    given = {
        "seed": 3, "precision": "fp32", "output": "runs/a b", "student": {"hf_path": "x", "parallel": {}},
        "teacher": {"hf_path": "y", "offload": "true", "prompt": text},
        "train": {"lr": 1e-7, "keep_best": "null"}, "data": {"train": ["a.jsonl", "b,c.jsonl"]},
        "loss": {"representation": {"layers": [1, -1], "final_norm": True}},
    }  # fmt: skip
    config = load_config("verify", [*as_overrides(given)])
    assert (config.seed, config.precision, config.output) == (3, "fp32", "runs/a b")
    assert (config.teacher.offload, config.teacher.prompt) == (True, text)
    assert (config.train.lr, config.train.keep_best) == (1e-7, None)
    assert (config.loss.representation.layers, config.loss.representation.final_norm) == ([1, -1], True)
    assert config.data.train == ["a.jsonl", "b,c.jsonl"]
    assert [*as_overrides({"student": {"parallel": {}}})] == []
