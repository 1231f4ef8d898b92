"""Output directories, checkpoints, secrets, and the commands that read a finished run."""

# One case per line, however long: a table.
# fmt: off
from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from bad_input_case import Category, Place, cut

CATEGORIES: list[Category] = []

case = Category("Output")
CATEGORIES.append(case)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Temporary files go to the device that is always full."""
    with mock.patch("tempfile.TemporaryFile", return_value=open("/dev/full", "r+b", buffering=0)):
        yield


@contextlib.contextmanager
def no_permission() -> Iterator[None]:
    """Root may write everywhere, so permissions alone would not show anything."""

    def refuse(dir: Path, **_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(dir))

    with mock.patch("tempfile.TemporaryFile", refuse):
        yield


def earlier_result(place: Place) -> None:
    place.output.mkdir()
    (place.output / "precious").write_text("kept")


def other_evaluation(place: Place) -> None:
    from nemo_oprd.evaluation.generations import Generations, model_identity

    about = {"model": model_identity(place.student), "engine": "megatron", "precision": "fp32", "seed": 0, "samples": 16}
    Generations(place.output, about).begin(afresh=False)
    (place.output / "generations" / "held.jsonl").write_text("{}\n")


def trained(place: Place) -> None:
    """A run directory with the settings of its two steps."""
    from nemo_oprd.config.loading import load_config, to_yaml

    place.checkpoint()
    models = [f"{role}.hf_path={place.root / role}" for role in ("student", "teacher")]
    settings = [f"output={place.output}", "train.steps=2", f"data.train={place.prompts}"]
    (place.output / "config.yaml").write_text(to_yaml(load_config("verify", [*models, *settings])))
    (place.output / "metrics.jsonl").write_text('{"step": 2, "time": 0.0, "rep/loss": 1.0}\n')


case("output a file", "an output that is a file", "output={root}/prompts.jsonl | is a file, expected a directory | choose another output", "output={root}/prompts.jsonl")
case("output below a file", "an output below a file", "prompts.jsonl is a file, expected a directory", "output={root}/prompts.jsonl/run", command="verify")
case("root for an output", "the root of the file system as output", "output=/ is the root of the file system | expected a directory of its own | choose e.g. output=runs/first", "output=/")
case("system's directory", "a directory of the system as output", "output=/usr is a directory of the system | expected a directory of its own", "output=/usr", command="evaluate")
case("no output", "an empty output", "output='' | expected a path | give one", "output=''")
case("unwritable", "an output that may not be written", "output={root}/run | Permission denied | change its permissions", wrap=no_permission)
case("full disk", "a disk that is full", "output={root}/run | No space left on device | free some space", wrap=full_disk, command="evaluate")
case("evaluation into a run", "`evaluate` into the directory of a run", "output={root}/run exists and is not an evaluation; choose another directory: it is a training run that train made", prepare=trained, command="evaluate")
case("run into an evaluation", "`train` into the directory of an evaluation", "output={root}/run exists and is not a training run; choose another directory: it is an evaluation that evaluate made", prepare=other_evaluation)
case("run over a file", "`train` into a directory with a file that it would overwrite", "output={root}/run holds metrics.jsonl, which train would overwrite and did not make | choose another output", prepare=lambda p: [p.output.mkdir(), (p.output / "metrics.jsonl").write_text("mine")])
case("evaluation in a run's place", "`evaluate` into a part of a run", "output={root}/run/evaluations/mine belongs to {root}/run, a training run that train made, which writes evaluations there | choose another output", "output={root}/run/evaluations/mine", prepare=trained, command="evaluate")
case("report over a file", "`report` over a file that it did not make", "--output {root}/prompts.jsonl exists, and report did not make it | choose another name", command="report", arguments=("{root}/run", "--output", "{root}/prompts.jsonl"), prepare=trained)
case("output of something else", "`verify` into a directory of something else", "output={root}/run exists and is not a verify result | choose another", prepare=earlier_result, command="verify")
case("other responses", "`evaluate` into a directory of another evaluation", "run/generations holds responses with samples=16, expected 2 | remove that directory, or choose another output", "evaluation.samples=2", prepare=other_evaluation, command="evaluate")
case("responses of unknown origin", "`evaluate` into a directory with responses that nothing describes", "about.json: no such file, expected how the responses beside it were sampled | remove that directory", prepare=lambda p: [other_evaluation(p), (p.output / "generations" / "about.json").unlink()], command="evaluate")
case("output over a source", "an export that would replace its source", "student.hf_path={root}/run/hf | choose another output", "student.hf_path={root}/run/hf", prepare=lambda p: shutil.copytree(p.student, p.output / "hf"))

case = Category("Checkpoints")
CATEGORIES.append(case)


class Malicious:
    """Unpickling this would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return (Path.write_text, (self.file, "run"))


def malicious_index(place: Place) -> None:
    (place.checkpoint() / ".metadata").write_bytes(pickle.dumps(Malicious(place.root / "pwned")))
    place.write_state()


def malicious_common(place: Place) -> None:
    import torch

    torch.save(Malicious(place.root / "pwned"), place.checkpoint() / "common.pt")
    place.write_state()


def outside_index(place: Place) -> None:
    """An index whose chunks lie outside the checkpoint."""
    file = place.checkpoint() / ".metadata"
    content = pickle.loads(file.read_bytes())
    info = next(iter(content.storage_data.values()))
    info.relative_path = "../../../rollouts.jsonl"
    file.write_bytes(pickle.dumps(content))
    place.write_state()


def of_megatron_bridge(place: Place, old: str, new: str) -> None:
    """As Megatron-Bridge writes it: without hf/, described by its run_config.yaml, which is changed."""
    shutil.rmtree(place.converted / "hf")
    file = place.converted / "run_config.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


MEGATRON = "student.checkpoint={root}/student-megatron"
case("no checkpoint", "a checkpoint that does not exist", "nowhere: no such directory | expected a torch_dist checkpoint", "student.checkpoint={root}/nowhere")
case("directory of checkpoints", "a directory of checkpoints whose tracker file names none of them", "latest_checkpointed_iteration.txt names the checkpoint '7' | expected one of those beside it (iter_0000002) | correct the number", "student.checkpoint={root}/run/checkpoints", "output={root}/other", prepare=lambda p: p.checkpoint("7"))
case("checkpoint of another model in Megatron-Bridge's words", "a checkpoint of Megatron-Bridge with another model's config.json", "run_config.yaml: rotary_base=10000.0 | {root}/student/config.json asks for 50000.0 | set hf_path= to the directory of the model", MEGATRON, prepare=lambda p: of_megatron_bridge(p, "rotary_base: 50000.0", "rotary_base: 10000.0"))
case("adapters", "a checkpoint of Megatron-Bridge with adapters only", "run_config.yaml: peft is set | expected a whole model | merge the adapters", MEGATRON, prepare=lambda p: of_megatron_bridge(p, "checkpoint:", "peft: {dim: 8}\ncheckpoint:"))
case("checkpoint without a config", "a checkpoint without config.json", "no hf/config.json there | copy config.json", MEGATRON, prepare=lambda p: shutil.rmtree(p.converted / "hf"))
case("checkpoint format", "a checkpoint of another format", "format 'zarr' | expected 'torch_dist' | --ckpt-format torch_dist", MEGATRON, prepare=lambda p: p.edit(p.converted / "metadata.json", sharded_backend="zarr"))
case("checkpoint and config", "a checkpoint with another model's config", "but hf/config.json asks for | different models", MEGATRON, prepare=lambda p: [p.edit(f, intermediate_size=40) for f in (p.converted / "hf" / "config.json", p.teacher / "config.json")])
case("missing chunk file", "a checkpoint without one of its files", "__0_0.distcp can't be read (it is missing, expected | copy its *.distcp files again", MEGATRON, prepare=lambda p: (p.converted / "__0_0.distcp").unlink(), library=r"missing, expected (\d+)")
case("truncated chunk file", "a truncated checkpoint file", "__0_0.distcp can't be read (it has 5000 bytes, expected | copy", MEGATRON, prepare=lambda p: cut(p.converted / "__0_0.distcp", 5000), library=r"bytes, expected (\d+)")
case("tracker", "a tracker file that holds no number", "latest_checkpointed_iteration.txt holds 'garbage' | expected the number of a checkpoint | write the number of one of [2]", prepare=lambda p: p.checkpoint("garbage"))
case("fewer steps than done", "a run that has more steps than it is asked for", "train.steps=1: output={root}/run has a checkpoint after 2 steps | expected at least 2 | raise train.steps, or choose another output", "train.steps=1", prepare=trained)
case("changed settings", "a run that goes on with other settings", "step 2 of output={root}/run was made with other settings | train.lr: 1e-05 -> 0.1, train.weight_decay: 0.01 -> 0.5 | set them back, or choose another output, or go on with train.allow_changes=[train.lr,train.weight_decay]", "train.lr=0.1", "train.weight_decay=0.5", "student.parallel.pipeline=1", prepare=trained)
case("leave for an unknown key", "leave to change a key that does not exist", "train.allow_changes: unknown key 'train.lrr' | did you mean 'train.lr'?", "train.allow_changes=[train.lrr]")
case("half-written", "a checkpoint that is not complete", "iter_0000002 is incomplete (state.json is missing) | expected one to resume from | remove {root}/run/checkpoints to start over", prepare=lambda p: (p.checkpoint() / "state.json").unlink())
case("checkpoint of another model", "a run directory of another model", "iter_0000002 is a checkpoint of another model: ffn_size=40 there, and 48 | choose another output", prepare=lambda p: [p.edit(p.checkpoint() / "hf" / "config.json", intermediate_size=40), p.write_state()])
case("damaged index", "a damaged index", ".metadata can't be read | expected the index | copy the checkpoint again", prepare=lambda p: [cut(p.checkpoint() / ".metadata", 100), p.write_state()], library=r"read \((.*?)\); expected")
case("program in the index", "an index that would run a program", ".metadata can't be read (asks for pathlib.Path.write_text | expected the index of a torch_dist checkpoint and nothing else | a source that you trust", prepare=malicious_index)
case("program in common.pt", "a common.pt that would run a program", "common.pt can't be read | expected plain values and tensors | copy", prepare=malicious_common, library=r"read \((.*?)\); expected")
case("index that points outside", "an index that points outside its checkpoint", "names the file '../../../rollouts.jsonl' | expected one inside | don't use it", prepare=outside_index)

case = Category("Secrets")
CATEGORIES.append(case)


@contextlib.contextmanager
def secret() -> Iterator[None]:
    with mock.patch.dict(os.environ, {"HF_TOKEN": SECRET}):
        yield


SECRET = "not-for-your-eyes"
case("password in an address", "a password in the address of a server", "rollout.vllm.endpoints.0 holds an address with a user name, a password or a token (not shown) | expected an address alone | leave it out", f"rollout.vllm.endpoints=['http://me:{SECRET}@node7:8000']")
case("password for a number", "an address with a password where a number belongs", "train.lr holds an address with a user name, a password or a token (not shown)", f"train.lr=http://me:{SECRET}@node7")
case("key as a setting", "an API key as a setting", "unknown key 'logging.wandb_api_key' | expected no secrets | set the environment variable", f"logging.wandb_api_key={SECRET}")
case("secret from the environment", "a secret of the environment in a setting", "logging.wandb holds the value of the environment variable HF_TOKEN | expected no secrets | remove it", "logging.wandb=${oc.env:HF_TOKEN}", wrap=secret)
case("what looks like a key", "a W&B key where a project name belongs", "logging.wandb holds what looks like an access key | expected no secrets | remove it", "logging.wandb=" + "0123456789" * 4)

case = Category("Reports and toys")
CATEGORIES.append(case)
case("report of nothing", "`report` of a directory that is no run", "config.yaml: there is no such file | give the `output` directory", command="report", arguments=("{root}/nowhere",))
case("report of broken metrics", "`report` of malformed metrics", "metrics.jsonl, line 1: not valid JSON | remove the line", command="report", arguments=("{root}",), prepare=lambda p: [(p.root / "config.yaml").write_text("a: 1"), (p.root / "metrics.jsonl").write_text("{\n{}\n")], library=r"JSON \((.*?)\);")
case("report without a pause", "`report` that is written anew without a pause", "--follow 0.0: expected seconds above 0 | choose", command="report", arguments=("{root}", "--follow", "0"))
case("report of no steps", "a timeline of steps that are none", "--steps 5-2: expected a step or a range of steps, from 1 | choose", command="report", arguments=("{root}", "--steps", "5-2"))
case("report of later steps", "a timeline of steps after the last one", "--steps 900-910: the last step is 2 | expected steps up to it | choose e.g. 2", command="report", arguments=("{root}/run", "--steps", "900-910"), prepare=trained)
case("report of a line without a time", "`report` of metrics without a time", "metrics.jsonl, line 1: expected an object with an integer `step` and a `time` | remove or correct the line", command="report", arguments=("{root}",), prepare=lambda p: [(p.root / "config.yaml").write_text("a: 1"), (p.root / "metrics.jsonl").write_text('{"step": 1, "time": null, "rep/loss": 1.0}\n')])
case("toy over a file", "`toy` into a file", "prompts.jsonl | expected", command="toy", arguments=("--output", "{root}/prompts.jsonl"))
