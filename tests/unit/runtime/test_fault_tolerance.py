"""The lock, the signals and the record of a run, in one process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.order import PromptOrder
from nemo_oprd.distillation.metrics.watched_metrics import ModelNeeds
from nemo_oprd.rollout import resume_cache
from nemo_oprd.rollout.engine import GenerationCancelled, Request, SamplingParams, Weights
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.schedule import Schedule, TrainingPrompts
from nemo_oprd.rollout.training_rollouts import RolloutSampler, StoppedSampling
from nemo_oprd.run.checkpoint_directory import commit_checkpoint, partial_directory
from nemo_oprd.run.checkpointer import EVALUATION_DEFERRED, Checkpointer, EvaluationOutcome, skipped_in_a_row
from nemo_oprd.run.metrics_log import MetricsLog
from nemo_oprd.run.start import _background_writers
from nemo_oprd.run.step_recorder import LossSpikeDetector
from nemo_oprd.run.training_state import check_resume_signature, resume_signature
from nemo_oprd.run.validation import Validation
from nemo_oprd.runtime import watchdog
from nemo_oprd.runtime.disk import naming
from nemo_oprd.runtime.run_lock import RunLock
from nemo_oprd.runtime.signals import Signals, Stopped, StoppedWaiting
from nemo_oprd.tools.report.page import write_report
from nemo_oprd.vllm.worker import nemo_oprd_guard as guard

NO_OUTPUT = ModelNeeds(None, teacher_states=False, teacher_logprobs=False)


@pytest.fixture
def alone() -> Any:
    with mock.patch.object(dist, "get_rank", return_value=0), mock.patch.object(resume_cache, "first_ranks", dict):
        yield


def run_log(output: Path, first_step: int = 0) -> MetricsLog:
    settings = ["student.hf_path=a", "teacher.hf_path=b", f"output={output}", "logging.tensorboard=false"]
    return MetricsLog(load_config("verify", settings), first_step)


def test_lock_names_its_holder_and_is_let_go(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on .*; wait until it has ended, or choose"):
        RunLock(tmp_path / "run")
    lock.release()
    lock.release()
    RunLock(tmp_path / "run").release()


def test_lock_behind_a_link(tmp_path: Path) -> None:
    """Of two directories whose locks are one file, one is free."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").symlink_to(tmp_path / "lock")
    lock = RunLock(tmp_path / "a")
    with pytest.raises(ValueError, match="is in use by process"):
        RunLock(tmp_path / "b")
    lock.release()
    RunLock(tmp_path / "b").release()


def a_student() -> Any:
    """As far as a checkpointer looks at it."""
    return SimpleNamespace(optimizer_steps=0)


def test_a_checkpoint_is_due_when_the_last_one_is_too_old(tmp_path: Path) -> None:
    """Minutes count from the last save, or from the start."""
    settings = ["student.hf_path=a", "teacher.hf_path=b", "train.save_minutes=10", "train.save_every=0"]
    train, nothing, saved = load_config("verify", settings).train, Signals(), list[int]()
    now = (0.0, 599.0, 600.0, 600.0, 1199.0, 1201.0, 1201.0, 1300.0)  # a save asks, too
    module = "nemo_oprd.run.checkpointer"
    with (
        mock.patch(f"{module}.save_checkpoint", lambda _, done, *args, **more: saved.append(done)),
        mock.patch(f"{module}.agree", lambda _, *flags: list(flags)),
        mock.patch(f"{module}.time", SimpleNamespace(monotonic=mock.Mock(side_effect=now))),
    ):
        checkpointer = Checkpointer(train, tmp_path, a_student(), tmp_path, nothing, 0, 0)
        for done in range(1, 6):
            checkpointer.after_step(done, [None], EvaluationOutcome())
    assert saved == [2, 4]


def test_a_stop_while_an_evaluation_is_under_way_defers_it(tmp_path: Path) -> None:
    """It began after the step and is sampled beside the next one, in whose sampling the run stops."""
    settings = ["student.hf_path=a", "teacher.hf_path=b", "train.save_every=0"]
    train, nothing, saved = load_config("verify", settings).train, Signals(), list[Any]()
    module = "nemo_oprd.run.checkpointer"
    with (
        mock.patch(f"{module}.save_checkpoint", lambda _, done, *args, more, **rest: saved.append((done, more))),
        mock.patch(f"{module}.agree", lambda _, *flags: list(flags)),
    ):
        checkpointer = Checkpointer(train, tmp_path, a_student(), tmp_path, nothing, 0, 0)
        for done, deferred in ((1, "names of weights"), (2, None)):
            checkpointer.after_step(done, [None], EvaluationOutcome(deferred=deferred))
            with pytest.raises(Stopped):
                checkpointer.stop_while_sampling(StoppedSampling(done, done + 1, 0, 4))
    assert saved == [(1, {EVALUATION_DEFERRED: "names of weights"}), (2, None)]


@pytest.mark.parametrize(("updated", "kept"), [(False, [2]), (True, [])])
def test_a_stop_while_a_server_is_waited_for_saves_the_steps_before(
    tmp_path: Path, updated: bool, kept: list[int]
) -> None:
    """Unless an update of the step that waits has changed the weights, which are then those of no step."""
    settings = ["student.hf_path=a", "teacher.hf_path=b", "train.save_every=0", "train.steps=9"]
    train, student, saved = load_config("verify", settings).train, a_student(), list[int]()
    module = "nemo_oprd.run.checkpointer"
    with (
        mock.patch(f"{module}.save_checkpoint", lambda _, done, *args, **more: saved.append(done)),
        mock.patch(f"{module}.agree", lambda _, *flags: list(flags)),
    ):
        checkpointer = Checkpointer(train, tmp_path, student, tmp_path, Signals(), 0, 0)
        for done in (1, 2):
            student.optimizer_steps += 1
            checkpointer.after_step(done, [None], EvaluationOutcome())
        student.optimizer_steps += updated
        with pytest.raises(Stopped) as ended:
            checkpointer.stop_while_waiting(StoppedWaiting("stopped by SIGTERM while waiting for a server"))
    assert saved == kept
    assert str(ended.value) == (
        f"stopped by SIGTERM while waiting for a server in step 3 of 9, with the weights after step {2 * len(kept)} "
        "saved; the same command resumes from there"
    )


def test_a_signal_before_training_stops_a_run_without_validation_sets() -> None:
    """It would otherwise train a whole step first."""
    signals = Signals()
    nothing: Any = None
    validation = Validation(nothing, nothing, nothing, nothing, nothing, nothing, 0, signals)  # type: ignore[arg-type]
    with mock.patch("nemo_oprd.run.validation.agree", lambda _, flag: [flag]):
        validation.before_training(nothing)
        signals.received = "SIGTERM"
        with pytest.raises(Stopped, match="stopped by SIGTERM before training"):
            validation.before_training(nothing)


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = "import sys, time; from nemo_oprd.runtime.run_lock import RunLock; from pathlib import Path\n"
    program += "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"process {holder.pid}"):
        RunLock(tmp_path)
    holder.kill()
    holder.communicate()
    assert (tmp_path / ".lock").read_text()  # what a crash leaves behind
    RunLock(tmp_path).release()


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker that outlives its run must not refuse the next start."""
    program = "import os, sys, time; from nemo_oprd.runtime.run_lock import RunLock; from pathlib import Path\n"
    program += "lock = RunLock(Path(sys.argv[1]))\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\n"
    program += "time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        assert holder.wait() == 0
        RunLock(tmp_path).release()
        os.kill(child, 0)  # it is alive
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("made", [True, False])
def test_an_undone_lock_leaves_the_directory_as_it_was(tmp_path: Path, made: bool) -> None:
    run = tmp_path / "run"
    if not made:
        run.mkdir()
    RunLock(run).undo()
    assert run.exists() is not made


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_lock_where_there_are_none_says_so(tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """filelock would fall back to a lock that a crash leaves behind."""
    with mock.patch.object(fcntl, "flock", side_effect=OSError(number, os.strerror(number))):
        first = RunLock(tmp_path)
        RunLock(tmp_path).release()
        first.release()
    assert capsys.readouterr().err.count(f"can't be locked ({os.strerror(number)}): start no second run") == 2


def test_signals_are_remembered_and_the_next_interrupt_is_the_kernels() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGUSR1"
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(
    ("watched", "raised", "stays"),
    [(True, Stopped, True), (True, ValueError, True), (True, None, False), (False, Stopped, False)],
)
def test_a_rank_that_leaves_with_an_exception_keeps_its_exit_code(
    watched: bool, raised: type[Exception] | None, stays: bool
) -> None:
    """A launcher sends SIGTERM to the ranks that end a moment after the first one, which has another exit code."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            mock.patch.object(watchdog, "_current", SimpleNamespace() if watched else None),
            contextlib.suppress(Stopped, ValueError),
            Signals() as signals,
        ):
            if raised is not None:
                raise raised
        remembers = signal.getsignal(signal.SIGTERM) == signals._remember
        assert remembers == stays
        if stays:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received == "SIGTERM"
        else:
            assert signal.getsignal(signal.SIGTERM) == before
    finally:
        for number, handler in signals._before.items():
            signal.signal(number, handler)


def test_numbers_that_are_not_finite_are_null_and_shown(tmp_path: Path, alone: None) -> None:
    log = run_log(tmp_path)
    for step, loss in enumerate((1.0, float("nan"), float("inf"), 0.5), start=1):
        log.write(step, {"loss/total": loss, "train/skipped_update": float(loss > 1 or loss != loss)})
    assert [json.loads(line)["loss/total"] for line in log.path.read_text().splitlines()] == [1.0, None, None, 0.5]
    assert log.history("loss/total") == {1: 1.0, 4: 0.5}
    assert skipped_in_a_row(list(log.history("train/skipped_update").values())[:3]) == 2
    assert write_report([tmp_path], tmp_path / "report.html").exists()


def test_spikes_of_a_term_that_has_either_sign() -> None:
    """Estimates of a divergence scatter around 0; one far out is a spike, also right after a resume."""
    estimates = np.random.default_rng(0).normal(-0.01, 0.02, 200).tolist()

    def seen(watch: LossSpikeDetector, losses: list[float], nonfinite_reason: str | None = None) -> list[str | None]:
        return [
            watch.check(
                SimpleNamespace(loss=loss, trained_losses={"output/loss": loss}, nonfinite_reason=nonfinite_reason)
            )  # type: ignore[arg-type]
            for loss in losses
        ]

    watch = LossSpikeDetector(10.0, {})
    assert seen(watch, estimates) == [None] * 200
    resumed = LossSpikeDetector(10.0, {"output/loss": estimates})
    for later in (watch, resumed):
        (spike,) = seen(later, [-1.0])
        assert spike is not None and spike.startswith("output/loss is -1; its median size was 0.0")
    (unusable,) = seen(watch, [math.nan], nonfinite_reason="a NaN")
    assert unusable is not None and unusable.startswith("output/loss is nan")
    assert seen(LossSpikeDetector(0.0, {"output/loss": estimates}), [-1.0]) == [None]


@pytest.mark.parametrize(("flags", "count"), [([], 0), ([0.0], 0), ([1.0, 1.0], 2), ([1.0, 0.0, 1.0], 1)])
def test_skipped_in_a_row(flags: list[float], count: int) -> None:
    assert skipped_in_a_row(flags) == count


def test_a_resumed_log_drops_what_is_made_again(tmp_path: Path, alone: None) -> None:
    log = run_log(tmp_path)
    for step in range(5):
        log.write(step, {"x": float(step)})
    with log.path.open("a") as file:
        file.write('{"step": 5, "ti')
    assert run_log(tmp_path, first_step=3).history("x") == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert run_log(tmp_path, first_step=0).history("x") == {}


def test_disk_errors_name_the_path(tmp_path: Path) -> None:
    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing")):
        with pytest.raises(OSError, match="No space left") as raised, naming(tmp_path / "x"):
            raise error
        assert raised.value.filename == str(tmp_path / "x")
    with pytest.raises(RuntimeError, match="something else"), naming(tmp_path):
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("override", "depth", "named"),
    [
        ("seed=1", 4, "made with seed=0, this run has 1"),
        ("precision=bf16", 4, "made with precision=fp32, this run has bf16"),
        ("seed=0", 2, "deepest_trained_layer=4, this run has 2"),
    ],
)
def test_a_run_that_could_not_go_on_as_it_began_is_refused(
    tmp_path: Path, override: str, depth: int, named: str
) -> None:
    def config(*overrides: str) -> Any:
        return load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", "output=c", *overrides])

    def objective(depth: int) -> Any:
        plain = {"teachers": [SimpleNamespace(bridge=None)], "trains_bridge": False, "trains_in_parts": False}
        return SimpleNamespace(trained_depth=depth, final_layer=None, trains_head=False, **plain)

    partial_directory(tmp_path, 5).mkdir()
    commit_checkpoint(tmp_path, {"step": 5, **resume_signature(config(), objective(4), NO_OUTPUT)})
    check_resume_signature(tmp_path, 5, config("train.lr=1e-9", "student.parallel.pipeline=4"), objective(4), NO_OUTPUT)
    with pytest.raises(ValueError, match=f"iter_0000005 was .*{re.escape(named)}; .*set it back, or choose another"):
        check_resume_signature(tmp_path, 5, config(override), objective(depth), NO_OUTPUT)


class TestPending:
    SAMPLING = SamplingParams(1.0, 1.0, 8, (0, 1, 3))
    ROLLOUTS = (Rollout([1, 2], [3], answer="4", finish_reason="stop"), Rollout([5], [6, 7], prompt="p"))
    REQUESTS = (Request([1, 2], answer="4"), Request([5], "p"))

    def take(self, tmp_path: Path, **changes: Any) -> dict[int, Rollout]:
        kept = SimpleNamespace(step=3, sampling=self.SAMPLING, requests=list(self.REQUESTS), weights={"student": "a"})
        vars(kept).update(changes)
        with mock.patch.object(resume_cache, "first_ranks_rollouts", lambda rollouts: rollouts):
            return ResumeCache(tmp_path, kept.weights).take(kept.step, kept.requests, kept.sampling)

    def put(self, tmp_path: Path, rollouts: dict[int, Rollout] | None = None, step: int = 3) -> ResumeCache:
        pending = ResumeCache(tmp_path, {"student": "a"})
        pending.put(step, dict(enumerate(self.ROLLOUTS)) if rollouts is None else rollouts, self.SAMPLING, 2)
        pending.finish()
        return pending

    def test_only_the_same_step_of_the_same_run(self, tmp_path: Path, alone: None) -> None:
        self.put(tmp_path)
        assert self.take(tmp_path) == dict(enumerate(self.ROLLOUTS))
        renamed = [replace(request, data_source="new") for request in self.REQUESTS]
        taken = self.take(tmp_path, requests=renamed)
        assert taken == {i: replace(rollout, data_source="new") for i, rollout in enumerate(self.ROLLOUTS)}
        assert self.take(tmp_path, step=2) == {}
        assert self.take(tmp_path, sampling=SamplingParams(0.9, 1.0, 8, (0, 1, 3))) == {}
        assert self.take(tmp_path, requests=[Request([1, 2]), Request([9])]) == {}
        assert self.take(tmp_path, requests=[Request([1, 2])]) == {}
        assert self.take(tmp_path, weights={"student": "b"}) == {}

    def test_some_of_a_step(self, tmp_path: Path, alone: None) -> None:
        """Those that were complete when a signal came."""
        self.put(tmp_path, {1: self.ROLLOUTS[1]})
        assert self.take(tmp_path) == {1: self.ROLLOUTS[1]}
        assert self.take(tmp_path, requests=[Request([1, 2]), Request([9])]) == {}

    def test_every_field_comes_back_bit_for_bit(self, tmp_path: Path, alone: None) -> None:
        draw = np.random.default_rng(0)

        def rollout(ids: list[int], length: int, **fields: Any) -> Rollout:
            logprobs = -draw.exponential(size=length).astype(np.float32)
            routes = draw.integers(0, 9, (len(ids) + length, 3, 2)).astype(np.int16)
            mask = draw.random(length) < 0.5
            response = draw.integers(0, 2**31, length)
            return Rollout(
                ids, response, mask, logprobs=logprobs, expert_routes=routes, weight_versions=[[3, 0, length]], **fields
            )

        full = rollout([1, 2], 21, answer="4", teacher_prompt_ids=[7], teacher_response_ids=[], teacher_index=[-1] * 21)
        put = {0: full, 1: replace(rollout([5], 0, prompt="p"), response_mask=None, finish_reason="length")}
        found = self.take(tmp_path) if self.put(tmp_path, put) else {}
        assert found == put
        for i in put:
            assert np.array_equal(found[i].expert_routes, put[i].expert_routes)
            assert found[i].expert_routes.dtype == np.int16
        with safe_open(tmp_path / "pending.safetensors", framework="numpy") as file:  # a file that others read, too
            assert file.get_tensor("response_ids").tolist() == put[0].response_ids.tolist()

    @pytest.mark.parametrize("at", [0.1, 0.5, 0.97, 0.999])
    def test_what_is_damaged_is_sampled_anew(self, tmp_path: Path, alone: None, at: float) -> None:
        path = self.put(tmp_path).path
        whole = path.read_bytes()
        path.write_bytes(whole[: int(at * len(whole))])
        assert self.take(tmp_path) == {}
        place = int(at * len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert self.take(tmp_path) == {}
        path.write_bytes(whole)
        assert len(self.take(tmp_path)) == 2

    def test_what_is_foreign_or_of_earlier_versions_is_sampled_anew(self, tmp_path: Path, alone: None) -> None:
        assert self.take(tmp_path) == {}
        save_file({"response_ids": torch.zeros(3)}, tmp_path / "pending.safetensors")
        assert self.take(tmp_path) == {}
        for name in ("pending.jsonl", "pending.json"):
            (tmp_path / name).write_text("{}")
        self.put(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["pending.safetensors"]

    def test_the_previous_step_goes_before_the_next_is_written(self, tmp_path: Path, alone: None) -> None:
        """A run that is killed in between finds neither."""
        pending, release = self.put(tmp_path), threading.Event()
        held = mock.patch("nemo_oprd.rollout.resume_cache._write", side_effect=lambda *_: release.wait(60))
        with held:
            pending.put(4, dict(enumerate(self.ROLLOUTS)), self.SAMPLING, 2)
            try:
                assert self.take(tmp_path) == {} and not [*tmp_path.iterdir()]
                pending.check()  # does not wait
            finally:
                release.set()
            pending.finish()

    def test_a_full_disk_is_told_at_the_next_call(self, tmp_path: Path, alone: None) -> None:
        pending = ResumeCache(tmp_path, {"student": "a"})
        (tmp_path / ".partial_pending.safetensors").symlink_to("/dev/full")
        pending.put(3, dict(enumerate(self.ROLLOUTS)), self.SAMPLING, 2)
        with pytest.raises(OSError, match="No space left") as raised:
            pending.finish()
        assert raised.value.filename == str(pending.path) and not [*tmp_path.iterdir()]
        pending.finish()  # told once

    def test_a_stop_waits_until_the_completed_ones_are_kept(self, tmp_path: Path, alone: None) -> None:
        write = resume_cache._write

        def slowly(*arguments: Any) -> None:
            time.sleep(0.5)
            write(*arguments)

        def cancelled(*_: Any, **__: Any) -> list[Rollout]:
            raise GenerationCancelled({1: self.ROLLOUTS[1]})

        settings = ["student.hf_path=a", "teacher.hf_path=b", "output=c", "train.prompts_per_step=2"]
        prompts = TrainingPrompts(list(self.REQUESTS), PromptOrder((2,)))
        engine = SimpleNamespace(submit=lambda *_: object(), collect=cancelled, weights=Weights(3))
        cache = ResumeCache(tmp_path, {})
        config = load_config("verify", settings)
        told: Any = config, None, engine, Schedule(config, prompts, 64), [], cache, 9, lambda: True
        sampler = RolloutSampler(*told)
        with mock.patch.object(resume_cache, "_write", slowly), pytest.raises(StoppedSampling) as stopped:
            sampler.rollouts(3)
        assert stopped.value.args == (3, 3, 1, 2) and (tmp_path / "pending.safetensors").exists()


@pytest.mark.parametrize(
    ("ends_with", "failed"), [(None, False), (Stopped("asked"), False), (RuntimeError("a fault"), True)]
)
def test_the_end_of_a_run_waits_for_what_is_written_aside(ends_with: Exception | None, failed: bool) -> None:
    """An error of the disk is raised, unless another error is on its way, and never keeps the other files waiting."""
    waited = []

    def finish(name: str, error: Exception | None = None) -> Any:
        def wait(*, failed: bool) -> None:
            waited.append((name, failed))
            if error is not None and not failed:
                raise error

        return SimpleNamespace(finish=wait)

    cache = finish("cache", OSError(errno.ENOSPC, "No space left"))
    run: Any = SimpleNamespace(sampler=SimpleNamespace(cache=cache), recorder=finish("files"))
    raised = pytest.raises(RuntimeError if failed else OSError, match="a fault" if failed else "No space")
    with raised, _background_writers(run):
        if ends_with is not None:
            raise ends_with
    assert waited == [("cache", failed), ("files", failed)]


@pytest.mark.parametrize("elements", [10, 100_000])
def test_a_disk_that_is_full_for_torch_is_named(elements: int) -> None:
    """torch.save to a path says that a stream failed, or stands where it should not; Megatron saves common.pt so."""
    with pytest.raises(OSError, match="No space left") as caught, naming("runs/a"):
        torch.save({"weight": torch.zeros(elements)}, "/dev/full")
    assert caught.value.filename == "runs/a"


# what is written aside while a run fails; sys.argv: the seconds that it takes, and the file to write
FAILS = """
import sys, time
from pathlib import Path
from nemo_oprd.batch.types import Rollout
from nemo_oprd.run.step_recorder import RolloutFile, RolloutFiles
from nemo_oprd.runtime import background
from nemo_oprd.runtime.exits import run_as_command

background.LEAVE_S, file, go_on = float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])

def text(ids):
    while not go_on.exists():
        time.sleep(0.02)
    return "text"

def work():
    files = RolloutFiles(text)
    files.write([RolloutFile(file, [Rollout([1], [2])])])
    files.finish(failed=True)
    raise ValueError("the student is on fire")

run_as_command(work)
"""


@pytest.mark.parametrize(("leave_s", "is_written"), [(60.0, True), (1.0, False)])
def test_an_error_is_told_before_files_are_waited_for(tmp_path: Path, leave_s: float, is_written: bool) -> None:
    """Which have some seconds after that; no process stays behind."""
    file, go_on = tmp_path / "step.jsonl", tmp_path / "go-on"
    command = [sys.executable, "-c", FAILS, str(leave_s), str(file), str(go_on)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as failing:
        assert failing.stderr is not None
        assert failing.stderr.readline() == "error: the student is on fire\n"
        told = time.monotonic()
        assert not file.exists()
        if is_written:
            go_on.touch()
        rest = failing.stderr.read()  # until the process that writes has ended, too
        assert failing.wait() == 2 and time.monotonic() - told < 20
    assert file.exists() == is_written
    assert ("files of rollouts: given up" in rest) == (not is_written)
    deadline = time.monotonic() + 20
    while guard.group_members(failing.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
