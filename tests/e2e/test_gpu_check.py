"""`scripts/gpu_check.sh` as a user runs it, and what it says when something is missing, wrong, fails or hangs."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import gpu_check
from benchmarks.gpu_parts import correctness, device, head, nccl, real_shape, registry, runner, update_step, waits
from benchmarks.gpu_parts.forking import ForkedError, run_all_forked
from benchmarks.gpu_parts.measure import Measured
from benchmarks.gpu_parts.outcome import Outcome, Settings
from benchmarks.gpu_parts.registry import PARTS, Part
from benchmarks.gpu_parts.table import table
from nemo_oprd.run.resolve import resolve
from nemo_oprd.tools.rehearse.places import PACKAGE

ROOT = Path(__file__).parent.parent.parent
PROGRAM = ROOT / "benchmarks" / "gpu_check.py"
FIELDS = ["name", "ok", "seconds", "numbers", "problems"]
# what makes Python not find the packages in HIDDEN, in this process and those that it starts
HIDES = """
import importlib.machinery, os
hidden, find = os.environ["HIDDEN"].split(","), importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *more: None if name in hidden else find(name, *more)
"""


def run_script(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in `project`, with this process's Python as the active one."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHON", None)
    command = ["bash", str(project / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=700)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy whose `.venv` stands for this process's environment, so that nothing is installed."""
    copy = tmp_path / "nemo_oprd"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache"))
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "activate").write_text("")
    (copy / ".venv" / "ready").write_text("")
    return copy


@pytest.mark.slow
def test_quick_check(project: Path, tmp_path: Path) -> None:
    """All parts ok, in the lines and in the JSON, with figures in them; nothing is left behind."""
    scratch, output = tmp_path / "scratch", tmp_path / "out"
    result = run_script(project, "--quick", "--minutes", "10", "--output", str(output), "--scratch", str(scratch))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((output / "gpu_check.json").read_text())
    assert report["run"]["ok"] and report["run"]["quick"] and not report["run"]["rehearsed"]
    parts = {part["name"]: part for part in report["parts"]}
    assert sorted(parts) == sorted(PARTS)
    assert not [problem for part in parts.values() for problem in part["problems"]]
    numbers = {name: part["numbers"] for name, part in parts.items()}
    rows = [line.split() for line in result.stdout.splitlines()]
    skipped = {name for name, found in numbers.items() if "skipped" in found}
    assert skipped == {"te"}
    for name, part in parts.items():
        said = ["skipped:"] if name in skipped else ["ok"]
        assert [name, f"{part['seconds']:.1f}", "s", *said] in [row[:4] for row in rows]
    assert len(numbers["golden_fp32"]) == 14
    assert {"opd_full_vocab", "mse_all_last_k"} < set(numbers["golden_fp32"]) & set(numbers["golden_bf16"])
    assert set(nccl.LAYOUTS) < set(numbers["nccl"])
    for precision in ("fp32", "bf16"):
        assert numbers["save_resume"]["saved"][precision]["checkpoint_bytes"] > 0
        assert set(numbers["save_resume"][precision]["deviations"].values()) == {0.0}
        assert numbers["training"][precision]["ratio"] <= correctness.FALLS_TO
    for name in ("oprd", "oprd_no_recompute", "sampled_token", "full_vocab", "top_16"):
        assert numbers[name]["step_seconds"] > 0
        assert set(numbers[name]["phases"]) == {"teacher", "update", "optimizer"}
        # memory is not measured without a GPU
        assert {row["peak_gb"] for row in numbers[name]["rows"]} == {None}
    assert numbers["oprd_no_recompute"]["recompute"] == "none"
    assert numbers["decode"]["64 x 256"]["tokens_per_s"] > 0
    assert [row["what"] for row in numbers["toy"]["rows"]] == ["train, fp32", "train, bf16"]
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_rehearsal(tmp_path: Path) -> None:
    """A step at full width on the fake device: a peak within what `plan` says, no unknown wait, no seconds."""
    command = [sys.executable, PROGRAM, "--rehearse", "--parts", "oprd", "--layers", "2", "--output", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=700)
    assert result.returncode == 0, result.stdout + result.stderr
    (part,) = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert part["numbers"]["layers"] == 2 and part["numbers"]["waits"]
    assert [row["what"] for row in part["numbers"]["rows"]] == list(update_step.PHASES)
    for row in part["numbers"]["rows"]:
        assert row["seconds"] is None
        assert row["peak_gb"] > 1 and abs(row["peak_gb"] / row["planned_peak_gb"] - 1) <= update_step.TOLERANCE


def test_some_parts(tmp_path: Path) -> None:
    """The JSON, the lines and the log of two parts, and one that is skipped because its package is not there."""
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "HIDDEN": "psutil", "OMP_NUM_THREADS": "1"}
    output, file, scratch = tmp_path / "out", tmp_path / "numbers.json", tmp_path / "scratch"
    command = [sys.executable, PROGRAM, "--quick", "--parts", "head,save_resume,guard", "--json", file]
    command += ["--output", output, "--scratch", scratch]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(file.read_text())
    assert set(report) == {"machine", "run", "parts"}
    assert report["machine"]["torch"] == version("torch") and report["machine"]["cpus"] == os.cpu_count()
    assert [part["name"] for part in report["parts"]] == ["save_resume", "guard", "head"]  # no order of the argument
    for part in report["parts"]:
        assert list(part) == FIELDS
        assert part["ok"] and part["problems"] == []
    skipped, guard, losses = report["parts"]
    assert skipped["numbers"] == {"skipped": "needs the package psutil"} and skipped["seconds"] == 0
    assert "layer 2 " in guard["numbers"]["message"] and guard["seconds"] > 0
    agreement = losses["numbers"]["agreement"][head.WHOLE]
    assert 0 < agreement["hidden"] <= head.LIMIT and 0 < agreement["head"] <= head.LIMIT
    assert f"{'save_resume':<20}    0.0 s  skipped: needs the package psutil\n" in result.stdout
    assert f"{'guard':<20}{guard['seconds']:7.1f} s  ok\n" in result.stdout
    assert "3 of 3 parts ok; " in result.stdout
    log = (output / "gpu_check.log").read_text()
    assert "==== guard\n" in log and "==== head\n" in log
    assert list(scratch.iterdir()) == []


def test_missing_packages_are_one_line() -> None:
    """A Python without site-packages stands for a machine without our dependencies."""
    command = [sys.executable, "-I", "-S", PROGRAM, "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("not installed: torch==")
    assert " -m pip install torch==" in line and f" megatron-core=={version('megatron-core')} " in line


def test_an_engine_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    """Megatron-core imports Transformer Engine where it is installed, so that nothing could be measured."""
    engine = tmp_path / "transformer_engine"
    engine.mkdir()
    (engine / "__init__.py").write_text("")
    (engine / "pytorch.py").write_text("import no_such_package\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, PROGRAM, "--quick", "--parts", "te", "--output", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 2
    line = result.stderr.splitlines()[-1]
    assert "does not load (ModuleNotFoundError: No module named 'no_such_package'); expected one built for" in line
    assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "guard,golden"], "'golden': expected some of device,golden_fp32,"),
        (["--parts", ""], "'': expected some of device,"),
        (["--minutes", "0"], "--minutes 0: expected more than 0 and at most 15; choose such a number"),
        (["--minutes", "-1"], "--minutes -1: expected more than 0"),
        (["--minutes", "nan"], "--minutes nan: expected more than 0"),
        (["--minutes", "15.5"], "--minutes 15.5: expected more than 0 and at most 15"),
        (["--minutes", "five"], "--minutes: invalid float value: 'five'"),
        (["--layers", "0"], "--layers 0: expected at least 1; choose a larger number"),
        (["--beside", "no/such.json"], "--beside no/such.json: expected the JSON file of an earlier check"),
        (["--quick", "--rehearse"], "--rehearse: not allowed with argument --quick"),
    ],
)
def test_arguments_that_are_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu_check.sh: ") and said in line


def test_the_wheels_to_bring_are_all_that_is_needed() -> None:
    """gpu_wheels.sh fetches every package that does not come with torch and transformers, and those of single parts."""
    script = (ROOT / "scripts" / "gpu_wheels.sh").read_text()
    brought = {
        name: re.search(rf"^{name}=\(([^)]*)\)", script, flags=re.MULTILINE)[1].split()  # type: ignore[index]
        for name in ("needed", "built", "of_parts")
    }
    with_torch = {"torch", "numpy", "transformers", "safetensors", "packaging", "tqdm"}
    assert {*brought["needed"], *brought["built"]} == set(gpu_check.REQUIRED.values()) - with_torch
    assert set(brought["of_parts"]) == {name for part in PARTS.values() for name in part.packages}
    pinned = {line.partition("==")[0] for line in (ROOT / "requirements-cpu.txt").read_text().splitlines()}
    assert {name for names in brought.values() for name in names} <= pinned


def test_a_folder_of_wheels_is_named_on_one_line() -> None:
    for arguments in ([], ["--limit-mib", "much", "folder"], ["--all", "folder"], ["--architecture", "sm_90"]):
        command = ["bash", str(ROOT / "scripts" / "gpu_wheels.sh"), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert "expected bash scripts/gpu_wheels.sh DIR" in line


@dataclass(frozen=True)
class Planted(Part):
    """A part that runs a function of this test."""

    run: Callable[[Settings, Outcome], None] = lambda settings, outcome: None

    def load(self) -> Callable[..., None]:
        return self.run


def plant(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    """Makes these the only parts, in an order, without the imports of the others."""
    named = {part.name: part for part in parts}
    monkeypatch.setattr(registry, "PARTS", named)
    monkeypatch.setattr(runner, "PARTS", named)
    monkeypatch.setattr(runner, "PRELOADED", ())


def options(folder: Path, minutes: float = 1.0, parts: tuple[str, ...] | None = None) -> runner.Options:
    (folder / "scratch").mkdir()
    return runner.Options(folder, folder / "gpu_check.json", folder / "scratch", minutes, parts)


def test_a_part_that_hangs_dies_or_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it had measured stays, the reason is a problem, and no process of it goes on."""
    child = tmp_path / "child"

    def hang(settings: Settings, outcome: Outcome) -> None:
        child.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        outcome.row("measured", seconds=1.5)
        time.sleep(600)

    def die(settings: Settings, outcome: Outcome) -> None:
        outcome.row("before it died", seconds=0.5)
        os.write(2, b"out of luck\n")
        os._exit(11)

    def fail(settings: Settings, outcome: Outcome) -> None:
        outcome.require(2 > 3, "2 is too small")
        raise ValueError("no such tensor\nsecond line")

    def skip(settings: Settings, outcome: Outcome) -> None:
        outcome.skipped = "one GPU"

    def count(settings: Settings, outcome: Outcome) -> None:
        outcome.numbers["count"] = 3

    plant(
        monkeypatch,
        Planted("hangs", "", limit=1.0, stage="together", run=hang),
        Planted("counts_beside", "", stage="together", run=count),
        Planted("dies", "", run=die),
        Planted("fails", "", run=fail),
        Planted("skips", "", run=skip),
        Planted("counts", "", run=count),
    )
    began = time.monotonic()
    assert not runner.check(options(tmp_path), began)
    assert time.monotonic() - began < 30
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert {name for name, part in parts.items() if part["ok"]} == {"counts_beside", "skips", "counts"}
    assert parts["hangs"]["problems"] == ["killed after 1 s"] and 1 <= parts["hangs"]["seconds"] < 5
    assert parts["hangs"]["numbers"]["rows"][0]["seconds"] == 1.5
    assert parts["dies"]["problems"] == ["died: out of luck"]
    assert parts["dies"]["numbers"]["rows"][0]["what"] == "before it died"
    first, second = parts["fails"]["problems"]
    assert first == "2 is too small"
    assert second.startswith("ValueError: no such tensor (at test_gpu_check.py:")
    assert parts["skips"]["numbers"] == {"skipped": "one GPU"}
    assert parts["counts"]["numbers"] == parts["counts_beside"]["numbers"] == {"count": 3}
    state = Path("/proc") / child.read_text() / "stat"
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    shown = capfd.readouterr().out
    assert re.search(r"^hangs +1\.\d s  failed: killed after 1 s$", shown, flags=re.MULTILINE)
    assert "NOT OK: dies: died: out of luck\n" in shown and "\nskips: skipped: one GPU\n" in shown
    assert "3 of 6 parts ok; " in shown
    assert list((tmp_path / "scratch").iterdir()) == []


def test_no_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A part that every check needs has failed, another is skipped, unless it was asked for by name."""
    plant(monkeypatch, Planted("first", "", needed=True), Planted("second", ""))
    minutes = (runner.REPORT_SECONDS + 10) / 60
    assert not runner.check(options(tmp_path, minutes), time.monotonic())
    first, second = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert not first["ok"] and re.fullmatch(
        r"not run: \d+ s left, it begins with 25: give --minutes", *first["problems"]
    )
    assert second["ok"] and second["numbers"]["skipped"].startswith("no time: ")
    named = tmp_path / "named"
    named.mkdir()
    assert not runner.check(options(named, minutes, ("second",)), time.monotonic())
    assert "2 parts ok" in capfd.readouterr().out


def test_a_forked_function_that_fails_or_is_late() -> None:
    def refuse() -> int:
        raise ValueError("no\nmore")

    assert run_all_forked([lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(ForkedError, match="^ValueError: no$"):
        run_all_forked([lambda: 1, refuse])
    with pytest.raises(ForkedError, match="^not done after 0 s$"):
        run_all_forked([lambda: time.sleep(600)], limit=0.3)
    with pytest.raises(ForkedError, match="^process 0 ended with 7$"):
        run_all_forked([lambda: os._exit(7)])


@pytest.mark.parametrize(
    ("plant_fault", "problems"),
    [
        (lambda gradient: None, []),
        (lambda gradient: gradient.mul_(1.001), ["case: a gradient deviates by 1.0e-03"]),
        (lambda gradient: gradient.neg_(), ["case: a gradient deviates by 2.0e+00"]),
        (lambda gradient: gradient.view(-1)[0].fill_(math.nan), ["case: a gradient deviates by nan"]),
    ],
)
def test_a_wrong_gradient_is_named(
    plant_fault: Callable[[torch.Tensor], object], problems: list[str], tmp_path: Path
) -> None:
    """A golden case's own numbers, with one gradient changed."""
    name = "mse_all_last_k"
    gradients = load_file(correctness.GOLDEN / f"grads_{name}.safetensors")
    plant_fault(max(gradients.values(), key=lambda gradient: float(gradient.norm())))
    save_file(gradients, tmp_path / "grads.safetensors")
    (tmp_path / "losses.json").write_text(json.dumps(correctness.all_golden_cases()[name]))
    outcome = Outcome()
    correctness.compare_with_golden(outcome, name, tmp_path, "case")
    assert outcome.problems == problems


def test_a_wrong_loss_is_named(tmp_path: Path) -> None:
    """One layer's, which the total would hide."""
    name = "mse_all_last_k"
    case = correctness.all_golden_cases()[name]
    case["rep/loss_per_layer"] = {**case["rep/loss_per_layer"]}
    layer, value = next(iter(case["rep/loss_per_layer"].items()))
    case["rep/loss_per_layer"][layer] = 1.01 * value
    (tmp_path / "losses.json").write_text(json.dumps(case))
    shutil.copy(correctness.GOLDEN / f"grads_{name}.safetensors", tmp_path / "grads.safetensors")
    outcome = Outcome()
    correctness.compare_with_golden(outcome, name, tmp_path, "case")
    assert outcome.problems == ["case: the loss deviates by 1.0e-02"]


def test_a_gradient_unlike_that_of_whole_logits_is_named() -> None:
    problem = head.Problem.make(32, 16, 64)
    kept = {
        name: tuple(tensor.detach().float() for tensor in run())
        for name, run in {
            head.OURS: head.chunks(problem, "full_vocab", 8),
            head.WHOLE: head.whole_logits(problem, sampled=False),
        }.items()
    }
    outcome = Outcome()
    head.compare(outcome, kept)  # type: ignore[arg-type]
    assert outcome.problems == []
    loss, hidden, own_head = kept[head.OURS]
    head.compare(outcome, {**kept, head.OURS: (loss, hidden, 1.1 * own_head)})
    (said,) = outcome.problems
    assert re.fullmatch(r"the gradient of head deviates by 1\.\de-01 from whole logits \(limit 0\.02\)", said)


def test_a_peak_unlike_the_plan_is_named(tmp_path: Path) -> None:
    """At full width, with planted peaks: one within 5 % of what `plan` says, one above, one below."""
    real_shape.prepare(tmp_path, real_shape.REAL)
    config = real_shape.configure(tmp_path, real_shape.REAL)
    estimate = real_shape.planned(config, real_shape.REAL)
    shares = {"teacher": 1.04, "update": 1.06, "optimizer": 0.94}
    found = {}
    for phase, share in shares.items():
        said = update_step.planned_bytes(estimate.kinds[0], phase, resolve(config, 1))
        assert said is not None and said > 20e9
        found[phase] = Measured(1.0, int(share * said), 0)
    outcome = Outcome()
    update_step.report_phases(Settings(tmp_path), outcome, config, estimate, found)
    assert [problem.partition(" GB is ")[2].partition(" of")[0] for problem in outcome.problems] == ["+6.0%", "-6.0%"]
    assert [problem.partition(":")[0] for problem in outcome.problems] == ["update", "optimizer"]
    for row, (phase, share) in zip(outcome.numbers["rows"], shares.items(), strict=True):
        assert row["what"] == phase and row["peak_gb"] / row["planned_peak_gb"] == pytest.approx(share)


def waiting(file: str, function: str) -> Callable[[], None]:
    """A function of a file of this package, which does what torch does on a GPU where the host waits."""
    source = f"def {function}():\n    warnings.warn('called a synchronizing CUDA operation')\n"
    names: dict[str, Any] = {"warnings": warnings}
    exec(compile(source, str(PACKAGE / file), "exec"), names)
    return names[function]  # type: ignore[no-any-return]


def test_an_unknown_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that torch warns of is a problem with its line; one that is known is a number only."""
    modes: list[str] = []
    monkeypatch.setattr(waits, "is_cuda", lambda: True)
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    known = waiting("distillation/metrics/step_metrics.py", "reduced")
    unknown = waiting("losses/planted.py", "per_token")

    def step() -> None:
        known()
        unknown()
        unknown()
        warnings.warn("something else", stacklevel=1)

    outcome = Outcome()
    waits.check_waits(outcome, step)
    assert modes == ["warn", "default"]
    assert outcome.problems == [
        "nemo_oprd/losses/planted.py:2: the host waits 2 times per step: as torch says",
    ]
    expected = {"nemo_oprd/losses/planted.py:2": 2, "nemo_oprd/distillation/metrics/step_metrics.py:2": 1}
    assert outcome.numbers["waits"] == expected


@pytest.mark.parametrize(("tokens", "problems"), [(16384, 1), (64, 0)])
def test_a_math_kernel_for_a_long_sequence_is_named(
    tokens: int, problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    monkeypatch.setattr(device, "project_call", lambda call: (lambda: None, "math"))
    monkeypatch.setattr(device, "_milliseconds", lambda run, backend: None)
    outcome = Outcome()
    device.attention_kernel(outcome, device.Call("planted", 1, tokens, tokens, torch.float32))
    assert len(outcome.problems) == problems
    assert all(problem.startswith("planted: attention takes the math kernel") for problem in outcome.problems)


@pytest.mark.parametrize("gpus", [1, 2])
def test_nccl_that_refuses_is_a_problem_on_two_gpus_only(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ForkedError("duplicate GPU detected")

    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(nccl, "run_all_forked", refuse)
    outcome = Outcome()
    nccl.nccl(Settings(tmp_path), outcome)
    if gpus == 1:
        assert outcome.problems == []
        assert outcome.skipped == "NCCL refused two ranks on one GPU: duplicate GPU detected"
    else:
        assert outcome.skipped is None
        assert outcome.problems == [f"{name}: duplicate GPU detected" for name in nccl.LAYOUTS]


def test_what_fits_by_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model and the paper's lengths where the memory of a large GPU is free, less on a small one."""
    monkeypatch.setattr(real_shape, "is_cuda", lambda: True)

    def that_fits(gigabytes: float, layers: int | None = None) -> tuple[int, int]:
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (int(1e9 * gigabytes), int(1e9 * gigabytes)))
        batch = real_shape.that_fits(tmp_path, real_shape.REAL, ["student.recompute=full"], layers)
        return batch.shape.num_hidden_layers, batch.response

    assert that_fits(139) == that_fits(79) == (28, 16384)
    assert that_fits(79, layers=3) == (3, 16384)
    layers, response = that_fits(23)
    assert 1 < layers < 28 and response in (4096, 8192, 16384)
    assert that_fits(4) == (1, 4096)


def test_columns_of_another_check() -> None:
    """The numbers of a rehearsal stand in the row of the same part and measurement; ratios need one shape."""

    def report(rehearsed: bool, seconds: float | None, peak: float) -> dict[str, Any]:
        row = {"what": "update", "seconds": seconds, "peak_gb": peak, "delta_gb": 4.0, "note": ""}
        numbers = {"rows": [row | {"planned_peak_gb": 35.0, "planned_delta_gb": 4.5}], "layers": 28, "response": 16384}
        parts = [
            {"name": name, "ok": True, "problems": [], "numbers": {**numbers, "step_seconds": step}}
            for name, step in (("oprd", seconds), ("backbone", 1.0))
        ]
        run = {"rehearsed": rehearsed, "seconds": 9.0, "overhead_seconds": 3.0}
        return {"machine": {"gpu": "planted"}, "run": run, "parts": parts}

    lines = table(report(False, 2.5, 35.5), report(True, None, 36.25)).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("oprd ")]
    assert row == ["oprd", "update", "2.500", "35.50", "35.00", "4.00", "4.50", "-", "36.25", "4.00"]
    assert "last columns: rehearsed" in lines and "step ratios: oprd / backbone 2.50" in lines
