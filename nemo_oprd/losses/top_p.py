"""Log-probabilities in the distribution that responses are sampled from: a temperature, then the nucleus of top-p."""

from __future__ import annotations

import torch

from nemo_oprd.losses.chunked import chunked_logprob
from nemo_oprd.losses.vocab_parallel import VocabShard, compute_dtype, head_logits, leave_out_gaps_, log_softmax_

# rows whose whole distribution is on one rank at a time, which the nucleus needs
NUCLEUS_ROWS = 64


@torch.no_grad()
def sampling_logprob(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    tokens_N: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    top_p: float,
    chunk_tokens: int,
) -> torch.Tensor:
    """Log-probability [N] of each row's token, the same on every tensor-parallel rank; float32 (float64 for float64).

    At temperature 0, where sampling takes the most probable id, it is that of the distribution at temperature 1.

    Args:
        hidden_ND: the student's rows after the final norm, the same on every tensor-parallel rank.
        head_VD: this rank's shard [size, D] of the head.
        shard: the ids of the shard: those below its `vocab_size` without its `gaps` can be sampled.
        top_p: below 1, the distribution of the most probable ids whose probabilities reach `top_p`. A token outside is
            counted as one of them: rounding decides about the last one.
        chunk_tokens: rows of a chunk without a nucleus.
    """
    if temperature == 0 or top_p == 1:
        arguments = hidden_ND, head_VD, tokens_N, shard
        return chunked_logprob(*arguments, temperature=temperature or 1.0, chunk_tokens=chunk_tokens)[0]
    parts = [torch.zeros(0, dtype=compute_dtype(hidden_ND), device=hidden_ND.device)]
    for start in range(0, len(hidden_ND), NUCLEUS_ROWS):
        chunk = slice(start, start + NUCLEUS_ROWS)
        parts.append(_nucleus_logprob(hidden_ND[chunk], head_VD, tokens_N[chunk], shard, temperature, top_p))
    return torch.cat(parts)


def _nucleus_logprob(
    hidden_CD: torch.Tensor,
    head_VD: torch.Tensor,
    tokens_C: torch.Tensor,
    shard: VocabShard,
    temperature: float,
    top_p: float,
) -> torch.Tensor:
    logits_CV = leave_out_gaps_(head_logits(hidden_CD, head_VD, shard), shard)
    log_softmax_([logits_CV], shard, temperature)
    padded_CV = logits_CV.new_full((len(logits_CV), shard.size), -torch.inf)  # ranks must exchange equal shapes
    padded_CV[:, : shard.real] = logits_CV
    logprob_CV = shard.concatenated(padded_CV).double()
    logprob_C = logprob_CV.gather(1, tokens_C[:, None])[:, 0]
    ordered_CV = logprob_CV.exp().sort(dim=1, descending=True).values
    in_nucleus_CV = ordered_CV.cumsum(1) - ordered_CV < top_p
    mass_C = (ordered_CV * in_nucleus_CV).sum(1)
    least_C = ordered_CV.gather(1, in_nucleus_CV.sum(1, keepdim=True) - 1)[:, 0]
    mass_C += logprob_C.exp().masked_fill(logprob_C.exp() >= least_C, 0)
    return (logprob_C - mass_C.log()).to(logits_CV.dtype)
