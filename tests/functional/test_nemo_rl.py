"""`OPRDWorker` and `OPRDOutputLoss` in NeMo-RL's updates: losses and every gradient against the golden cases.

By default the updates are those of a stand-in of our own (nemo_rl_stand_in/). With `NEMO_RL_SOURCE`, a directory with
the source tree of NeMo-RL 0.7.0 (its package `nemo_rl` is in it), the same cases run on NeMo-RL's own code, the
stand-in's signatures are compared with it, and its distillation recipes are read.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adopted_golden import check
from golden_runs import EXPECTED, TOLERANCE
from nemo_rl_cases import source_named
from omegaconf import OmegaConf
from pool import HostedPools, Pools, WorkerError

from nemo_oprd.config.loading import from_composed
from nemo_oprd.integrations.from_nemo_rl.keys import translate
from nemo_oprd.integrations.from_nemo_rl.recipe import load_recipe

HERE = Path(__file__).parent
STAND_IN = HERE / "nemo_rl_stand_in"
TE = "transformer_engine"
# the golden program's names of the output-space term
OUTPUT = {"out": "kind", "w_out": "weight", "topk": "k"}

# name -> (ranks, sizes, case, temperature): ordinary batches and Megatron's local layers
LOCAL: dict[str, tuple[int, dict[str, Any], str, float]] = {
    "PP2": (2, {"pipeline": 2}, "composite_full_mu3", 0.7),
    "TP2": (2, {"tensor": 2}, "opd_top_k_4", 0.7),
    "DP2": (2, {"data": 2}, "normalized_sum", 1.0),
}
# packed sequences, which need the layers of the stand-in for Transformer Engine
CASES = ("composite_full_mu3", "predicting", "opd_sampled_token", "no_final_norm")
PACKED: dict[str, tuple[int, dict[str, Any]]] = {
    "PP2": (2, {"pipeline": 2}),
    "TP2": (2, {"tensor": 2}),
    "TP2 SP": (2, {"tensor": 2, "sequence": True}),
    "DP2": (2, {"data": 2}),
    "CP2": (2, {"context": 2}),
    "PP2 CP2": (4, {"pipeline": 2, "context": 2}),
}


def terms(case: str) -> dict[str, Any]:
    """The keys below `loss` of a golden case."""
    options = dict(EXPECTED[case]["options"])
    output = {name: options.pop(key) for key, name in OUTPUT.items() if key in options}
    if "w_rep" in options:
        options["weight"] = options.pop("w_rep")
    return {"representation": options, "output": output}


def check_case(case: str, found: tuple[dict[str, float], dict[str, torch.Tensor], list[float]]) -> None:
    """Also what the driver logs as loss, which is not the output term alone."""
    logged = found[0].pop("logged/loss")
    assert logged == pytest.approx(found[2][0], rel=TOLERANCE)
    check(case, found[:2])
    if "output/loss" in EXPECTED[case]:
        weights = terms(case)["representation"]["weight"], terms(case)["output"]["weight"]
        total = weights[0] * EXPECTED[case]["rep/loss"] + weights[1] * EXPECTED[case]["output/loss"]
        assert found[2][0] == pytest.approx(total, rel=TOLERANCE)


@pytest.mark.parametrize("name", LOCAL)
def test_golden(pools: Pools, name: str) -> None:
    ranks, sizes, case, temperature = LOCAL[name]
    arguments = {"loss": terms(case), "layout": sizes, "temperature": temperature}
    check_case(case, pools[ranks].run("nemo_rl_cases:golden_updates", **arguments))


def test_several_calls_and_updates(pools: Pools) -> None:
    """The loss falls over calls; the updates of a call have weights of their own, and their losses are averaged."""
    case, arguments = "mse_all_last_k", {"loss": terms("mse_all_last_k"), "layout": {"data": 2}}
    *_, losses = pools[2].run("nemo_rl_cases:golden_updates", calls=3, **arguments)
    assert losses[0] == pytest.approx(EXPECTED[case]["rep/loss"], rel=TOLERANCE)
    assert losses[2] < losses[1] < losses[0]
    metrics, _, (three,) = pools[2].run("nemo_rl_cases:golden_updates", parts=3, size=1, **arguments)
    assert 0.5 * losses[0] < three < 1.2 * losses[0]
    assert metrics["rep/loss"] == pytest.approx(three, rel=TOLERANCE)


def test_a_dropped_injection_stops_the_update(pools: Pools) -> None:
    arguments = {"loss": terms("no_final_norm"), "layout": {"pipeline": 2}, "fault": "bypassed"}
    with pytest.raises(WorkerError, match="CaptureError: layer 3 of the adopted student received its loss gradient 0"):
        pools[2].run("nemo_rl_cases:golden_updates", **arguments)


def test_another_loss_function(pools: Pools) -> None:
    """Any loss function of NeMo-RL's, unless states between the stages would be divided by the temperature."""
    arguments = {"loss": terms("no_final_norm"), "layout": {"pipeline": 2}, "another_loss": True}
    check_case("no_final_norm", pools[2].run("nemo_rl_cases:golden_updates", **arguments))
    with pytest.raises(WorkerError, match="temperature=0.7 with pipeline_model_parallel_size=2: .*choose one"):
        pools[2].run("nemo_rl_cases:golden_updates", temperature=0.7, **arguments)


def test_data_without_weights_is_refused(pools: Pools) -> None:
    arguments = {"loss": terms("no_final_norm"), "layout": {"data": 2}, "fault": "no weights"}
    with pytest.raises(
        WorkerError, match="the training data has no mtp_loss_mask; expected the weights .*with_weights"
    ):
        pools[2].run("nemo_rl_cases:golden_updates", **arguments)


def test_driver(pools: Pools) -> None:
    """NeMo-RL's `setup` gets policies whose data have the weights of every update, and no empty entries."""
    found = pools[1].run("nemo_rl_cases:driver", source=None)
    assert found["restored"] and found["worker"] == "nemo_oprd.integrations.rl_actor.OPRDActor"
    weights = ["mtp_loss_mask", "oprd_output_weight"]
    assert found["keys"] == sorted([*weights, "input_ids", "input_lengths", "sample_mask", "token_mask"])
    for name in weights:  # six responses, of which three are an update; the last one has no supervised token
        assert found["sums"][name] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2, 0])


def packed_run(source: str | None) -> Iterator[Callable[..., Any]]:
    """`run(ranks, **kwargs)` is `golden_updates` on packs, in workers that can import the stand-in of the layers."""
    pools = HostedPools({"PYTHONPATH": os.pathsep.join([str(HERE / "te_stand_in"), os.environ.get("PYTHONPATH", "")])})
    yield lambda ranks, **kwargs: pools.run(
        ranks, "te_cases:with_layers", layers=TE, function="nemo_rl_cases:golden_updates", backend=TE, packed=True,
        source=source, **kwargs,
    )  # fmt: skip
    pools.close()


@pytest.fixture(scope="module")
def on_stand_in() -> Iterator[Callable[..., Any]]:
    yield from packed_run(None)


@pytest.fixture(scope="module")
def on_source() -> Iterator[Callable[..., Any]]:
    source = source_named()
    if source is None:
        pytest.skip("NEMO_RL_SOURCE names no source tree of NeMo-RL 0.7.0")
    yield from packed_run(source)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PACKED)
def test_packed(on_stand_in: Callable[..., Any], name: str, case: str) -> None:
    ranks, sizes = PACKED[name]
    check_case(case, on_stand_in(ranks, loss=terms(case), layout=sizes))


@pytest.mark.nemo
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PACKED)
def test_nemo_rl(on_source: Callable[..., Any], name: str, case: str) -> None:
    """NeMo-RL's own sharding, packing, forward step, loss calls, scaling and `train`."""
    ranks, sizes = PACKED[name]
    check_case(case, on_source(ranks, loss=terms(case), layout=sizes, temperature=0.7))


def signatures(file: Path) -> dict[str, list[str]]:
    """Class and method -> the names of its parameters, with `*` for those by keyword; enum members by value."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    given = item.args
                    names = [argument.arg for argument in given.args]
                    names += [f"*{argument.arg}" for argument in given.kwonlyargs]
                    found[f"{node.name}.{item.name}"] = names
                elif isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant):
                    found[f"{node.name}.{item.targets[0].id}"] = [str(item.value.value)]  # type: ignore[attr-defined]
    return found


@pytest.mark.nemo
def test_signatures_of_the_stand_in() -> None:
    source = source_named()
    if source is None:
        pytest.skip("NEMO_RL_SOURCE names no source tree of NeMo-RL 0.7.0")
    compared = 0
    for file in sorted(STAND_IN.rglob("*.py")):
        theirs = signatures(Path(source) / file.relative_to(STAND_IN))
        for name, parameters in signatures(file).items():
            if not name.rpartition(".")[2].startswith("_") or name.endswith("__"):
                assert theirs[name] == parameters, f"{file.name}: {name}"
                compared += 1
    assert compared > 15


@pytest.mark.nemo
def test_what_the_driver_names_is_there() -> None:
    """Every name that the driver and the worker's side import; the driver itself needs GPUs."""
    source = source_named()
    if source is None:
        pytest.skip("NEMO_RL_SOURCE names no source tree of NeMo-RL 0.7.0")
    root, checked = HERE.parent.parent, 0
    for file in (root / "examples" / "nemo_rl" / "run_oprd.py", *(root / "nemo_oprd" / "integrations").glob("rl_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_rl"):
                module = Path(source, *str(node.module).split("."))
                text = (module / "__init__.py" if module.is_dir() else module.with_suffix(".py")).read_text()
                for alias in node.names:
                    name = alias.name
                    defined = rf"^(class|def) {name}\b|^{name}\b.*=|^    {name},?$|import .*\b{name}\b"
                    there = (module / f"{name}.py").is_file() or re.search(defined, text, re.MULTILINE)
                    assert there, (file.name, name)
                    checked += 1
    assert checked > 15
    tree = ast.parse(Path(source, "nemo_rl", "algorithms", "distillation.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [argument.arg for argument in functions["distillation_train"].args.args] == [
        "student_policy", "teacher_policy", "student_generation", "dataloader", "val_dataloader", "tokenizer",
        "loss_fn", "task_to_env", "val_task_to_env", "logger", "checkpointer", "distillation_save_state",
        "master_config",
    ]  # fmt: skip
    last = functions["setup"].body[-1]
    assert isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple)
    assert [element.id for element in last.value.elts] == [  # type: ignore[attr-defined]
        "student_policy", "teacher_policy", "student_generation", "nemo_gym_actor", "dataloader", "val_dataloader",
        "loss_fn", "logger", "checkpointer", "distillation_save_state", "master_config",
    ]  # fmt: skip


@pytest.mark.nemo
def test_recipes() -> None:
    """NeMo-RL's distillation recipes: the same values as by its own loader, and a configuration that is accepted."""
    source = source_named()
    if source is None:
        pytest.skip("NEMO_RL_SOURCE names no source tree of NeMo-RL 0.7.0")
    spec = importlib.util.spec_from_file_location("nemo_rl_config", Path(source) / "nemo_rl" / "utils" / "config.py")
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    theirs.register_omegaconf_resolvers()
    found = [*Path(source, "examples").rglob("*distillation*.yaml")]
    for recipe in found:
        values = load_recipe(recipe)
        assert values == OmegaConf.to_container(theirs.load_config(recipe), resolve=True), recipe
        made = translate(values, recipe.stem, "models")
        assert from_composed(made.config, recipe.stem).student.hf_path.startswith("models/"), recipe
        assert not any("unknown here" in note for note in made.notes), made.notes
    assert len(found) == 20
