"""The hooks in a worker of a teacher's server, on a model of three layers: what goes wrong is the answer of its job."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.maps import Bridge, LayerBridge, ModelIdentity
from nemo_oprd.vllm.teacher_bridge import ServedBridge
from nemo_oprd.vllm.worker.nemo_oprd_bridge import BridgeFile
from nemo_oprd.vllm.worker.nemo_oprd_files import FOLDER
from nemo_oprd.vllm.worker.nemo_oprd_requests import GENERATION, STATE_REQUEST, AnswerFolder, StateRequest

WORKER = Path(__file__).parents[3] / "nemo_oprd" / "vllm" / "worker"
WIDTH, IDS, VOCABULARY = 8, [3, 1, 4, 1], 6
RANK = 3
STATES = StateRequest("0" * 32, [1, 2, 3], [0, 3], [])
LOGITS = StateRequest("1" * 32, [], [], [0, 1, 2], [1, 2, 3], vocabulary=VOCABULARY, chunk=1)


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(torch.nn.Module):
    """`spoil` changes the final states of these rows of the flat batch; `logits` is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.spoil: list[int] = []
        self.calls = 0
        self.input: torch.Tensor | None = None  # of the next pass; None: random
        self.logits: Callable[[torch.Tensor], torch.Tensor] = lambda states: states[:, :VOCABULARY]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model(x)
        x[self.spoil] *= 1.5
        return x

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.logits(states)


class Runner:
    """vLLM's model runner, as far as the hooks look at it."""

    def __init__(self, model: Model) -> None:
        self.model, self.requests, self.input_batch = model, dict[str, Any](), SimpleNamespace()

    def get_model(self) -> Model:
        return self.model

    @torch.no_grad()
    def execute_model(self, scheduled: Any) -> None:
        given = self.model.input
        self.model(torch.randn(sum(scheduled.num_scheduled_tokens.values()), WIDTH) if given is None else given)


class Server:
    """One tensor rank of a server, with the capture in place."""

    def __init__(self, capture: Any, tensor: int) -> None:
        self.model, self.count = Model(), 0
        self.runner = Runner(self.model)
        sizes = {"get_hidden_size": lambda: WIDTH, "get_vocab_size": lambda: VOCABULARY, "dtype": torch.float32}
        model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2), **sizes)
        config = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=tensor))
        self.worker = SimpleNamespace(vllm_config=config, model_runner=self.runner, rank=0, device=torch.device("cpu"))
        self.capture = self.worker._nemo_oprd_capture = capture(self.worker)

    def step(self, *parts: tuple[str, int, int]) -> None:
        """A forward pass of (request, tokens that are done, tokens of this pass)."""
        keys, done, counts = zip(*parts, strict=True)
        self.runner.input_batch = SimpleNamespace(num_reqs=len(keys), req_ids=keys, num_computed_tokens_cpu=done)
        self.runner.execute_model(SimpleNamespace(num_scheduled_tokens=dict(zip(keys, counts, strict=True))))

    def request(self, text: str | None) -> str:
        """The name of a new request."""
        self.count += 1
        extra = SimpleNamespace(extra_args=None if text is None else {STATE_REQUEST: text})
        self.runner.requests[str(self.count)] = SimpleNamespace(sampling_params=extra, prompt_token_ids=IDS)
        return str(self.count)

    def ask(self, *texts: str | None) -> None:
        """New requests in one pass."""
        self.runner.requests.clear()
        self.step(*((self.request(text), 0, len(IDS)) for text in texts))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    """Starts a server whose answers are in `tmp_path`."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(GENERATION, "1")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="none"))
    monkeypatch.syspath_prepend(str(WORKER))
    for name in ("teacher", "requests", "files", "bridge", "projection"):
        monkeypatch.delitem(sys.modules, f"nemo_oprd_{name}", raising=False)
    capture = importlib.import_module("nemo_oprd_teacher")._Capture

    def started(*, tensor: int = 1, probe: bool = True) -> Server:
        server = Server(capture, tensor)
        if probe:
            server.ask(None)
        return server

    return started


@pytest.fixture
def load(start: Callable[..., Server]) -> Callable[..., dict[str, Any]]:
    """What a server says when it is to load a bridge."""
    extension = importlib.import_module("nemo_oprd_teacher").TeacherExtension

    def loaded(server: Server, file: BridgeFile, **changes: Any) -> dict[str, Any]:
        return extension.nemo_oprd_load_bridge(server.worker, asdict(replace(file, **changes)))

    return loaded


@pytest.fixture
def bridge(tmp_path: Path) -> ServedBridge:
    """Two maps of layer 2, which is the last one, and one of the state after the final norm."""
    draw = torch.Generator().manual_seed(0)
    maps = {
        LayerPair(student, 2): LayerBridge(*(torch.randn(size, generator=draw) for size in ((WIDTH,), (RANK, WIDTH))))
        for student in (1, 2, 4)
    }
    models = (ModelIdentity("student", 4, WIDTH), ModelIdentity("teacher", 2, WIDTH))
    return ServedBridge(Bridge(RANK, maps, *models), (1, 2, 4), [2, 2, 3])


@pytest.fixture
def values(tmp_path: Path) -> Callable[[StateRequest], tuple[Any, list[float]]]:
    """(The header, the float32 numbers) of an answer."""

    def taken(state_request: StateRequest) -> tuple[Any, list[float]]:
        found = AnswerFolder(str(tmp_path)).take(state_request.name)
        assert found is not None
        return found[0], torch.frombuffer(found[1], dtype=torch.float32).tolist()

    return taken


@pytest.fixture
def answer(tmp_path: Path) -> Callable[[StateRequest], Any]:
    """What a server has answered to a state request: the header."""
    folder = AnswerFolder(str(tmp_path))

    def taken(state_request: StateRequest) -> Any:
        found = folder.take(state_request.name)
        return None if found is None else found[0]

    return taken


Start = Callable[..., Server]
Answered = Callable[[StateRequest], Any]


def fails(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of memory")


def header(state_request: StateRequest) -> dict[str, Any]:
    return state_request.header(IDS, WIDTH, "float32", 1)


def test_rows_over_chunks(start: Start, answer: Answered) -> None:
    server = start()
    server.ask(STATES.text(), LOGITS.text())
    assert answer(STATES) == header(STATES) and answer(LOGITS) == header(LOGITS)
    late = server.request(STATES.text())
    server.step((late, 0, 2))
    assert answer(STATES) is None
    server.step((late, 2, 2))
    assert answer(STATES) == header(STATES)
    assert server.capture.jobs == {}


def test_ids_that_are_left_out(start: Start, values: Callable[[StateRequest], tuple[Any, list[float]]]) -> None:
    """Log-probability and entropy over the other ids, of what the head makes of the states."""
    state_request, seen = replace(LOGITS, gaps=[[0, 1], [4, 5]]), []
    server = start()
    server.model.logits = lambda states: seen.append(states[:, :VOCABULARY].double().clone()) or states[:, :VOCABULARY]
    server.ask(state_request.text())
    found = torch.tensor(values(state_request)[1]).reshape(3, 2).double()
    kept = [1, 2, 3, 5]
    log_p = torch.cat(seen)[:, kept].log_softmax(-1)
    drawn = log_p.gather(1, torch.tensor([[kept.index(token)] for token in LOGITS.tokens or []]))[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found, torch.stack([drawn, entropy], 1), rtol=1e-5, atol=1e-6)


def test_a_check_that_fails_is_the_answer_of_its_job_alone(start: Start, answer: Answered) -> None:
    server = start()
    server.model.spoil = [3]
    server.ask(STATES.text(), LOGITS.text())
    assert "normed, differ from the final states" in answer(STATES)["error"]
    assert answer(LOGITS) == header(LOGITS)


def test_logits_that_fail_are_the_answer(start: Start, answer: Answered) -> None:
    server = start()
    server.model.logits = fails
    server.ask(STATES.text(), LOGITS.text())
    assert answer(LOGITS) == {"error": "RuntimeError: out of memory"}
    assert answer(STATES) == header(STATES)


def test_why_a_model_cannot_be_read_is_the_answer(start: Start, answer: Answered) -> None:
    server = start(probe=False)
    server.model.spoil = [0]
    server.ask(None)
    server.ask(STATES.text())
    assert "expected hidden states, or hidden states and a residual: this family" in answer(STATES)["error"]


def test_all_tensor_ranks_compute_all_logits(start: Start, answer: Answered) -> None:
    """Whatever failed on one of them: in the same pass, in an earlier pass of the job, or with what logits say."""
    server = start(tensor=2)
    both = StateRequest(**{**LOGITS.__dict__, "layers": [2], "rows": [0]})
    server.model.spoil = [0]
    server.ask(both.text())
    assert server.model.calls == 3 and "differ" in answer(both)["error"]
    late = server.request(both.text())
    server.step((late, 0, 1))
    assert server.model.calls == 4 and answer(both) is None
    server.model.spoil = []
    server.step((late, 1, 3))
    assert server.model.calls == 6 and "differ" in answer(both)["error"]
    server.model.logits = lambda states: states[:, :2]
    server.ask(LOGITS.text())
    assert server.model.calls == 9 and "out of bounds" in answer(LOGITS)["error"]


def test_a_tensor_rank_that_computes_no_logits_ends_the_engine(start: Start, answer: Answered) -> None:
    """The others would wait for it, or read what it computes next."""
    server = start(tensor=2)
    server.model.logits = fails
    with pytest.raises(Exception, match="logits of a teacher: RuntimeError: out of memory"):
        server.ask(LOGITS.text())


def test_an_ask_that_is_none_disturbs_no_other(start: Start, answer: Answered) -> None:
    server = start()
    huge = json.dumps({**json.loads(LOGITS.text()), "vocabulary": 10**30, "tokens": [10**29] * 3})
    server.ask(huge, "[" * 100_000, STATES.text())
    assert answer(STATES) == header(STATES) and answer(LOGITS) is None


def test_states_are_projected_before_they_leave(
    start: Start, load: Callable[..., Any], bridge: ServedBridge, values: Callable[..., Any], tmp_path: Path
) -> None:
    """As float64 projects the states that leave without a bridge; in two chunks the same bits as in one."""
    server, found = start(), list[list[float]]()
    assert load(server, bridge.write(tmp_path)) == {"digest": bridge.digest}
    plain = StateRequest("2" * 32, [2, 3], [0, 1, 3], [])
    projected = StateRequest("3" * 32, bridge.layers, [0, 1, 3], [], bridge=bridge.digest, rank=RANK)
    for chunks in ([(0, 4)], [(0, 1), (1, 3)]):
        server.runner.requests.clear()
        keys = [server.request(state_request.text()) for state_request in (plain, projected)]
        for part in chunks:
            torch.manual_seed(0)
            server.model.input = torch.randn(4, WIDTH)[slice(part[0], sum(part))].repeat(2, 1)
            server.step(*((key, *part) for key in keys))
        (_, states), (said, rows) = values(plain), values(projected)
        assert said == {**header(projected), "bridge": bridge.digest} and said["filled"] == 9
        full = torch.tensor(states).double().view(2, 3, WIDTH)
        maps = [bridge.bridge.for_layer(layer) for layer in bridge.students]
        expected = [
            (full[at] - each.teacher_mean) @ each.teacher_basis.double().T  # type: ignore[union-attr, operator]
            for at, each in zip((0, 0, 1), maps, strict=True)
        ]
        assert torch.allclose(torch.tensor(rows).double().view(3, 3, RANK), torch.stack(expected), atol=1e-5, rtol=0)
        bridge.check_projection(torch.tensor(rows).view(3, 3, RANK), [full[at] for at in (0, 0, 1)], "server")
        found.append(rows)
    assert found[0] == found[1]


def test_a_bridge_that_is_not_here_is_the_answer(
    start: Start, load: Callable[..., Any], bridge: ServedBridge, answer: Answered, tmp_path: Path
) -> None:
    server = start()
    asked = StateRequest("4" * 32, bridge.layers, [0], [], bridge=bridge.digest, rank=RANK)
    server.ask(asked.text(), STATES.text())
    assert f"bridge {bridge.digest} for layers [2, 2, 3]: expected one that was loaded: none" in answer(asked)["error"]
    assert answer(STATES) == header(STATES)
    load(server, bridge.write(tmp_path))
    for change in ({"rank": RANK + 1}, {"layers": [2, 3]}):
        server.ask(StateRequest(**{**asked.__dict__, **change}).text())
        assert "expected one that was loaded" in answer(asked)["error"]
    server.ask(asked.text())
    assert answer(asked)["bridge"] == bridge.digest


def test_files_of_another_bridge_or_from_elsewhere_are_not_loaded(
    start: Start,
    load: Callable[..., Any],
    bridge: ServedBridge,
    answer: Answered,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `..`, absolute, symlinked, of another user, with other bytes: it is told, and the server goes on."""
    server, file = start(), bridge.write(tmp_path)
    outside = tmp_path.parent / "outside"
    outside.write_bytes(Path(file.path).read_bytes())
    (tmp_path / "link").symlink_to(outside)
    elsewhere = (str(outside), f"{tmp_path}/../outside", f"{tmp_path}/link", f"{tmp_path}/absent", "bridge")
    for path in elsewhere:
        assert "ValueError: " in load(server, file, path=path)["error"], path
    for change in ({"digest": "0" * 32}, {"layers": [2, 2, 2]}, {"rank": 10**9}, {"width": 4, "rank": 7}):
        assert "ValueError: " in load(server, file, **change)["error"], change
    assert server.capture.bridges == {} and "TypeError" in load(server, file, layers=None)["error"]
    with Path(file.path).open("r+b") as stream:
        stream.write(b"1234")
    assert f"expected {bridge.digest}" in load(server, file)["error"]
    with monkeypatch.context() as as_another_user:
        as_another_user.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        assert "others can enter" in load(server, file)["error"]
    os.chmod(tmp_path, 0o755)
    assert "others can enter" in load(server, file)["error"]
    server.ask(STATES.text())
    assert answer(STATES) == header(STATES), "it goes on"


def test_what_workers_say_of_a_bridge_is_compared(bridge: ServedBridge) -> None:
    bridge.check_loaded([{"digest": bridge.digest}] * 2, "server")
    for said in ({"error": "OSError: gone"}, {"digest": "0" * 32}):
        with pytest.raises(ValueError, match=f"server could not load the bridge: .*expected bridge {bridge.digest}"):
            bridge.check_loaded([{"digest": bridge.digest}, said], "server")
    rows = [torch.randn(5, WIDTH) for _ in bridge.layers]
    right = torch.stack([bridge.bridge.project_teacher(*pair) for pair in zip(bridge.students, rows, strict=True)])
    bridge.check_projection(right, rows, "server")
    right[2, 4] *= 1 + 1e-4
    with pytest.raises(ValueError, match=r"projects states for student layer 4 by something else than the bridge"):
        bridge.check_projection(right, rows, "server")
