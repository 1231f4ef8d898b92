"""On-policy distillation as a program of NeMo: `hydra_runner` composes, `exp_manager` names the run and resumes it.

    torchrun --nproc-per-node 2 --standalone examples/nemo/oprd.py --config-name quickstart \
        exp_manager.exp_dir=nemo_experiments exp_manager.name=oprd train.steps=20

The keys are those of docs/configuration.md, with two sections of NeMo's: `exp_manager`, and `tokenizer` for models
whose tokenizer comes from NeMo. The environment is that of scripts/setup_nemo.sh; docs/nemo.md explains the rest.
"""

import os

from lightning.pytorch import Trainer
from nemo.collections.common.tokenizers import AutoTokenizer, SentencePieceTokenizer
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager

from nemo_oprd.cli import run_as_command
from nemo_oprd.config.loading import default_config_dir
from nemo_oprd.integrations import experiment
from nemo_oprd.integrations.hydra_config import from_nemo, schema, section
from nemo_oprd.integrations.tokenizers import config_with_tokenizer
from nemo_oprd.run.preflight import preflight
from nemo_oprd.train import train

# library huggingface: type is a directory; sentencepiece: model is a file; null: the tokenizer in the model's directory
TOKENIZER = {"library": None, "type": None, "model": None, "chat_template": None}
SCHEMA = schema(exp_manager=experiment.DEFAULTS, tokenizer=TOKENIZER)


def main(cfg) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    from_nemo(cfg)  # mistakes in the configuration, before anything is written
    settings, given = section(cfg, "exp_manager", experiment.DEFAULTS), section(cfg, "tokenizer", TOKENIZER)
    log_dir = exp_manager(processes_as_trainer(), experiment.experiment_settings(settings, ranks))
    config = from_nemo(cfg, output=experiment.run_directory(log_dir))
    tokenizer = nemo_tokenizer(given)
    if tokenizer is not None:
        config = config_with_tokenizer(config, tokenizer, log_dir / "models", given["chat_template"])
    experiment.check_resume(settings, config)
    preflight(config, ranks, "train")
    train(config)


def processes_as_trainer() -> Trainer:
    """What `exp_manager` reads of Lightning: ranks and nodes, as torchrun has started them. It fits nothing."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // local
    return Trainer(accelerator="cpu", devices=local, num_nodes=nodes, logger=False, enable_checkpointing=False)


def nemo_tokenizer(given: dict) -> AutoTokenizer | SentencePieceTokenizer | None:
    kinds = {"huggingface": (AutoTokenizer, "type"), "sentencepiece": (SentencePieceTokenizer, "model")}
    library = given["library"]
    if library is None:
        return None
    if library not in kinds:
        raise ValueError(f"tokenizer.library={library}: expected huggingface, sentencepiece or null; give one of them")
    make, key = kinds[library]
    if given[key] is None:
        raise ValueError(f"tokenizer.{key}=null with tokenizer.library={library}: expected a path; give one")
    return make(given[key])


@hydra_runner(config_path=str(default_config_dir()), config_name="quickstart", schema=SCHEMA)
def start(cfg) -> None:
    run_as_command(lambda: main(cfg) or 0)


if __name__ == "__main__":
    start()
