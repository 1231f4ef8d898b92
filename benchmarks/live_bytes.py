"""Counts the live bytes at the peak of an output-space loss: chunked, and with whole logits by autograd.

    python -m benchmarks.live_bytes

The figures are exact and the same on every machine (`LiveBytes`).
"""

from __future__ import annotations

import argparse

import torch

from tests.support.live_bytes import LiveBytes

ROWS, WIDTH, CHUNK = 512, 32, 64
VOCABULARIES = (4096, 16384, 65536, 151936)
KINDS = ("full_vocab", "top_k", "jsd", "sampled_token")


def chunked(kind: str, vocabulary: int) -> int:
    """Peak bytes of loss and gradients for `ROWS` rows, `CHUNK` at a time, in addition to the gradients themselves."""
    from nemo_oprd.losses.chunked import Teacher, TeacherStates, chunked_output_loss
    from nemo_oprd.losses.output_loss import OutputLoss
    from nemo_oprd.losses.vocab_parallel import OutputHead, VocabShard

    hidden, head, teacher_hidden, teacher_head, tokens = _problem(vocabulary)
    gradient = torch.zeros_like(head)
    teacher: Teacher = TeacherStates(teacher_hidden, OutputHead(teacher_head))
    if kind == "sampled_token":
        teacher = torch.zeros(ROWS)
    shard = VocabShard(0, vocabulary, vocabulary, None)
    loss, weight = OutputLoss(kind, None if kind == "sampled_token" else 16), torch.full((ROWS,), 1 / ROWS)  # type: ignore[arg-type]
    with LiveBytes() as counter:
        chunked_output_loss(loss, hidden, head, teacher, tokens, weight, shard, chunk_tokens=CHUNK, head_grad=gradient)
    return counter.peak - hidden.nbytes


def whole(vocabulary: int) -> int:
    """The same for full-vocabulary reverse KL on whole logits, with `loss.backward()`."""
    hidden, head, teacher_hidden, teacher_head, _ = _problem(vocabulary)
    for tensor in (hidden, head):
        tensor.requires_grad_(True)
    with LiveBytes() as counter:
        with torch.no_grad():
            log_q = (teacher_hidden @ teacher_head.T).log_softmax(-1)
        log_p = (hidden @ head.T).log_softmax(-1)
        (log_p.exp() * (log_p - log_q)).sum(-1).mean().backward()
    return counter.peak - hidden.nbytes - head.nbytes


def _problem(vocabulary: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = (torch.randn(ROWS, WIDTH, generator=draw) for _ in range(2))
    head, teacher_head = (torch.randn(vocabulary, WIDTH, generator=draw) * 0.1 for _ in range(2))
    return hidden, head, teacher_hidden, teacher_head, torch.randint(0, vocabulary, (ROWS,), generator=draw)


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(
        f"MB at the peak, {ROWS} rows, chunks of {CHUNK}, float32; in brackets: number of [chunk, vocabulary] tensors"
    )
    print("| vocabulary | one chunk's logits | " + " | ".join(KINDS) + " | whole logits, full_vocab |")
    print("|---" * (len(KINDS) + 3) + "|")
    for vocabulary in VOCABULARIES:
        one = 4 * CHUNK * vocabulary
        found = [*(chunked(kind, vocabulary) for kind in KINDS), whole(vocabulary)]
        cells = [f"{count / 1e6:.1f} ({count / one:.2f})" for count in found]
        print(f"| {vocabulary:,} | {one / 1e6:.1f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
