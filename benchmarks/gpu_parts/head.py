"""The part `head`: losses on distributions from final states: this project's chunks, other kernels, whole logits.

16,384 rows of the 1.5B in bfloat16. A row is loss and gradients of states and head; all compute reverse KL on the whole
vocabulary, so that their gradients can be compared, or what their name says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_parts.measure import is_cuda, measured, place
from benchmarks.gpu_parts.outcome import Outcome, Settings
from benchmarks.gpu_parts.real_shape import QUICK, REAL
from nemo_oprd.losses.chunked import Teacher, TeacherStates, chunked_output_loss
from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.vocab_parallel import OutputHead, VocabShard

# loss, gradient of the states, gradient of the head
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# relative deviation of a gradient from that of whole logits in float32; bfloat16 has 8 bits
LIMIT = 2e-2
OURS, WHOLE = "chunks, full vocabulary", "whole logits, full vocabulary"


@dataclass(frozen=True)
class Problem:
    """Random final states and heads of both models, the sampled tokens, and the weight of each row."""

    hidden: torch.Tensor
    head: torch.Tensor
    teacher: torch.Tensor
    teacher_head: torch.Tensor
    tokens: torch.Tensor
    weight: torch.Tensor

    @staticmethod
    def make(rows: int, width: int, vocabulary: int) -> Problem:
        """A problem whose models differ a little, drawn on the device; a rehearsal's has no values."""
        rehearsed = isinstance(torch.empty(1, device=place()), torch._subclasses.fake_tensor.FakeTensor)
        draw = None if rehearsed else torch.Generator(place()).manual_seed(0)

        def new(*size: int, scale: float) -> torch.Tensor:
            made = torch.empty(size, device=place(), dtype=torch.bfloat16)
            return made if draw is None else made.normal_(0.0, scale, generator=draw)

        hidden, head = new(rows, width, scale=1.0), new(vocabulary, width, scale=0.03)
        teacher, teacher_head = hidden + new(rows, width, scale=0.1), head + new(vocabulary, width, scale=0.003)
        tokens = torch.empty(rows, dtype=torch.int64, device=place())
        if draw is not None:
            tokens.random_(0, vocabulary, generator=draw)
        weight = torch.full((rows,), 1 / rows, device=place())
        return Problem(hidden, head, teacher, teacher_head, tokens, weight)

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """States and head that get gradients."""
        return self.hidden.detach().requires_grad_(), self.head.detach().requires_grad_()


def chunks(problem: Problem, kind: str, chunk: int) -> Callable[[], Result]:
    """This project's loss."""
    loss = OutputLoss(kind, k=16 if kind == "top_k" else None)
    teacher: Teacher = TeacherStates(problem.teacher, OutputHead(problem.teacher_head))
    if kind == "sampled_token":
        teacher = torch.zeros(len(problem.hidden), device=place())
    vocabulary = len(problem.head)
    shard = VocabShard(0, vocabulary, vocabulary, None)
    gradient = torch.zeros(problem.head.shape, device=place())  # Megatron's, which is there anyway

    def run() -> Result:
        gradient.zero_()
        found = chunked_output_loss(
            loss, problem.hidden, problem.head, teacher, problem.tokens, problem.weight, shard,
            chunk_tokens=chunk, head_grad=gradient,
        )  # fmt: skip
        return found.sums.loss, found.hidden, gradient

    return run


def whole_logits(problem: Problem, *, sampled: bool) -> Callable[[], Result]:
    """Plain autograd through float32 logits of all rows."""

    def run() -> Result:
        hidden, head = problem.leaves()
        with torch.no_grad():
            log_q = (problem.teacher @ problem.teacher_head.T).float().log_softmax(-1)
        log_p = (hidden @ head.T).float().log_softmax(-1)
        if sampled:
            log_p, log_q = (x.gather(1, problem.tokens[:, None])[:, 0] for x in (log_p, log_q))
            loss = (log_p * (log_p - log_q).detach() * problem.weight).sum()
        else:
            loss = ((log_p.exp() * (log_p - log_q)).sum(-1) * problem.weight).sum()
        loss.backward()
        return _result(loss, hidden, head)

    return run


def _result(loss: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor) -> Result:
    assert hidden.grad is not None and head.grad is not None
    return loss.detach(), hidden.grad, head.grad


def liger(problem: Problem) -> Callable[[], Result]:
    """Liger's fused linear JSD; its beta = 1 is the reverse KL.

    Raises:
        ImportError: Liger is not installed.
    """
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    fused = LigerFusedLinearJSD(jsd_beta=1.0)

    def run() -> Result:
        hidden, head = problem.leaves()
        loss = fused(hidden, head, problem.teacher, problem.teacher_head, None)
        loss.backward()
        return _result(loss, hidden, head)

    return run


def trl(problem: Problem) -> Callable[[], Result]:
    """TRL's chunked divergence.

    Raises:
        ImportError: TRL is not installed, or has no such kernel.
    """
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def run() -> Result:
        hidden, head = problem.leaves()
        divergence, _ = ChunkedDivergenceFunction.apply(
            hidden, head, None, problem.teacher, problem.teacher_head, None, 1.0, 1.0
        )
        loss = (divergence * problem.weight).sum()
        loss.backward()
        return _result(loss, hidden, head)

    return run


def head(settings: Settings, outcome: Outcome) -> None:
    """Milliseconds, delta-peak and gradients of each."""
    batch = QUICK if settings.quick else REAL
    problem = Problem.make(batch.response, batch.shape.hidden_size, batch.shape.vocab_size)
    chunk = 16 if settings.quick else 1024
    candidates: dict[str, Callable[[], Callable[[], Result]]] = {
        OURS: lambda: chunks(problem, "full_vocab", chunk),
        "chunks, top-16": lambda: chunks(problem, "top_k", chunk),
        "chunks, sampled token": lambda: chunks(problem, "sampled_token", chunk),
        "Liger, full vocabulary": lambda: liger(problem),
        "TRL, full vocabulary": lambda: trl(problem),
        "whole logits, sampled token": lambda: whole_logits(problem, sampled=True),
        WHOLE: lambda: whole_logits(problem, sampled=False),
    }
    kept: dict[str, Result] = {}
    for name, make in candidates.items():
        try:
            run = make()
            kernel_only = name.startswith(("Liger", "TRL")) and not is_cuda()
            if kernel_only:
                outcome.row(name, note="needs a GPU")
                continue
            found = measured(run, passes=1 if settings.quick or settings.rehearsed else 3)
        except ImportError:
            outcome.row(name, note="not installed")
            continue
        except torch.OutOfMemoryError as error:
            outcome.row(name, note=f"does not fit: {str(error).partition('.')[0]}")
            torch.cuda.empty_cache()
            continue
        outcome.row(name, seconds=None if settings.rehearsed else found.seconds, delta=found.delta)
        if "full vocabulary" in name and not settings.rehearsed:
            kept[name] = tuple(tensor.detach().to("cpu", torch.float32) for tensor in run())  # type: ignore[assignment]
    if not settings.rehearsed:
        compare(outcome, kept)


def compare(outcome: Outcome, kept: dict[str, Result]) -> None:
    """Gradients beside those of this project; ours must agree with those of whole logits."""
    if OURS not in kept:
        return
    loss, *ours = kept[OURS]
    agreement: dict[str, Any] = {}
    for name, (other_loss, *others) in kept.items():
        if name != OURS:
            gaps = [float((a - b).norm() / b.norm()) for a, b in zip(ours, others, strict=True)]
            agreement[name] = {"loss": float(other_loss), "hidden": gaps[0], "head": gaps[1]}
            outcome.lines.append(
                f"{name}: loss {float(other_loss):.5f}, ours {float(loss):.5f}; gradients of states and head differ by "
                f"{gaps[0]:.1e} and {gaps[1]:.1e}"
            )
    outcome.numbers["agreement"] = agreement
    for what in ("hidden", "head"):
        gap = agreement[WHOLE][what] if WHOLE in agreement else 0.0
        outcome.require(gap <= LIMIT, f"the gradient of {what} deviates by {gap:.1e} from whole logits (limit {LIMIT})")
