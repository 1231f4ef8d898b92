"""A real vLLM server as a teacher, against transformers in float32: `python vllm_teacher.py FAMILY TENSOR DIRECTORY`.

Writes results.json into DIRECTORY: the largest relative deviation of a row by layer, and what bad asks and deaths do.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.loading import load_config
from nemo_oprd.megatron.parallel import init_distributed
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.vllm.server_lifecycle import LocalServer
from nemo_oprd.vllm.teacher_canary import Canary
from nemo_oprd.vllm.teacher_requests import TeacherAnswer, TeacherRequest
from nemo_oprd.vllm.teacher_servers import TeacherServers
from nemo_oprd.vllm.worker import nemo_oprd_guard as guard
from nemo_oprd.vllm.worker.nemo_oprd_answers import GENERATE
from nemo_oprd.vllm.worker.nemo_oprd_requests import STATE_REQUEST, StateRequest

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.06, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HEADS = {"head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": HEADS,
    "llama": HEADS,
    "mistral": {**HEADS, "sliding_window": 64},
    "gemma2": {**HEADS, "sliding_window": 64, "query_pre_attn_scalar": 32},
    "gemma3_text": {
        **HEADS, "num_hidden_layers": 7, "sliding_window": 64, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32,
        "final_logit_softcapping": 5.0,
    },
    "gpt_oss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    "qwen3_moe": {
        **HEADS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    },
    "mixtral": {**HEADS, "num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {"sliding_window": 64},
    "stablelm": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.5},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0, "topk_method": "noaux_tc",
    },
    "olmo2": {},
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    "glm4": {**HEADS, "partial_rotary_factor": 0.5},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"original_max_position_embeddings": 1024},
    "gpt2": {"n_embd": 128, "n_layer": 5, "n_head": 4, "n_positions": 1024},
    "falcon_h1": {**HEADS, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1,
                  "mamba_d_state": 16},
}  # fmt: skip
LENGTHS = (7, 33, 300, 64, 129, 1, 18)


def make_model(family: str, directory: Path, **sizes: Any) -> Any:
    """A random model in float32, saved in `directory`; biases and norms are random, too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **sizes})
    config.dtype = "float32"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def expected_states(model: Any, ids: list[int]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """(By layer as servers number them, the states [tokens, D]; the logits [tokens, V])."""
    found: dict[int, torch.Tensor] = {}
    base = model.base_model
    layers = base.layers if hasattr(base, "layers") else base.h
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, n=n: found.update({n: (out[0] if isinstance(out, tuple) else out)[0]})
        )
        for n, layer in enumerate(layers, 1)
    ]
    out = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    found[len(layers) + 1] = out.hidden_states[-1][0]
    return found, out.logits[0]


def name_of(number: int) -> str:
    """A name for an answer."""
    return f"{number:032x}"


def all_answers(servers: TeacherServers, requests: list[TeacherRequest]) -> list[TeacherAnswer]:
    """The answers in the order of requests."""
    found: dict[int, TeacherAnswer] = {}
    servers.gather(requests, found.__setitem__)
    return [found[i] for i in range(len(requests))]


def worst_rows(answers: list[TeacherAnswer], requests: list[TeacherRequest], expected: list[dict]) -> dict[int, float]:
    """By layer, the largest relative deviation of a row."""
    worst: dict[int, float] = {}
    for answer, request, states in zip(answers, requests, expected, strict=True):
        for at, layer in enumerate(request.state_request.layers):
            theirs = states[layer][request.state_request.rows].double()
            off = (answer.states[at].double() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
            worst[layer] = max(worst.get(layer, 0.0), float(off.max()))
    return worst


def bad_asks(servers: TeacherServers, folder: Path) -> dict[str, Any]:
    """What the server does with asks that no trainer sends: nothing is written, and it goes on."""
    (server,), client = servers._servers.values(), servers._client
    assert client is not None
    (folder / name_of(9)).symlink_to(folder.parent / "elsewhere")
    good: dict[str, Any] = {"name": name_of(8), "layers": [1], "rows": [0], "final_rows": []}
    changes = [
        {"name": "../" + name_of(8)[3:]}, {"name": "/dev/shm/" + name_of(8)[9:]}, {"name": name_of(9)},
        {"rows": [1, 0]}, {"rows": [3]}, {"layers": [0]}, {"layers": [99]}, {"layers": "1"}, {"tokens": [5]},
    ]  # fmt: skip
    before, statuses = sorted(os.listdir(folder)), []
    for change in changes:
        text = json.dumps({**json.loads(StateRequest(**{**good, **change}).text())})
        sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "extra_args": {STATE_REQUEST: text}}
        body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
        answer = client.run(client.post(server, GENERATE, body, timeout=60))
        statuses.append(len(answer["choices"]))
    after = sorted(os.listdir(folder))
    (folder / name_of(9)).unlink()
    healthy = client.run(client.is_healthy(server))
    outside = (folder.parent / "elsewhere").exists()
    return {"answered": statuses, "same_files": before == after, "healthy": healthy, "outside": outside}


def killed(servers: TeacherServers, requests: list[TeacherRequest], first: list[TeacherAnswer]) -> dict[str, Any]:
    """A worker of the server is killed while it computes: the same answers, bit by bit, and nothing is left."""
    (server,) = servers._servers.values()
    assert isinstance(server, LocalServer) and server._process is not None and servers._fleet.folder is not None
    group = server._process.pid
    worker = max(guard.group_members(group))

    async def kill() -> None:
        await asyncio.sleep(0.05)
        os.kill(worker, signal.SIGKILL)

    assert servers._client is not None
    servers._client.start(kill())
    many = [
        replace(request, state_request=replace(request.state_request, name=name_of(1000 + i)))
        for i, request in enumerate(requests)
    ]
    start = time.monotonic()
    again = all_answers(servers, many)
    equal = [torch.equal(a.states, b.states) and torch.equal(a.final, b.final)
             for a, b in zip(again, [*first] * (len(many) // len(first)), strict=True)]  # fmt: skip
    left = [name for name in os.listdir(servers._fleet.folder.path) if not name.startswith(("server", "_"))]
    left = [name for name in left if len(name.removesuffix(".part")) == 32 and "-" not in name]
    return {"equal": all(equal), "deaths": servers._fleet.deaths, "left": left, "seconds": time.monotonic() - start,
            "generation": server.generation}  # fmt: skip


def main() -> None:
    """See the module's docstring."""
    family, tensor, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    model = make_model(family, directory / "model")
    init_distributed()
    settings = [
        "student.hf_path=a", f"teacher.hf_path={directory / 'model'}", "teacher.engine=vllm", "precision=fp32",
        f"teacher.vllm.tensor={tensor}", f"output={directory}",
        "teacher.vllm.flags=[--max-num-batched-tokens,128]",  # so that prompts are computed in chunks
    ]  # fmt: skip
    config, spec = load_config("verify", settings), read_served_spec(directory / "model")
    results: dict[str, Any] = {}
    servers = TeacherServers(config, 0, Canary(spec, directory / "model", "float32", None), Layout())
    try:
        start = time.monotonic()
        draw = torch.Generator().manual_seed(5)
        prompts = [torch.randint(3, 512, (n,), generator=draw).tolist() for n in LENGTHS]
        both = [expected_states(model, ids) for ids in prompts]
        depth = spec.num_layers
        layers = [*range(1, depth + 2)]
        requests = [
            TeacherRequest(
                ids,
                StateRequest(name_of(i), layers, [*range(len(ids) // 3, len(ids))], [*range(len(ids) // 2, len(ids))]),
            )
            for i, ids in enumerate(prompts)
        ]
        servers.wait()
        results["ready_s"] = time.monotonic() - start
        answers = all_answers(servers, requests)
        results["worst"] = worst_rows(answers, requests, [states for states, _ in both])
        finals = [bool(torch.equal(a.final, a.states[-1][-a.final.shape[0] :])) for a in answers]
        results["final_is_last"] = all(finals)
        drawn = [
            replace(
                r,
                state_request=replace(
                    r.state_request,
                    name=name_of(100 + i),
                    tokens=[r.ids[0]] * len(r.state_request.final_rows),
                    vocabulary=500,
                    temperature=0.7,
                    chunk=16,
                ),
            )
            for i, r in enumerate(requests)
        ]
        gaps = []
        for answer, request, (_, logits) in zip(all_answers(servers, drawn), drawn, both, strict=True):
            logprobs = (logits[request.state_request.final_rows, :500].double() / 0.7).log_softmax(-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            theirs = torch.stack([logprobs[:, request.ids[0]], entropy], dim=1)
            gaps.append(float((answer.final.double() - theirs).abs().max()))
        results["logprob_gap"] = max(gaps)
        shared = servers._fleet.folder
        assert shared is not None
        results["bad"] = bad_asks(servers, shared.path)
        if "kill" in sys.argv:
            results["killed"] = killed(servers, requests * 20, answers)
    finally:
        servers.close()
        (directory / "results.json").write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
