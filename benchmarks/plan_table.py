"""The table of docs/plan.md: what the shipped recipes need on some nodes of 8 GPUs, as `nemo-oprd plan` says.

    python -m benchmarks.plan_table

The shapes are those of the published models' config.json; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from nemo_oprd.commands.plan.estimate import Estimate, Lengths, estimate
from nemo_oprd.commands.plan.gpus import GPUS, Cluster
from nemo_oprd.config.loading import load_config
from nemo_oprd.setup.resolve import resolve

_ALL = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16", "vocab_size": 151936}
_QWEN3 = {**_ALL, "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
_R1 = {
    **_ALL,
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN3_30B_A3B = {
    **_ALL,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "DeepSeek-R1-Distill-Qwen-1.5B": _R1,
    "JustRL-DeepSeek-1.5B": _R1,
    "Qwen3-1.7B-Base": {
        **_QWEN3,
        "num_hidden_layers": 28,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "max_position_embeddings": 32768,
    },
    "Qwen3-4B": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "max_position_embeddings": 40960,
    },
    "Phi-4-mini-reasoning": {
        **_ALL,
        "model_type": "phi3",
        "num_hidden_layers": 32,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 200064,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen3-30B-A3B-specialist": _QWEN3_30B_A3B,
}
# recipe -> (student, teacher, the sizes that its sbatch script sets)
RECIPES = {
    "oprd_1p5b": (
        "DeepSeek-R1-Distill-Qwen-1.5B",
        "JustRL-DeepSeek-1.5B",
        ["student.parallel.tensor=2", "teacher.parallel.tensor=1", "rollout.tensor=1"],
    ),
    "bridge_qwen3_4b_to_1p7b": (
        "Qwen3-1.7B-Base",
        "Qwen3-4B",
        ["student.parallel.tensor=2", "teacher.parallel.tensor=2", "rollout.tensor=1"],
    ),
    "bridge_phi4mini_to_qwen3_1p7b": (
        "Qwen3-1.7B-Base",
        "Phi-4-mini-reasoning",
        ["student.parallel.tensor=2", "teacher.parallel.tensor=2", "rollout.tensor=1"],
    ),
    "oprd_qwen3_30b_a3b": (
        "Qwen3-30B-A3B",
        "Qwen3-30B-A3B-specialist",
        ["student.parallel.pipeline=2", "student.parallel.expert=8", "teacher.parallel.tensor=2",
         "teacher.parallel.sequence=true", "teacher.parallel.expert=8"],
    ),
}  # fmt: skip
# nodes and engines of the rows; one node is too small for 30 billion parameters, whose recipe samples with vLLM
ROWS = {"oprd_qwen3_30b_a3b": ((2, 4, 8), ("vllm",))}
NODES, ENGINES, GPUS_PER_NODE = (1, 2, 8), ("megatron", "vllm"), 8
RESPONSE, PROBLEMS = 8000, 143


def write_models(place: Path) -> None:
    """Writes the directories of all models, with config.json alone."""
    for name, shape in SHAPES.items():
        (place / name).mkdir(parents=True)
        (place / name / "config.json").write_text(json.dumps({"rope_theta": 10000, **shape}))


def planned(recipe: str, place: Path, nodes: int, engine: str) -> Estimate:
    """The estimate of a recipe; `place` holds the models."""
    student, teacher, sizes = RECIPES[recipe]
    models = [f"student.hf_path={place / student}", f"teacher.hf_path={place / teacher}"]
    config = load_config(recipe, [*models, *sizes, f"rollout.engine={engine}"])
    return estimate(
        resolve(config, nodes * GPUS_PER_NODE),
        Cluster(nodes * GPUS_PER_NODE, GPUS["h100"]),
        Lengths(None, RESPONSE, PROBLEMS),
    )


def table() -> list[str]:
    """The lines of the table."""
    lines = [
        "| recipe | nodes | engine | GB, reached in | seconds per step (sampling) | 500 steps | evaluation |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "models"
        write_models(place)
        for recipe in RECIPES:
            for nodes, engine in product(*ROWS.get(recipe, (NODES, ENGINES))):
                found = planned(recipe, place, nodes, engine)
                memory = found.kinds[0].memory
                hours = found.step_seconds * 500 / 3600
                evaluation = (found.evaluation_seconds or 0.0) / 60
                lines.append(
                    f"| {recipe} | {nodes} | {engine} | {memory.peak / 1e9:.1f}, {memory.fullest} | "
                    f"{found.step_seconds:.0f} ({found.seconds['sampling']:.0f}) | {hours:.1f} h | "
                    f"{evaluation:.0f} min |"
                )
    return lines


def main() -> None:
    """Prints the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("\n".join(table()))


if __name__ == "__main__":
    main()
