"""The LM head of a model that vLLM servers compute, from its files: families call it by different names."""

from __future__ import annotations

import torch

from nemo_oprd.models import ModelSpec
from nemo_oprd.models.complete_config import text_config
from nemo_oprd.models.weights.hf import HFCheckpoint

_HEADS = ("lm_head.weight", "embed_out.weight")
# keys of a config.json by which a family changes logits after its head, and the value that changes nothing
_CHANGES = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "mup_width_multiplier": 1.0,
}
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
        """The head; errors as of `find`."""
        return self._checkpoint[self.find()]

    def find(self) -> str:
        """The name of the head in the files. A tied one is the only matrix of ids, or the one that is no head.

        Raises:
            ValueError: which tensor it is can't be told, or logits are not the product with it.
        """
        checkpoint, spec = self._checkpoint, self._spec
        names, shape = checkpoint.keys(), (spec.vocab_size, spec.hidden_size)
        text = text_config(spec.hf_config)
        changes = [f"{key}={text[key]}" for key, same in _CHANGES.items() if text.get(key) not in (None, same)]
        changes += [name for name in names if name.endswith(_BIASES)]
        if changes:
            raise ValueError(
                f"{checkpoint.path}: {', '.join(changes)} changes the logits of a teacher with teacher.engine=vllm, "
                f"which the trainer would compute as a product with its head alone; expected none: {_INSTEAD}"
            )
        found = [name for name in names if checkpoint.stored_shape(name) == shape]
        heads = [name for name in found if name.endswith(_HEADS)]
        chosen = heads if heads and not spec.tied_embeddings else [name for name in found if name not in heads]
        if len(chosen) != 1:
            raise ValueError(
                f"{checkpoint.path}: {len(chosen)} tensors of shape {list(shape)} may be the teacher's LM head "
                f"({', '.join(chosen) or 'none'}); expected one: {_INSTEAD}"
            )
        return chosen[0]
