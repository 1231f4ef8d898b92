"""The hooks in a worker of a teacher's server, on a model of three layers: what goes wrong is the answer of its job."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_oprd.rollout.vllm.worker.nemo_oprd_asks import ASK, GENERATION, AnswerFolder, Ask
from nemo_oprd.rollout.vllm.worker.nemo_oprd_files import FOLDER

WORKER = Path(__file__).parents[3] / "nemo_oprd" / "rollout" / "vllm" / "worker"
WIDTH, IDS, VOCABULARY = 8, [3, 1, 4, 1], 6
STATES = Ask("0" * 32, [1, 2, 3], [0, 3], [])
LOGITS = Ask("1" * 32, [], [], [0, 1, 2], [1, 2, 3], vocabulary=VOCABULARY, chunk=1)


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
        self.model(torch.randn(sum(scheduled.num_scheduled_tokens.values()), WIDTH))


class Server:
    """One tensor rank of a server, with the capture in place."""

    def __init__(self, capture: Any, tensor: int) -> None:
        self.model, self.count = Model(), 0
        self.runner = Runner(self.model)
        sizes = {"get_hidden_size": lambda: WIDTH, "get_vocab_size": lambda: VOCABULARY, "dtype": torch.float32}
        model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2), **sizes)
        config = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=tensor))
        self.capture = capture(SimpleNamespace(vllm_config=config, model_runner=self.runner, rank=0))

    def step(self, *parts: tuple[str, int, int]) -> None:
        """A forward pass of (request, tokens that are done, tokens of this pass)."""
        keys, done, counts = zip(*parts, strict=True)
        self.runner.input_batch = SimpleNamespace(num_reqs=len(keys), req_ids=keys, num_computed_tokens_cpu=done)
        self.runner.execute_model(SimpleNamespace(num_scheduled_tokens=dict(zip(keys, counts, strict=True))))

    def request(self, text: str | None) -> str:
        """The name of a new request."""
        self.count += 1
        extra = SimpleNamespace(extra_args=None if text is None else {ASK: text})
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
    for name in ("nemo_oprd_teach", "nemo_oprd_asks", "nemo_oprd_files"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    capture = importlib.import_module("nemo_oprd_teach")._Capture

    def started(*, tensor: int = 1, probe: bool = True) -> Server:
        server = Server(capture, tensor)
        if probe:
            server.ask(None)
        return server

    return started


@pytest.fixture
def answer(tmp_path: Path) -> Callable[[Ask], Any]:
    """What a server has answered to an ask: the header."""
    folder = AnswerFolder(str(tmp_path))

    def taken(ask: Ask) -> Any:
        found = folder.take(ask.name)
        return None if found is None else found[0]

    return taken


Start = Callable[..., Server]
Answered = Callable[[Ask], Any]


def fails(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of memory")


def header(ask: Ask) -> dict[str, Any]:
    return ask.header(IDS, WIDTH, "float32", 1)


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
    both = Ask(**{**LOGITS.__dict__, "layers": [2], "rows": [0]})
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
