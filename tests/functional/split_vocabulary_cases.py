"""What the pool's workers run for the output losses: a split vocabulary against the whole of it on each rank."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from nemo_oprd.losses.chunked import (
    OutputGradients,
    TeacherStates,
    chunked_logprob,
    chunked_output_loss,
    output_metrics,
)
from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.vocab_parallel import (
    OutputHead,
    Ranges,
    VocabShard,
    head_logits,
    leave_out_gaps_,
    log_sampled_mass,
    log_softmax_,
    top_k_ids,
)

UNSAMPLED = ((1, 2), (30, 33), (60, 61))
REAL, WIDTH, TEACHER_WIDTH, CHUNK = 61, 6, 9, 4


def _deviation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-3))


def _worst(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest relative deviation of the pairs on any rank."""
    worst = torch.tensor([_deviation(a.double(), b.double()) for a, b in pairs]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _result(gradients: OutputGradients) -> dict[str, torch.Tensor]:
    assert gradients.head is not None
    return {"loss": gradients.sums.loss, "hidden": gradients.hidden, **gradients.sums.metrics}


def split_against_whole(
    losses: list[OutputLoss], size: int, rows: int, dtype: str, integers: bool, gaps: Ranges = ()
) -> dict[str, dict[str, float]]:
    """Relative deviations by loss and quantity, with `size` columns of the padded vocabulary on each rank.

    Args:
        integers: rows and heads of small whole numbers: products are exact, and most logits are tied.
        gaps: ids that are left out.
    """
    from nemo_oprd.megatron.parallel import init_distributed

    init_distributed()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    g = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=g, dtype=torch.float64)
        return (values.round() if integers else values).to(getattr(torch, dtype))

    hidden, head = random(rows, WIDTH), random(ranks * size, WIDTH)
    teacher_hidden, teacher_head = random(rows, TEACHER_WIDTH), random(ranks * size, TEACHER_WIDTH)
    kept = [i for i in range(REAL) if not any(start <= i < end for start, end in gaps)]
    tokens, weight = torch.randint(0, len(kept), (rows,), generator=g), torch.rand(rows, generator=g)
    tokens = torch.tensor(kept)[tokens]
    teacher_bias = random(ranks * size)
    for padded in (head, teacher_head, teacher_bias):
        padded[REAL:] = torch.nan
    mine = slice(rank * size, (rank + 1) * size)
    whole = VocabShard(0, ranks * size, REAL, gaps=gaps, unsampled=UNSAMPLED)
    shard = replace(whole, start=mine.start, size=size, group=dist.group.WORLD)
    report = {}
    for loss in losses:
        everything = (
            loss,
            hidden,
            head,
            TeacherStates(teacher_hidden, OutputHead(teacher_head, teacher_bias)),
            tokens,
            weight,
            whole,
        )
        theirs = TeacherStates(teacher_hidden, OutputHead(teacher_head[mine], teacher_bias[mine]))
        split = (loss, hidden, head[mine], theirs, tokens, weight, shard)
        expected = chunked_output_loss(*everything, chunk_tokens=CHUNK, scale=2.0)
        ours = chunked_output_loss(*split, chunk_tokens=CHUNK, scale=2.0)
        measured = output_metrics(*split, chunk_tokens=CHUNK)
        assert measured.loss == ours.sums.loss and measured.metrics == ours.sums.metrics
        assert ours.head is not None and expected.head is not None
        whole_result = _result(expected)
        found = {name: _worst((value, whole_result[name])) for name, value in _result(ours).items()}
        found["head"] = _worst((ours.head, expected.head[mine]))
        # every rank must hold the same numbers, to the last bit
        same = [torch.empty_like(ours.sums.loss) for _ in range(ranks)]
        dist.all_gather(same, ours.sums.loss)
        assert all(torch.equal(other, same[0]) for other in same)
        report[str(loss)] = found
    parts = chunked_output_loss(*split, chunk_tokens=CHUNK, scale=2.0, reduce_hidden=False).hidden
    dist.all_reduce(parts)
    found["hidden of the ranks' parts"] = _worst((parts, expected.hidden))
    old = chunked_logprob(*split[1:3], tokens, shard, temperature=0.7, chunk_tokens=CHUNK)
    one = chunked_logprob(*everything[1:3], tokens, whole, temperature=0.7, chunk_tokens=CHUNK)
    found["log-probabilities and entropies"] = _worst(*zip(old, one, strict=True))
    found["probability of sampled ids"] = _of_logits(hidden, (head, head[mine]), (whole, shard), integers=integers)
    return report


def _of_logits(
    hidden: torch.Tensor, heads: tuple[torch.Tensor, ...], shards: tuple[VocabShard, ...], *, integers: bool
) -> float:
    """The deviation of the probability of all ids that can be sampled, after a comparison of the largest logits."""
    logits = [leave_out_gaps_(head_logits(hidden, *each), each[1]) for each in zip(heads, shards, strict=True)]
    left_out, unsampled = ({i for run in ranges for i in range(*run)} for ranges in (shards[0].gaps, UNSAMPLED))
    for k in (1, 4, 16, 60, 61, 200):
        ids = top_k_ids(logits[1], k, shards[1])
        assert torch.equal(ids, top_k_ids(logits[0], k, shards[0])), k
        if integers:
            kept = [v for v in range(REAL) if v not in left_out]
            order = [sorted(kept, key=lambda v, row=row: (-float(row[v]), v))[:k] for row in logits[0]]
            assert ids.tolist() == order, k
    exact = logits[0].softmax(1)[:, [v for v in range(REAL) if v not in unsampled]].sum(1).log()
    masses = []
    for logits_CV, shard in zip(logits, shards, strict=True):
        log_softmax_([logits_CV], shard, 1.0)
        masses.append(log_sampled_mass(logits_CV.exp(), shard))
    return _worst(*((mass, exact) for mass in masses))
