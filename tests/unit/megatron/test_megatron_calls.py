"""Every call of Megatron-core and Megatron-Bridge in this project means the same in all versions that it runs on.

`megatron_signatures.json` holds what is called, as the oldest and the newest supported version declare it. A parameter
that moved, that is gone, or whose default changed is found here, whichever version is installed.
"""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import PackageNotFoundError, version

import pytest
from megatron_calls import NOTED, Call, all_calls, calls, installed_signatures, package_of

# distribution -> version -> name -> parameters
NOTES: dict[str, dict[str, dict[str, list[str]]]] = json.loads(NOTED.read_text())
# the only module that may call what not all versions have; it asks which it is first
VERSIONS_MODULE = "nemo_oprd/megatron/versions.py"
# methods that are overridden, which older versions lack, and why that does no harm
NEWER = {
    "megatron.core.transformer.multi_latent_attention.MLASelfAttention._resolve_qk_norm_config": (
        "the class is built with Megatron-Bridge 0.6 only, which needs 0.19"
    ),
}
# Settings of these classes are read by name; a new one is off by default, or the layout and golden tests would fail.
CONFIGURATIONS = {
    *("TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"),
    *("CheckpointConfig", "ConfigContainer", "LoggerConfig"),
}
# what a version has, but can't be imported without a package that the index lacks
NOT_IMPORTED = {"megatron.bridge.training.finetune.finetune"}
# (function, parameter) whose default differs, or which a version doesn't have, and why the calls may leave it out
EXAMINED = {
    ("dist_checkpointing.load", "common_strategy"): "gone; the default reads what the same version writes",
    ("dist_checkpointing.load", "verify_integrity"): "off; the index and the lengths of files are checked before",
    ("dist_checkpointing.load", "process_group"): "None is the world, as before",
    ("dist_checkpointing.save", "common_strategy"): "gone; common_state is then a part of the shards",
    ("dist_checkpointing.save", "async_strategy"): "read with async_sharded_save only, which nothing here sets",
    ("dist_checkpointing.save", "verify_integrity"): "off; it would read the whole checkpoint again",
    ("torch.TorchDistLoadShardedStrategy", "*"): "a rehearsal with 0.16 makes one; 0.19 makes its own",
    ("core.CheckpointingConfig", "common_backend"): "gone; a loader that knows it has the value that was written",
    ("core.CheckpointingConfig", "common_backend_version"): "as common_backend",
    ("DistributedDataParallel", "full_param_layout"): "None: each bucket has a layout of its own, as before",
    ("get_gpt_layer_local_spec", "moe_use_legacy_grouped_gemm"): "gone, was False",
    ("get_gpt_layer_with_transformer_engine_spec", "moe_use_legacy_grouped_gemm"): "gone, was False",
    ("get_gpt_layer_with_transformer_engine_spec", "mla_down_proj_fusion"): "new, False",
    ("get_gpt_layer_with_transformer_engine_spec", "use_grouped_gemm_for_dense_mlp"): "new, False",
    ("GPTModel.forward", "output_processor"): "new, None",
    ("GPTModel.forward", "output_processor_context"): "new, None",
    ("init_num_microbatches_calculator", "step_batch_size_schedule"): "new, None: a constant batch",
    ("init_num_microbatches_calculator", "seq_length"): "new, for a schedule only",
    ("initialize_model_parallel", "create_all_gather_group"): "gone, was False",
    ("initialize_model_parallel", "gtp_remat_size"): "new, 1 is off",
    ("initialize_model_parallel", "expert_gtp_remat_size"): "new, 1 is off",
    ("initialize_model_parallel", "rank_offset"): "new, 0",
    ("initialize_model_parallel", "local_world_size"): "new, None",
    ("get_forward_backward_func", "schedule_pg_collection"): "new, for schedules with several collections",
    ("initialize_rerun_state_machine", "*"): "the stand-in for it is declared in other words",
    ("param_is_not_tensor_parallel_duplicate", "expert_tp_group"): "None: asks tp_group, as before",
    ("PackedSeqParams", "*"): "new, read by hybrid models and by context parallelism over documents",
    ("SelfAttention.__init__", "*"): "new, None",
    ("build_pretraining_data_loader", "seed"): "of a sampler that is not used here",
    ("checkpointing.load_checkpoint", "*"): "new, None: as before",
    ("DatasetBuildContext", "pg_collection"): "None: the datasets here don't ask for groups",
    ("train.train_step", "p2p_communicator"): "passed where the version has it, in **more",
    ("ConfigContainer", "__version__"): "of the format of run_config.yaml, which is read by its keys",
    ("LoggerConfig", "logging_level"): "None: what Python's logging has",
    ("TransformerConfig", "moe_deepep_num_sms"): "None is chosen by the dispatcher, which takes 20 then, as before",
    ("TransformerConfig", "moe_hybridep_num_sms"): "of a dispatcher that is not used here",
    ("TransformerConfig", "cuda_graph_use_single_mempool"): "CUDA graphs are refused",
    ("TransformerConfig", "cuda_graph_scope"): "CUDA graphs are refused",
}


def parameters(signature: list[str]) -> dict[str, str | None]:
    """Parameter -> its default, in order; None without one. "*" stands for the end of the positional ones."""
    return {name: default or None for name, _, default in (each.partition("=") for each in signature)}


def problems(call: Call) -> list[str]:
    """What the call means in one version and not in another."""
    found = []
    of_package = NOTES[str(package_of(call.name))]
    known = {release: parameters(notes[call.name]) for release, notes in of_package.items() if call.name in notes}
    missing = sorted(set(of_package) - set(known)) if call.name not in NOT_IMPORTED else []
    if missing:
        return [f"{call.place}: {call.name} is not in {', '.join(missing)}"] if known else []
    for i in range(call.positional or 0):
        there = {release: positional_name(declared, i) for release, declared in known.items()}
        if len({name for name in there.values() if not name.startswith("*")}) > 1:
            found.append(f"{call.place}: argument {i + 1} of {call.name} is {there}; pass it by keyword")
    for keyword in call.keywords:
        for release, declared in known.items():
            if keyword != "**" and keyword not in declared and not any(name.startswith("**") for name in declared):
                found.append(f"{call.place}: {call.name} has no parameter {keyword} in {release}")
    return found


def positional_name(declared: dict[str, str | None], i: int) -> str:
    """The parameter that takes positional argument i (0-based)."""
    names = list(declared)
    for j, name in enumerate(names):
        if name.startswith("*"):
            return name if len(name) > 1 or j > i else "none"
        if j == i:
            return name
    return "none"


def unexamined(call: Call) -> list[str]:
    """Parameters that the call leaves out, which not all versions have with the same default."""
    found = []
    of_package = NOTES[str(package_of(call.name))]
    known = [parameters(notes[call.name]) for notes in of_package.values() if call.name in notes]
    is_configuration = call.name.rpartition(".")[2] in CONFIGURATIONS
    if is_configuration:
        common = set.intersection(*(set(declared) for declared in known))
        names = [name for name in known[0] if name in common]
    else:
        names = sorted({name for declared in known for name in declared if not name.startswith("*")})
    for name in names:
        passed = name in call.keywords or call.positional is None or ("**" in call.keywords and not is_configuration)
        position = [list(declared).index(name) for declared in known if name in declared]
        passed = passed or all(at < (call.positional or 0) for at in position)
        same = len({declared.get(name, "absent") for declared in known}) == 1
        reason = any(call.name.endswith(f"{end}") and at in (name, "*") for end, at in EXAMINED)
        if not passed and not same and not reason:
            found.append(
                f"{call.place}: {call.name} without {name}, which is {[each.get(name, 'absent') for each in known]}"
            )
    return found


@pytest.mark.parametrize("package", NOTES)
def test_the_notes_are_those_of_the_installed_version(package: str) -> None:
    """After a change of what is called: `python tests/unit/megatron/megatron_calls.py --write` in each environment."""
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed; scripts/test_other_python.sh runs this test where it is")
    if installed not in NOTES[package]:
        pytest.skip(f"{package} {installed}: noted are {', '.join(NOTES[package])}")
    if package == "megatron-bridge" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Megatron-Bridge can't be imported without Transformer Engine, or the stand-in for it on the path")
    assert installed_signatures(package) == NOTES[package][installed]


@pytest.mark.parametrize("package", NOTES)
def test_all_versions_note_the_same_names(package: str) -> None:
    names = [set(notes) - NOT_IMPORTED - set(NEWER) for notes in NOTES[package].values()]
    assert names[0] == names[-1], names[0] ^ names[-1]


def test_every_call_means_the_same_in_all_versions() -> None:
    found, _ = all_calls()
    assert len({call.name for call in found}) > 40, "calls of Megatron are not found any more"
    assert not [line for call in found if not call.place.startswith(VERSIONS_MODULE) for line in problems(call)]


def test_every_default_that_changed_was_looked_at() -> None:
    found, _ = all_calls()
    lines = [line for call in found if not call.place.startswith(VERSIONS_MODULE) for line in unexamined(call)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    "code, said",
    [
        # the group would be taken for is_hybrid_cp, and the sequences divided among the whole world
        ("from megatron.core.utils import get_batch_on_this_cp_rank as f\nf(batch, group)", "argument 2"),
        ("from megatron.core import utils\nutils.get_batch_on_this_cp_rank(batch, group)", "argument 2"),
        ("from megatron.core.transformer.mlp import MLPSubmodules\nMLPSubmodules(a, b)", "argument 2"),
        (
            "from megatron.core.dist_checkpointing import save\nsave(s, d, async_strategy='mcore')",
            "has no parameter async_strategy in 0.16.1",
        ),
    ],
)
def test_a_moved_parameter_is_found(code: str, said: str) -> None:
    found, _ = calls(code, "planted.py")
    assert any(said in line for call in found for line in problems(call)), found


def test_a_default_that_a_version_lacks_is_found() -> None:
    found, _ = calls("from megatron.core.utils import get_batch_on_this_cp_rank as f\nf(batch)", "planted.py")
    assert any("is_hybrid_cp" in line for line in unexamined(found[0]))
