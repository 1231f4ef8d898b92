"""The LM head of a model that vLLM servers compute, from its files: families call it by different names."""

from __future__ import annotations

import torch

from nemo_oprd.models import ModelSpec
from nemo_oprd.models.weights.hf import HFCheckpoint, finite

_HEADS = ("lm_head.weight", "embed_out.weight")
_BIASES = ("lm_head.bias", "embed_out.bias")
_INSTEAD = (
    "take loss.output.kind=sampled_token, for which the servers apply the head, and logging.output_metrics_every=0"
)


class ServedHead:
    """Reads the head [V, D], by whichever name it is asked for; a `TensorReader`."""

    def __init__(self, checkpoint: HFCheckpoint, spec: ModelSpec) -> None:
        """Opens nothing: only what is trained on the teacher's distribution reads its head."""
        self._checkpoint, self._spec = checkpoint, spec

    def __call__(self, name: str) -> torch.Tensor:
        """The head. Raises ValueError as `find`, or if the head holds NaN or infinite values."""
        return self._finite(self.find())

    def bias(self) -> torch.Tensor | None:
        """What the head adds to logits [V]; None if the files have no such tensor."""
        checkpoint, shape = self._checkpoint, (self._spec.vocab_size,)
        names = checkpoint.keys()
        found = [name for name in names if name.endswith(_BIASES) and checkpoint.stored_shape(name) == shape]
        return self._finite(found[0]) if found else None

    def _finite(self, name: str) -> torch.Tensor:
        return finite(self._checkpoint.__getitem__, self._checkpoint.path)(name)

    def find(self) -> str:
        """The name of the head in the files. A tied one is the only matrix of ids, or the one that is no head.

        Raises:
            ValueError: which tensor it is can't be told.
        """
        checkpoint, spec = self._checkpoint, self._spec
        shape = (spec.vocab_size, spec.hidden_size)
        names = checkpoint.keys()
        found = [name for name in names if checkpoint.stored_shape(name) == shape]
        heads = [name for name in found if name.endswith(_HEADS)]
        chosen = heads if heads and not spec.tied_embeddings else [name for name in found if name not in heads]
        if len(chosen) != 1:
            raise ValueError(
                f"{checkpoint.path}: {len(chosen)} tensors of shape {list(shape)} may be the teacher's LM head "
                f"({', '.join(chosen) or 'none'}); expected one: {_INSTEAD}"
            )
        return chosen[0]
