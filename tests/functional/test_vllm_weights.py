"""Weight updates of vLLM servers when something refuses, dies, hangs or shares a GPU; the servers are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pools
from vllm_engine_cases import PROMPTS, expected, lines, make_bench

GROUP = ("rollout.vllm.transport=group", "rollout.vllm.replicas=2", "rollout.vllm.start_timeout=120")


@pytest.fixture
def run(pools: Pools, tmp_path: Path) -> Any:
    """`run(plan, *overrides, ranks, faults, **settings)` carries out a plan with fresh servers."""

    def carry_out(plan: str, *overrides: str, ranks: int = 1, faults: dict | None = None, **settings: Any) -> Any:
        faults = dict(faults or {})
        if "start_while" in faults:
            faults["start_while"] = str(tmp_path / "bench" / "memory")
        root = make_bench(tmp_path / "bench", **faults)
        arguments = {"root": str(root), "overrides": [*overrides], "plan": plan.split(", "), **settings}
        return {"root": root, **pools[ranks].run("vllm_engine_cases:run", timeout=110, **arguments)}

    return carry_out


def starts(found: dict[str, Any]) -> int:
    """Processes of servers that were there."""
    return len({line["pid"] for line in lines(found["root"])})


class TestGroup:
    """Over a process group, which servers with two workers each and the first rank make."""

    def test_responses(self, run: Any) -> None:
        """On two machines; the rank that controls no server of the transport sends nothing, and digests nothing."""
        found = run("load 1, generate, update 2, generate", *GROUP, ranks=2, nodes=True, faults={"group": True})
        assert found["error"] is None
        assert found["sampled"] == [expected(1, PROMPTS), expected(2, PROMPTS)]
        assert found["digested"][0] > 2 and found["digested"][1] == 0
        joins = [line for line in lines(found["root"]) if line["call"] == "/init_weight_transfer_engine"]
        assert len(joins) == 2  # the group is used again

    @pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
    def test_a_refusal_ends_the_transfer_at_once(self, run: Any, ranks: int) -> None:
        """Of the second worker, for which the first one waits; with the server's own words, and no restart."""
        faults = {"group": True, "refuse": {"call": "bucket 1", "at": 2, "text": "a layer of another shape"}}
        found = run("load 1", *GROUP, "rollout.vllm.tensor=2", ranks=ranks, nodes=ranks == 2, faults=faults)
        assert "a layer of another shape" in found["error"] and "refuses" in found["error"]
        assert found["said"] == [] and starts(found) == 2
        refused_at = max(line["time"] for line in lines(found["root"]) if line["call"] == "bucket 1")
        assert found["ended_at"] - refused_at < 5

    def test_a_dead_worker_is_not_waited_for(self, run: Any) -> None:
        """Its server alone is restarted; the other one joins again."""
        faults = {"group": True, "die": {"call": "bucket 0", "at": 5}}
        found = run("load 1, update 2, generate", *GROUP, faults=faults)
        assert found["error"] is None and found["sampled"] == [expected(2, PROMPTS)]
        assert len(found["said"]) == 1 and starts(found) == 3

    @pytest.mark.slow
    def test_a_worker_that_hangs_is_given_up_after_the_deadline(self, run: Any) -> None:
        faults = {"group": True, "hang": {"call": "bucket 0", "at": 5}}
        found = run("load 1, update 2, generate", *GROUP, faults=faults, deadline=10.0)
        assert found["error"] is None and found["sampled"] == [expected(2, PROMPTS)]
        (said,) = found["said"]
        assert "did not leave the transfer within 2 s of its end" in said and "longer than 10 s" in said
        assert starts(found) == 3

    @pytest.mark.parametrize("fault", ["die", "refuse"])
    def test_who_does_not_join(self, run: Any, fault: str) -> None:
        """The members who wait for it learn it at once."""
        faults = {"group": True, fault: {"call": "join 0", "text": "no such interface"}}
        found = run("load 1, generate", *GROUP, faults=faults)
        if fault == "refuse":
            assert "no such interface" in found["error"] and found["said"] == []
            assert found["seconds"][-1] < 60
        else:
            assert found["sampled"] == [expected(1, PROMPTS)] and len(found["said"]) == 1


class TestVersions:
    def test_weights_that_have_changed_are_not_given_to_a_restarted_server(self, run: Any) -> None:
        """The other server, which did not die, still has those of the version."""
        found = run("load 1, update 2, change 3, kill, generate", "rollout.vllm.replicas=2")
        assert "the weights are not those of version 2-" in found["error"]
        assert "any more, but of 2-" in found["error"]

    def test_the_digest_is_computed_on_the_first_rank(self, run: Any) -> None:
        found = run("load 1, update 2, generate", ranks=2)
        assert found["sampled"] == [expected(2, PROMPTS)]
        assert found["digested"][0] > 2 and found["digested"][1] == 0


class TestSharedGpus:
    def sleeps(self, found: dict[str, Any]) -> list[str]:
        return [line["path"] for line in lines(found["root"]) if line["call"] in ("/sleep", "/wake_up")]

    def test_the_level_of_sleep_is_by_what_follows(self, run: Any) -> None:
        """Nothing that is sampled for others is aborted, and weights that are lost come again if they are needed."""
        found = run("load 1, generate, generate last, update 2, generate last, generate", memory="freed")
        assert found["error"] is None
        assert found["sampled"] == [expected(seed, PROMPTS) for seed in (1, 1, 2, 2)]
        lost, kept = "/sleep?level=2&mode=wait", "/sleep?level=1&mode=wait"
        update = ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
        assert self.sleeps(found) == [
            *(lost, *update, kept, "/wake_up", lost),
            *(*update, lost),
            *(*update, kept),
        ]
        paused = {line["path"] for line in lines(found["root"]) if line["call"] == "/pause"}
        assert paused == {"/pause?mode=wait"}

    def test_servers_sleep_at_the_same_time(self, run: Any) -> None:
        found = run("load 1, generate", "rollout.vllm.replicas=3", memory="freed", faults={"sleep_s": 1.0})
        times = [line["time"] for line in lines(found["root"]) if line["path"] == "/sleep?level=1&mode=wait"]
        assert len(times) == 3 and max(times) - min(times) < 1

    @pytest.mark.parametrize(
        ("path", "plan"), [("/sleep", "load 1, generate"), ("/wake_up", "load 1, generate, generate")]
    )
    def test_a_refusal_ends_all_controllers(self, run: Any, path: str, plan: str) -> None:
        """With the server's own words; the controller whose server sleeps well does not wait for the other one."""
        refuse = {"call": path, "at": 2 if path == "/sleep" else 3, "text": "no memory to keep the weights in"}
        found = run(plan, "rollout.vllm.replicas=2", memory="freed", ranks=2, nodes=True, faults={"refuse": refuse})
        assert f"refuses {path}" in found["error"] and refuse["text"] in found["error"]
        assert found["seconds"][-1] < 20

    def test_a_server_is_restarted_in_memory_that_the_trainer_gives_back(self, run: Any) -> None:
        found = run("load 1, occupy, kill, generate", memory="freed", faults={"start_while": True})
        assert found["error"] is None and found["sampled"] == [expected(1, PROMPTS)]
        assert len(found["said"]) == 1

    def test_a_server_whose_memory_is_taken_is_not_restarted_in_vain(self, run: Any) -> None:
        found = run("load 1, occupy, kill, generate", memory="kept", faults={"start_while": True})
        assert "vLLM server 0 can't be started again: of the 80.0 GB of rank 0's GPU 1.0 GB are free" in found["error"]
        assert "expected 32.0 GB for rollout.vllm.gpu_memory_utilization=0.4: lower that" in found["error"]
        assert found["said"] == [] and starts(found) == 1
