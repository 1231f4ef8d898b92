"""The benchmark against other products: its arguments, what it compares, its rows and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.peer_parts.cases import CASES, ONE_BY_ONE, OURS, PAPER, PLAIN, TRL, Case, spread_lengths, tiny

CASE = Case("mse", "2 x 3", (3, 3), (PLAIN,))


def measured(cpu: float, peak: float = 100.0) -> dict[str, float]:
    return {"cpu_seconds": cpu, "wall_seconds": 2 * cpu, "peak_rss_mb": peak}


def of_rank(loss: float, cpu: float, norm: float = 1.5) -> dict[str, Any]:
    updates = [{"cpu_seconds": cpu, "wall_seconds": cpu}, {"cpu_seconds": 3 * cpu, "wall_seconds": 3 * cpu}]
    stamps = {"ready": measured(cpu), "first": measured(2 * cpu), "peak_rss_mb": 250.0, "updates": updates}
    return {**stamps, "losses": [loss, loss / 2], "norms": [norm, norm], "parameters": 7}


def test_a_missing_peer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "missing_peer", lambda chosen, real=peers.missing_peer: real(chosen, tmp_path / "bin/p"))
    assert peers.main(["--json", str(tmp_path / "rows.json")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert "bash scripts/setup_peers.sh" in shown.err
    assert not (tmp_path / "rows.json").exists()


def test_only_a_complete_environment_counts(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert "setup_peers.sh" in (peers.missing_peer([TRL, PLAIN], python) or "")
    assert peers.missing_peer([PLAIN], python) is None
    (tmp_path / "venv" / "ready").touch()
    assert peers.missing_peer([TRL, PLAIN], python) is None


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    options = peers.arguments([])
    assert (options.peers, options.threads, options.full, options.quick) == ([TRL, PLAIN], 1, False, False)
    for wrong in (["--peers", "verl"], ["--repeats", "0"], ["--threads", "two"]):
        with pytest.raises(SystemExit) as ended:
            peers.arguments(wrong)
        assert ended.value.code == 2
        assert "expected" in capsys.readouterr().err
    assert peers.main(["--peers", "plain", "--task", "nothing"]) == 2
    assert "--task nothing: expected" in capsys.readouterr().err


def test_the_batches() -> None:
    assert spread_lengths(4) == (256, 341, 427, 512)
    assert [(case.task, case.batch) for case in CASES] == [
        ("full_vocab", "8 x 256-512"), ("full_vocab", "4 x 256-512"), ("full_vocab", "2 x 256"),
        ("mse", "4 x 256-512"), ("mse", "2 x 256"), ("mse", "1 x 1,000 + 7 x 60"), ("top_16", "4 x 256-512"),
        ("full_vocab", "SmolLM2-135M, 2 x 256"), ("mse", "SmolLM2-135M, 2 x 256"),
    ]  # fmt: skip
    assert all((TRL in case.peers) == (case.task == "full_vocab") and PLAIN in case.peers for case in CASES)
    assert {peer for case in CASES for peer in case.peers} == {TRL, PLAIN, PAPER, ONE_BY_ONE}
    alone = peers.chosen_cases(peers.arguments(["--peers", "trl", "--quick"]))
    assert [(case.task, case.peers) for case in alone] == [("full_vocab", (TRL,))] * 4
    everything = peers.chosen_cases(peers.arguments(["--full"]))
    assert {"sampled_token", "sampling"} < {case.task for case in everything}
    assert len({(case.task, case.batch) for case in everything}) == len(everything)  # a row has one meaning
    assert tiny(CASES[5]).responses == (66, *[4] * 7)


def test_another_computation_is_an_error() -> None:
    ours = peers.computed(OURS, [of_rank(0.5, 1.0)])
    peers.check_agreement(CASE, {OURS: ours, PLAIN: peers.computed(PLAIN, [of_rank(0.5 * (1 + 1e-6), 1.0)])})
    for name, other in (
        ("the loss of update 1", of_rank(0.5 * (1 + 2e-4), 1.0)),
        ("the gradient norm of update 1", of_rank(0.5, 1.0, norm=1.501)),
        ("the number of parameters", {**of_rank(0.5, 1.0), "parameters": 8}),
        ("the loss of update 1", of_rank(float("nan"), 1.0)),
    ):
        with pytest.raises(peers.MismatchError, match=name):
            peers.check_agreement(CASE, {OURS: ours, PLAIN: peers.computed(PLAIN, [other])})


def test_ranks_are_one_measurement() -> None:
    ranks = [of_rank(0.2, 1.0), of_rank(0.3, 2.0)]
    found = peers.combined(ranks)
    # means over the updates of sums, or of the slower rank, and memory summed
    assert found["update"] == {"cpu_seconds": 6.0, "wall_seconds": 4.0, "peak_rss_mb": 500.0}
    assert found["ready"] == {"cpu_seconds": 3.0, "wall_seconds": 4.0, "peak_rss_mb": 200.0}
    # shares of the plain loop's ranks, mean of TRL's, and ours hold the whole
    assert peers.computed(PLAIN, ranks)["loss"] == [0.5, 0.25]
    assert peers.computed(TRL, ranks)["loss"] == [0.25, 0.125]
    assert peers.computed(OURS, ranks)["loss"] == [0.2, 0.1]


def test_rows_and_table() -> None:
    turns = {OURS: [measured(2.0), measured(4.0), measured(3.0)], PLAIN: [measured(3.0), measured(4.0), measured(9.0)]}
    ours, theirs = peers.rows_of("mse", "2 x 3", turns)
    assert (ours["ratio"], ours["cpu_seconds"], ours["wall_seconds"]) == (None, 3.0, 6.0)
    assert theirs["ratio"] == theirs["cpu_seconds"] / ours["cpu_seconds"] == 4 / 3
    assert theirs["ratios"] == [1.5, 1.0, 3.0]
    shown = list(peers.lines([ours, theirs]))
    assert shown == ["| mse | 2 x 3 | plain loop | 3.00 | 4.00 | 1.33 (1.00 to 3.00) | 100 | 100 |"]
    assert {line.count("|") for line in [*peers.HEAD.splitlines(), *shown]} == {9}


def test_a_failed_process_ends_the_benchmark(tmp_path: Path) -> None:
    command = ["python", "-c", "import sys; print('no such model'); sys.exit(3)"]
    with pytest.raises(RuntimeError, match=r"ended with 3:\nno such model"):
        peers.run_ranks(command, {"ranks": 2, "threads": 1}, tmp_path)


def test_the_peers_environment_shadows_nothing() -> None:
    """Its packages come first on the path, so one that .venv pins, too, would not be that of the other products."""

    def names(file: str) -> set[str]:
        pins = (line for line in (peers.ROOT / file).read_text().splitlines() if "==" in line and line[0] != "#")
        return {pin.split("==")[0].lower().replace("_", "-") for pin in pins}

    assert "trl" in names("requirements-peers.txt")
    assert not names("requirements-peers.txt") & names("requirements-cpu.txt")
