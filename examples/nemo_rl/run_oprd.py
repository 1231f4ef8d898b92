"""On-policy distillation of hidden states as a project of NeMo-RL 0.7.0: its loop, its YAML, and a worker of our own.

    uv run run_oprd.py --config configs/oprd_math.yaml [KEY=VALUE ...]

README.md says where this folder goes and what the keys mean. The steps are those of NeMo-RL's distillation example;
new are the lines with OPRD.
"""

import argparse

from nemo_rl.algorithms import distillation
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.utils import setup_response_data
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY, MCORE_EXECUTABLE
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
from nemo_rl.utils.logger import get_next_experiment_dir
from omegaconf import OmegaConf
from transformers import AutoConfig

from nemo_oprd.integrations.rl_batch import SECTION, Settings
from nemo_oprd.integrations.rl_loss import OPRDOutputLoss
from nemo_oprd.integrations.rl_policy import ACTOR, policies_of

# the workers run in the environment of NeMo-RL's own Megatron workers
ACTOR_ENVIRONMENT_REGISTRY[ACTOR] = MCORE_EXECUTABLE


def configuration(path, overrides):
    """NeMo-RL's configuration; the workers' policy gets the section `oprd` and the teacher's model."""
    config = load_config(path)
    if overrides:
        config = parse_hydra_overrides(config, overrides)
    values = OmegaConf.to_container(config, resolve=True)
    values["policy"][SECTION] = {"teacher": values["teacher"]["model_name"], **values.pop(SECTION, {})}
    return distillation.MasterConfig(**values)


def main():
    register_omegaconf_resolvers()
    parser = argparse.ArgumentParser(description="Distillation of hidden states in NeMo-RL.")
    parser.add_argument("--config", required=True, metavar="YAML")
    options, overrides = parser.parse_known_args()
    config = configuration(options.config, overrides)
    settings = Settings.read(config.policy)  # mistakes, before anything is started
    config.logger["log_dir"] = get_next_experiment_dir(config.logger["log_dir"])

    init_ray()
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(config.policy["generation"], tokenizer)
    dataset, validation, environments, validation_environments = setup_response_data(tokenizer, config.data, config.env)
    with policies_of(distillation):
        student, teacher, generation, _, loader, validation_loader, _, logger, checkpointer, state, config = (
            distillation.setup(config, tokenizer, dataset, validation)
        )
    vocabulary = AutoConfig.from_pretrained(config.policy["model_name"]).vocab_size
    distillation.distillation_train(
        student,
        teacher,
        generation,
        loader,
        validation_loader,
        tokenizer,
        OPRDOutputLoss(settings.loss.output, vocabulary),
        environments,
        validation_environments,
        logger,
        checkpointer,
        state,
        config,
    )


if __name__ == "__main__":
    main()
