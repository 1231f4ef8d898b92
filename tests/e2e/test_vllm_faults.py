"""Faults between the trainer and a real vLLM, planted: each ends the run with one line, before an update is made.

All but one use servers that `nemo-oprd serve` has started, as `rollout.vllm.endpoints`: starting one takes half a
minute. A fault that leaves the server unusable comes last.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import vllm_environment
from default_signals import default_signals
from safetensors.torch import load_file, save_file

from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.tools.toy import pair as task
from nemo_oprd.tools.toy.pair import Recipe, build_pair
from tests.support.wide_vocabulary import add_tokens, make_likely, widen

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 300
# of the pair's models: a response of as many tokens takes longer than a busy machine keeps a process waiting
POSITIONS = 1280
# ids 25 and 26 are a gap between the student's tokens, those from 28 on are padding
ROWS, TEACHER_ROWS, KNOWN, PLANTED = 32, 40, TokenIds(28, ((25, 27),)), (25, 30)
API_KEY = "an-api-key-of-vLLM-in-the-environment"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_environment.missing() is not None, reason=str(vllm_environment.missing())),
]


def make_pair(directory: Path, layers: int) -> Path:
    """A pair that vLLM can run, hardly trained, that finds ids likely for which the teacher alone has tokens."""
    recipe = Recipe(
        0, 10, student_step=5, layers=layers, hidden=128, batch=16, warmup_steps=5,
        train_prompts=64, tune_prompts=16, heldout_prompts=16,
    )  # fmt: skip
    build_pair(recipe, directory, lambda _: None)
    for role in ("student", "teacher"):
        file = directory / role / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    texts = [task.encode(task.prompt_text(n, m) + task.response_text(n, m)) for n, m in ((1234, 5678), (4016, 3409))]
    for role, rows, more in (("student", ROWS, {}), ("teacher", TEACHER_ROWS, {"ü": 25, "ö": 30})):
        widen(directory / role, rows)
        add_tokens(directory / role, {"é": 27, **more})
        assert make_likely(directory / role, PLANTED, texts) > 0.5
    return directory


def tie(model: Path) -> None:
    """Takes the embedding for the head, in the files of a model."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@dataclass
class Site:
    directory: Path
    endpoint: str = ""
    other_ids: str = ""  # listens on a Unix socket

    @property
    def pair(self) -> Path:
        return self.directory / "pair"

    def at(self, url: str) -> list[str]:
        """Overrides of a run on a server."""
        return [f"rollout.vllm.endpoints=[{url}]", f"rollout.vllm.token_file={self.directory / 'token'}"]

    def overrides(self, pair: Path, *more: str) -> list[str]:
        """A run of two steps on four prompts of 40 tokens, so that the second step finds them in a prefix cache."""
        return [
            "--config-name", "quickstart", "student.checkpoint=null", f"student.hf_path={pair / 'student'}",
            "teacher.checkpoint=null", f"teacher.hf_path={pair / 'teacher'}", "data.validation={}",
            f"data.train={self.directory / 'prompts.jsonl'}", "evaluation.every=0", "evaluation.teacher=false",
            "train.steps=2", "train.lr=1e-2",
            "train.warmup_fraction=0", "train.schedule=constant", "train.prompts_per_step=4", "logging.every=1",
            "student.parallel.tensor=1", "logging.tensorboard=false", "train.export_hf=false", "rollout.engine=vllm",
            "rollout.vllm.flags=[--block-size,32]", *more,
        ]  # fmt: skip

    def run(self, fault: str, *more: str, pair: Path | None = None, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
        """(Exit code, what the command said on stderr)."""
        output = self.directory / f"run_{fault}_{time.time_ns()}"
        command = [sys.executable, str(ROOT / "tests/e2e/vllm_faults.py"), fault, *arguments, "train"]
        command += self.overrides(pair or self.pair, f"output={output}", *more)
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        return done.returncode, done.stderr

    def command(self, name: str, *more: str) -> None:
        """Runs another command than `train` without a fault."""
        command = [sys.executable, "-m", "nemo_oprd", name, *self.overrides(self.pair, *more)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def at_endpoint(self, fault: str, url: str = "", pair: Path | None = None, more: tuple[str, ...] = ()) -> str:
        """The one line with which a run on an endpoint ends."""
        code, said = self.run(fault, *self.at(url or self.endpoint), *more, pair=pair)
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(lines) == 1, said[-3000:]
        return lines[0]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def start_server(site: Site, name: str, *more: str) -> tuple[subprocess.Popen, str]:
    """`nemo-oprd serve` in a session of its own; (process, address)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    at, listen = site.directory / f"{name}.socket", ["--port", str(port)]
    if name == "other_ids":
        listen = ["--uds", str(at)]
    log = (site.directory / f"{name}.log").open("w")
    command = [sys.executable, "-m", "nemo_oprd", "serve", *listen, "--token-file", str(site.directory / "token")]
    command += site.overrides(site.pair, *more)
    given = environment() | {"VLLM_API_KEY": API_KEY}
    process = subprocess.Popen(
        command, env=given, stdout=log, stderr=log, start_new_session=True, preexec_fn=default_signals
    )
    return process, f"unix://{at}" if name == "other_ids" else f"http://127.0.0.1:{port}"


def wait_until_healthy(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        if status(url, "/health") == 200:
            return
        time.sleep(0.5)


def status(url: str, path: str, method: str = "GET", **headers: str) -> int:
    """Of a call to a server; 0 while nobody answers."""
    at = urlsplit(url)
    caller = http.client.HTTPConnection(at.hostname or "localhost", at.port, timeout=10)
    try:
        if at.scheme == "unix":
            caller.sock = socket.socket(socket.AF_UNIX)
            caller.sock.connect(at.path)
        caller.request(method, path, body=None if method == "GET" else b"{}", headers=headers)
        return caller.getresponse().status
    except OSError:
        return 0
    finally:
        caller.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("faults"))
    make_pair(site.pair, layers=2)
    other = site.directory / "teacher_of_other_ids"
    shutil.copytree(site.pair / "teacher", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": KNOWN.limit - 1}))
    prompts = [{"problem": f"{n}+{n}=" * 8, "answer": "1"} for n in (1234, 5678, 9012, 3456)]
    (site.directory / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    processes = []
    try:
        for name, more in (("endpoint", ()), ("other_ids", (f"teacher.hf_path={other}",))):
            process, url = start_server(site, name, *more)
            processes.append((process, url, site.directory / f"{name}.log"))
            setattr(site, name, url)
        for process, url, log in processes:
            wait_until_healthy(process, url, log)
        yield site
    finally:
        for process, _, _ in processes:
            process.terminate()  # it has no guard: killed, it would leave its shared memory
        for process, _, _ in processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize("name", ["endpoint", "other_ids"])
def test_nobody_calls_a_server_without_its_token(name: str, site: Site) -> None:
    """Also not with vLLM's own key, which the server was started with; only whether it is well is for everybody."""
    url, token = getattr(site, name), (site.directory / "token").read_text().strip()
    calls = (
        "/update_weights",
        "/collective_rpc",
        "/pause",
        "/sleep",
        "/inference/v1/generate",
        "/update_weight_version",
    )
    for given in ({}, {"Authorization": f"Bearer {API_KEY}"}, {"Authorization": f"Bearer {token[::-1]}"}):
        assert {status(url, path, "POST", **given) for path in calls} == {401}
        assert {status(url, path, **given) for path in ("/metrics", "/v1/models", "/openapi.json")} == {401}
    assert status(url, "/v1/models", Authorization=f"Bearer {token}") == 200
    said = (site.directory / f"{name}.log").read_text()
    assert token not in said and API_KEY not in said


def test_a_run_without_a_fault_uses_the_endpoint_and_leaves_it(site: Site) -> None:
    """Twice: the second run finds the server as the first one left it.

    Most of the probability is on rows without a token, which the teacher has tokens for. They are not sampled, and
    trainer and server agree on the probabilities of the others.
    """
    for number in range(2):
        output = site.directory / f"whole_{number}"
        code, said = site.run("none", *site.at(site.endpoint), "rollout.save=true", f"output={output}")
        assert code == 0, said[-3000:]
        for line in (output / "metrics.jsonl").read_text().splitlines():
            assert json.loads(line)["rollout/logprob_gap_max"] < 1e-4
        rollouts = [r for file in (output / "rollouts").glob("step_*.jsonl") for r in read_rollouts(file, ROWS)]
        assert len(rollouts) == 8
        assert not [i for rollout in rollouts for i in KNOWN.outside(rollout.response_ids.tolist())]


def test_evaluate_and_fit_bridge_sample_with_the_same_engine(site: Site) -> None:
    """The student is evaluated alone, then beside the teacher for a bridge; both have the endpoint's responses."""
    endpoint = site.at(site.endpoint)
    validation = f"data.validation={{heldout: {site.pair / 'prompts' / 'heldout.jsonl'}}}"
    evaluated, fitted = site.directory / "evaluated", site.directory / "fitted"
    site.command("evaluate", f"output={evaluated}", *endpoint, validation, "evaluation.limit=8")
    metrics = json.loads((evaluated / "evaluation.json").read_text())
    in_process = site.directory / "evaluated_in_process"
    site.command("evaluate", f"output={in_process}", "rollout.engine=megatron", validation, "evaluation.temperature=0")
    kept = [json.loads(line) for line in (evaluated / "generations" / "heldout.jsonl").open()]
    assert len(kept) > 8 and all(len(line["logprobs"]) == len(line["response_ids"]) for line in kept)
    greedily = site.directory / "evaluated_greedily"
    site.command("evaluate", f"output={greedily}", *endpoint, validation, "evaluation.temperature=0")
    greedy = [json.loads((output / "evaluation.json").read_text()) for output in (greedily, in_process)]
    assert metrics["val/heldout/avg_len"] > 0 and greedy[0] == greedy[1]
    site.command("fit-bridge", f"output={fitted}", *endpoint, "bridge.prompts=16", "bridge.rank=2")
    rollouts = [json.loads(line) for file in (fitted / "rollouts").glob("*.jsonl") for line in file.open()]
    assert len(rollouts) == 16 and all(len(r["logprobs"]) == len(r["response_ids"]) for r in rollouts)


@pytest.mark.parametrize("fault", ["another_temperature", "stale_prefix_cache"])
def test_an_engine_that_samples_from_something_else_is_found_by_its_log_probabilities(fault: str, site: Site) -> None:
    line = site.at_endpoint(fault)
    assert "the engine does not sample from the student: rollout/logprob_gap_mean is" in line
    assert "expected at most 0.001 (response" in line


def test_responses_that_go_on_after_an_update(site: Site) -> None:
    """The check compares what continues them with the new student, and finds keys of the old one."""
    more = ("rollout.mode=segments", "rollout.segment_tokens=8", "rollout.max_new_tokens=16", "rollout.max_lag=1")
    line = site.at_endpoint("stale_prefix_cache", more=more)
    assert "the engine does not sample from the student: rollout/logprob_gap_mean is" in line
    code, said = site.run("none", *site.at(site.endpoint), *more, "rollout.save=true")
    assert code == 0, said[-3000:]
    run = max(site.directory.glob("run_none_*"))
    saved, measured = (run / "rollouts" / "step_0000002.jsonl").read_text(), (run / "metrics.jsonl").read_text()
    rollouts = [json.loads(line) for line in saved.splitlines()]
    assert max(len(rollout["weight_versions"]) for rollout in rollouts) == 2
    assert all(len(rollout["logprobs"]) == len(rollout["response_ids"]) for rollout in rollouts)
    assert "rollout/logprob_gap_max" in json.loads(measured.splitlines()[1])


def test_responses_that_a_cut_interrupts(site: Site) -> None:
    """The check compares every part with its student; a server that keeps the keys of the old one is found."""
    more = ("rollout.mode=stream", "rollout.max_lag=4", f"rollout.max_new_tokens={POSITIONS}", "rollout.max_batch=3")
    more += ("train.steps=6", "rollout.save=true")
    line = site.at_endpoint("stale_prefix_cache", more=more)
    assert "the engine does not sample from the student: rollout/logprob_gap_mean is" in line
    code, said = site.run("early_cuts", *site.at(site.endpoint), *more)
    assert code == 0, said[-3000:]
    run = max(site.directory.glob("run_early_cuts_*"))
    rollouts = [
        [json.loads(line) for line in (run / "rollouts" / f"step_{step:07d}.jsonl").read_text().splitlines()]
        for step in range(1, 7)
    ]
    prompts = [rollout["prompt_ids"] for step in rollouts for rollout in step]
    assert len(prompts) == 24 and all(prompts.count(prompt) == 6 for prompt in prompts)
    assert max(len(rollout["weight_versions"]) for step in rollouts for rollout in step) > 1
    for number, step in enumerate(rollouts):
        for rollout in step:
            assert len(rollout["logprobs"]) == len(rollout["response_ids"])
            assert all(number - 4 <= span["version"] <= number for span in rollout["weight_versions"])
            assert rollout["finish_reason"] in ("stop", "length")


def test_a_stale_tied_head_is_found_by_its_log_probabilities(site: Site) -> None:
    """In a server of the run's own, whose worker leaves the packed head as it was."""
    before, tied = vllm_environment.shared_memory(), site.directory / "tied"
    shutil.copytree(site.pair, tied)
    for role in ("student", "teacher"):
        tie(tied / role)
    code, said = site.run("stale_head", pair=tied, arguments=(str(site.directory / "worker"),))
    assert code == 2 and "the engine does not sample from the student" in said, said[-3000:]
    assert vllm_environment.shared_memory() <= before


def test_a_server_of_another_model_is_refused(site: Site) -> None:
    deeper = make_pair(site.directory / "deeper", layers=3)
    line = site.at_endpoint("none", pair=deeper)
    assert "serves another model or in another way: num_hidden_layers=2 instead of 3; expected a server" in line


def test_a_server_for_a_tokenizer_of_another_size_is_refused(site: Site) -> None:
    line = site.at_endpoint("none", url=site.other_ids)
    assert "known_ids=" in line and "num_hidden_layers" not in line


def test_a_file_that_is_not_of_the_run_is_refused_by_the_server(site: Site) -> None:
    """It lives on, as the next test shows."""
    assert "refuses /update_weights with status 500" in site.at_endpoint("file_elsewhere")
    said = (site.directory / "endpoint.log").read_text()
    assert "/etc/passwd is elsewhere; expected a file of weights in the run's own folder" in said


def test_a_server_that_somebody_else_updates_is_found_by_the_version(site: Site) -> None:
    line = site.at_endpoint("somebody_else_updates")
    assert "from the weights theirs (tokens 0 to" in line and "does somebody else use or update this server?" in line


@pytest.mark.parametrize("fault", ["missing_tensor", "exchanged_tensors"])
def test_weights_that_arrive_otherwise_than_sent_are_found_by_the_digest(fault: str, site: Site) -> None:
    """Each leaves the endpoint in the middle of an update, so that the next run has to be refused, too."""
    code, said = site.run(fault, arguments=())
    assert code == 2 and "the weights did not arrive as sent" in said, said[-3000:]


def test_a_tensor_of_another_shape_is_refused_by_the_server(site: Site) -> None:
    line = site.at_endpoint("wrong_shape")
    assert "refuses /update_weights with status 500" in line
