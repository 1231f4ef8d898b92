"""How a vLLM server of a student is started and recognised, where the student is inside of a larger model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from family_configs import QWEN3

from nemo_oprd.config.loading import load_config
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.architecture import DeltaNet
from nemo_oprd.models.rope import Rope
from nemo_oprd.vllm.launch import check_student_description, student_arguments

SPEC = parse_model_spec(QWEN3)
KNOWN = TokenIds(300, ((7, 9),))
# the RoPE of Qwen3.5, whose settings are also those of pictures
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("qwen3_5", "Qwen3_5ForCausalLM"), ("qwen3_5_moe", "Qwen3_5MoeForCausalLM"), ("qwen3", None)],
)
def test_a_server_has_the_language_model_alone(tmp_path: Path, model_type: str, architecture: str | None) -> None:
    """Its weights come by the names of the language model, which the whole model would not know."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    arguments = student_arguments(load_config("oprd_1p5b", ["precision=fp32"]), SPEC, tmp_path, KNOWN, cuda=True)
    (masked,) = (json.loads(after) for flag, after in itertools.pairwise(arguments) if flag == "--additional-config")
    assert masked == {"nemo_oprd_known_ids": 300, "nemo_oprd_gaps": [[7, 9]]}
    given = [json.loads(after) for flag, after in itertools.pairwise(arguments) if flag == "--hf-overrides"]
    assert given == ([] if architecture is None else [{"architectures": [architecture]}])


def test_a_rope_for_pictures_is_that_of_text() -> None:
    hybrid = replace(
        SPEC,
        rope=Rope(1e7, "default", 0.25),
        delta=DeltaNet((True,) * SPEC.num_layers, 2, 4, 8, 8, 4),
        head_dim=256,
    )
    config = load_config("oprd_1p5b", ["precision=fp32"])
    found: dict[str, Any] = {
        "hidden_size": SPEC.hidden_size,
        "intermediate_size": SPEC.ffn_size,
        "num_hidden_layers": SPEC.num_layers,
        "num_attention_heads": SPEC.num_heads,
        "num_key_value_heads": SPEC.num_kv_heads,
        "tie_word_embeddings": SPEC.tied_embeddings,
        "rope_parameters": ROPE,
        "experts": None,
        "model_type": SPEC.model_type,
        "vocab_size": SPEC.vocab_size,
        "known_ids": 300,
        "dtype": "float32",
        "logprobs_mode": "processed_logprobs",
        "workers": 1,
    }
    check_student_description(found, "it", config, hybrid, TokenIds(300))
    with pytest.raises(ValueError, match=r"gaps=\[\] instead of \[\[7, 9\]\]"):
        check_student_description(found, "it", config, hybrid, KNOWN)
    check_student_description(found | {"gaps": [[7, 9]]}, "it", config, hybrid, KNOWN)
    with pytest.raises(ValueError, match="rope="):
        check_student_description(
            found | {"rope_parameters": {**ROPE, "rope_theta": 1e6}}, "it", config, hybrid, TokenIds(300)
        )
    with pytest.raises(ValueError, match="rope="):
        check_student_description(found, "it", config, replace(hybrid, delta=None), TokenIds(300))
