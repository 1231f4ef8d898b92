"""`rollout.engine=vllm` with servers that stand in for vLLM: every process, call and fault is real but the sampling.

What a real vLLM samples, and with which weights, is for the tests that are marked `vllm`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pool import Pools
from vllm_engine_cases import PROMPTS, expected, lines, make_bench, requests
from vllm_stand_in import length_of

GENERATE = "/inference/v1/generate"
COUNT = len(PROMPTS)


@pytest.fixture
def run(pools: Pools, tmp_path: Path) -> Any:
    """`run(plan, *overrides, ranks, faults, **settings)` carries out a plan with fresh servers."""

    def carry_out(plan: str, *overrides: str, ranks: int = 1, faults: dict | None = None, **settings: Any) -> Any:
        number = len(list(tmp_path.iterdir()))
        root = make_bench(tmp_path / str(number), **(faults or {}))
        arguments = {"root": str(root), "overrides": [*overrides], "plan": plan.split(", "), **settings}
        found = pools[ranks].run("vllm_engine_cases:run", timeout=60, **arguments)
        found["root"] = root
        return found

    return carry_out


def refused(found: dict[str, Any]) -> str:
    """The one line that ended a plan."""
    assert found["error"] is not None and "\n" not in found["error"]
    return found["error"]


@pytest.mark.parametrize(
    ("ranks", "overrides", "settings", "expected_servers"),
    [
        (1, [], {}, 1),
        (1, ["rollout.vllm.replicas=3", "rollout.max_batch=2"], {}, 3),
        (1, ["rollout.vllm.tensor=2"], {}, 1),
        (2, ["rollout.vllm.replicas=2"], {"nodes": True}, 2),
        (2, ["rollout.vllm.placement=dedicated"], {"students": 1}, 1),
    ],
    ids=["one server", "three servers", "two workers", "two machines", "a rank for servers"],
)
def test_responses_depend_on_weights_and_key_alone(
    run: Any, ranks: int, overrides: list[str], settings: dict[str, Any], expected_servers: int
) -> None:
    """Whatever servers there are, and after each update."""
    found = run("load 1, generate, update 2, generate, generate", *overrides, ranks=ranks, **settings)
    assert found["error"] is None
    assert found["sampled"] == [expected(seed, PROMPTS) for seed in (1, 2, 2)]
    assert [metrics["rollout/server_deaths"] for metrics in found["metrics"]] == [0, 0, 0]
    asked = requests(found["root"])
    assert len(asked) == 3 * COUNT
    servers = Counter(line["server"] for line in asked)
    assert len(servers) == expected_servers


def test_what_a_request_says(run: Any) -> None:
    """Seeds differ, only known ids come back, and a response has no more tokens than the model has positions."""
    found = run("load 1, generate", "rollout.vllm.replicas=2", vocab_limit=200)
    assert found["sampled"] == [expected(1, PROMPTS, known=200)]
    assert max(i for ids, _, _ in found["sampled"][0] for i in ids) < 200
    asked = requests(found["root"])
    assert len({line["seed"] for line in asked}) == COUNT
    for line in asked:
        assert (line["temperature"], line["top_p"], line["max_tokens"], line["stop_token_ids"]) == (0.9, 1.0, 6, [1, 3])
    assert found["metrics"][0].keys() == {"rollout/server_deaths", "rollout/straggler_idle"}
    assert 0 <= found["metrics"][0]["rollout/straggler_idle"] < 1


def test_the_longest_come_first(run: Any) -> None:
    """In the second call the lengths of responses to the same prompts are known."""
    found = run("load 1, generate, generate", "rollout.max_batch=1")
    prompts = [line["prompt"] for line in requests(found["root"])]
    assert prompts[:COUNT] == PROMPTS
    assert prompts[COUNT:] == sorted(PROMPTS, key=lambda prompt: -length_of(prompt, 6))
    assert prompts[COUNT:] != PROMPTS


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_server_dies_while_it_samples(run: Any, ranks: int) -> None:
    """Another one takes over, or it is started again; nothing that was complete is sampled again."""
    faults = {"die": {"call": GENERATE, "at": 3}, "delay_s": 0.02}
    found = run(
        "load 1, generate, update 2, generate",
        *("rollout.vllm.replicas=2", "rollout.max_batch=2"),
        ranks=ranks,
        faults=faults,
        nodes=ranks == 2,
    )
    assert found["error"] is None
    assert found["sampled"] == [expected(1, PROMPTS), expected(2, PROMPTS)]
    assert [metrics["rollout/server_deaths"] for metrics in found["metrics"]] == [1, 1]
    (said,) = found["said"]
    assert "is restarted (1 of 10): vLLM server" in said
    assert len(requests(found["root"])) <= 2 * COUNT + 2  # what was under way on the one that died
    if ranks == 1:  # the other server of this machine took over, before the new one was there
        new = list(dict.fromkeys(line["pid"] for line in lines(found["root"])))[-1]
        calls = [line["call"] for line in lines(found["root"]) if line["pid"] == new]
        assert calls.index(GENERATE) > [i for i, call in enumerate(calls) if call == "/finish_weight_update"][1]


@pytest.mark.parametrize(("repeat", "asked"), [("responses", COUNT + 1), ("step", 4 + COUNT)])
def test_what_is_sampled_again(run: Any, repeat: str, asked: int) -> None:
    faults = {"die": {"call": GENERATE, "at": 4}}
    found = run("load 1, generate", "rollout.max_batch=1", f"rollout.vllm.repeat={repeat}", faults=faults)
    assert found["sampled"] == [expected(1, PROMPTS)]
    assert len(requests(found["root"])) == asked


@pytest.mark.parametrize("call", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_server_dies_during_an_update(run: Any, call: str) -> None:
    """In any of its phases; the other server gets the same weights."""
    at = 8 if call == "/update_weights" else 2  # in the second update
    found = run("load 1, update 2, generate", "rollout.vllm.replicas=2", faults={"die": {"call": call, "at": at}})
    assert found["error"] is None
    assert found["sampled"] == [expected(2, PROMPTS)]
    assert len(found["said"]) == 1
    assert len({line["pid"] for line in lines(found["root"])}) == 3


@pytest.mark.parametrize("plan", ["load 1, update 2, kill, generate", "load 1, generate, kill, update 2, generate"])
def test_all_servers_die_while_idle(run: Any, plan: str) -> None:
    found = run(plan, "rollout.vllm.replicas=2")
    assert found["error"] is None
    assert found["sampled"][-1] == expected(2, PROMPTS)
    assert len(found["said"]) == 2


def test_no_object_collective_carries_responses(run: Any) -> None:
    """The largest object that a rank pickles for others has the same size for longer responses.

    The sum of all objects depends on when answers arrive: which machine samples how many, in how many rounds.
    """
    overrides = ["rollout.vllm.replicas=2", "rollout.vllm.max_restarts=0"]
    found = run("load 1, count 1, count 60", *overrides, ranks=2, nodes=True, faults={"lengths": [60]})
    (few, short), (many, long) = found["counted"]
    assert (few, many) == (COUNT, 60 * COUNT)
    assert 0 < long <= short + 100


def test_deaths_are_bounded(run: Any) -> None:
    faults = {"die": {"call": GENERATE, "at": 1, "times": 100}}
    found = run("load 1, generate", "rollout.vllm.max_restarts=1", faults=faults)
    message = refused(found)
    assert "vLLM server 0" in message and "died 2 times, the last time because: " in message
    assert "expected at most 1 deaths (rollout.vllm.max_restarts): its log is " in message
    assert len(found["said"]) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_cannot_start_is_refused_with_its_last_words(run: Any, ranks: int) -> None:
    faults = {"start": {"text": "no such device", "times": 2}}
    found = run("load 1", faults=faults, ranks=ranks)
    assert "has ended; it said: RuntimeError: no such device; it died twice before it was ready" in refused(found)
    assert len(found["said"]) == 1


def test_one_false_start_is_forgiven(run: Any) -> None:
    found = run("load 1, generate", faults={"start": {"text": "port in use", "times": 1}})
    assert found["sampled"] == [expected(1, PROMPTS)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_cancelled_and_resumed(run: Any, ranks: int) -> None:
    """What was complete is kept, and the rest is what an uninterrupted call gives."""
    overrides = ["rollout.vllm.replicas=2", "rollout.max_batch=2"]
    found = run(
        "load 1, cancel, generate, generate", *overrides, faults={"delay_s": 0.15}, ranks=ranks, nodes=ranks == 2
    )
    assert found["error"] is None
    (completed,) = found["completed"]
    assert 0 < completed < COUNT
    assert found["sampled"] == [expected(1, PROMPTS)] * 2
    # both later calls ask for the others again
    times = Counter(line["seed"] for line in requests(found["root"]))
    assert len(times) == COUNT
    assert sum(count == 1 for count in times.values()) == completed
    # each response was kept as it is, by one controller, in the call that sampled it
    first, second, third = found["kept"]
    everything = [(i, ids, logprobs) for i, (ids, logprobs, _) in enumerate(expected(1, PROMPTS))]
    assert len(first) == completed and sorted(first + second) == everything and second == third


def test_responses_that_cannot_be_kept_end_the_call(run: Any) -> None:
    assert refused(run("load 1, full")) == "the disk is full"


def test_keeping_a_response_holds_up_no_other(run: Any) -> None:
    """The servers are asked on meanwhile, and all responses are kept when the call returns."""
    found = run("load 1, slow", "rollout.max_batch=1")
    assert found["error"] is None
    assert [i for i, *_ in found["kept"][0]] == list(range(COUNT))


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"version": True}, "from the weights 1-of-somebody-else (tokens 0 to 4), expected 0-"),
        ({"outside": True}, "ids [300] outside 0..299; expected ids inside"),
        ({"logprobs": 1}, "with 4 ids, 1 log-probabilities and the ids [] outside"),
        (
            {"no_logprobs": True},
            "refuses /nemo_oprd/generate with status 409: vLLM answered in another form (choices.0.logprobs",
        ),
        ({"last_logprob": -9999.0}, "with the log-probability -9999 of token 3; expected a finite number of at most 0"),
        ({"last_logprob": "nan"}, "with the log-probability nan of token 3; expected a finite number of at most 0"),
        ({"last_logprob": 0.01}, "with the log-probability 0.01 of token 3; expected a finite number of at most 0"),
        ({"digest": True}, "the weights did not arrive as sent"),
        ({"untouched": ["mlp.experts"]}, "1 module(s) such as 'mlp.experts' took none of the weights that came"),
        ({"describe": {"hidden_size": 48}}, "serves another model or in another way: hidden_size=48 instead of 32"),
        (
            {"describe": {"rope_parameters": {"rope_theta": 1.0}}},
            "rope=Rope(theta=1.0, kind='default', share=1.0, settings=()) instead of Rope(theta=",
        ),
        ({"describe": {"known_ids": 299, "dtype": "bfloat16"}}, "known_ids=299 instead of 300; dtype=bfloat16 instead"),
        ({"refuse": {"call": GENERATE, "text": "too long"}}, "refuses /nemo_oprd/generate with status 400: "),
        ({"refuse": {"call": "probe", "text": "no kernel"}}, "no kernel"),
        ({"refuse": {"call": "/start_weight_update", "text": "what"}}, "refuses /start_weight_update with status 400"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_is_refused(run: Any, faults: dict[str, Any], message: str) -> None:
    """At once, and with the server alive: trying again would not help."""
    found = run("load 1, generate", "rollout.max_batch=1", faults=faults)
    assert message in refused(found)
    assert refused(found).startswith("vLLM server 0")
    assert (found["sampled"], found["said"]) == ([], [])


def test_one_of_two_machines_refuses(run: Any) -> None:
    """The other rank ends with the same line."""
    found = run(
        "load 1, generate",
        "rollout.vllm.replicas=2",
        ranks=2,
        nodes=True,
        faults={"refuse": {"call": "/resume", "text": "no"}},
    )
    assert "refuses /resume with status 400" in refused(found)
