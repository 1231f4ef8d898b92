"""What workers run for test_adopt.py: what `adopt` and `HiddenStateDistillation` refuse."""

from __future__ import annotations

from typing import Any

import torch
from stock_models import GOLDEN, megatron_groups, stock_model

from nemo_oprd.batch.layout import Layout


def refusal(what: str, name: str = "student", trained: bool = True, **changes: Any) -> str:
    """The message with which something is refused; "" if it is not.

    Args:
        what: the name of a function `_refuse_*` below.
        changes: attributes of the built model's config.
    """
    with megatron_groups(Layout()):
        (model,) = stock_model(name, Layout(), rotary_base=10000 if what == "rope_base" else 50000)
        model.requires_grad_(trained)
        for key, value in changes.items():
            setattr(model.config, key, value)
        before = [type(layer) for layer in model.decoder.layers]
        try:
            globals()[f"_refuse_{what}"](model)
        except ValueError as error:
            if what.startswith(("adopt", "layer", "rope")):
                assert [type(layer) for layer in model.decoder.layers][:1] == before[:1], "changed before it is refused"
            return str(error)
    return ""


def _refuse_adopt(model: Any) -> None:
    from nemo_oprd.integrations.hidden_states import adopt

    adopt([model])


def _refuse_adopt_module(model: Any) -> None:
    from nemo_oprd.integrations.hidden_states import adopt

    adopt(model)


def _refuse_adopt_other_model(model: Any) -> None:
    from nemo_oprd.integrations.hidden_states import adopt

    adopt([model.output_layer])


def _refuse_adopt_own_model(model: Any) -> None:
    from nemo_oprd.integrations.hidden_states import adopt
    from nemo_oprd.megatron.model import build_chunks
    from nemo_oprd.megatron.parallel import make_role
    from nemo_oprd.models import read_model_spec

    adopt(build_chunks(read_model_spec(GOLDEN / "student"), make_role("student", Layout()), torch.float32))


def _refuse_layer(model: Any) -> None:
    from nemo_oprd.integrations.hidden_states import adopt

    model.decoder.layers[1] = torch.nn.Identity()
    adopt([model])


def _refuse_rope_base(model: Any) -> None:
    from nemo_oprd.integrations.hidden_states import adopt

    adopt([model], hf_config=GOLDEN / "student")


def _refuse_rope_scaling(model: Any) -> None:
    import json

    from nemo_oprd.integrations.hidden_states import adopt
    from nemo_oprd.megatron.refusals import check_rope

    hf_config = json.loads((GOLDEN / "student" / "config.json").read_text())
    check_rope(model, hf_config)  # equal as it is
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    hf_config |= {"model_type": "llama", "rope_scaling": {**scaling, "original_max_position_embeddings": 16}}
    adopt([model], hf_config=hf_config)


def _refuse_rope_position_embedding(model: Any) -> None:
    from nemo_oprd.integrations.hidden_states import adopt

    del model.rotary_pos_emb
    model.position_embedding_type = "learned_absolute"
    adopt([model], hf_config=GOLDEN / "student")


def _refuse_schedule_plan(model: Any) -> None:
    from nemo_oprd.integrations.hidden_states import adopt

    adopt([model])
    model.build_schedule_plan(torch.zeros(1, 4), None, None)


def _refuse_unadopted(model: Any) -> None:
    from nemo_oprd.integrations.hidden_states import HiddenStateDistillation

    HiddenStateDistillation([model], [model])


def _distillation(model: Any, **loss: Any) -> Any:
    from nemo_oprd.integrations.hidden_states import HiddenStateDistillation, RepresentationLossConfig, adopt

    (teacher,) = stock_model("teacher", Layout())
    teacher.requires_grad_(False)
    return HiddenStateDistillation(adopt([model]), adopt([teacher]), RepresentationLossConfig(**loss))


def _refuse_schedule(model: Any) -> None:
    from nemo_oprd.config.weight_schedule import WeightStage

    _distillation(model, weight=[WeightStage(1.0)])


def _refuse_width(model: Any) -> None:
    model.config.hidden_size = 48
    _distillation(model)


def _refuse_loss_scale(model: Any) -> None:
    model.config.grad_scale_func = lambda loss: 128.0 * loss
    _distillation(model).losses(torch.ones(1, 4), {})


def _refuse_missing_states(model: Any) -> None:
    _distillation(model).losses(torch.ones(1, 4), {})


def _refuse_other_states(model: Any) -> None:
    _distillation(model).losses(torch.ones(1, 4), dict.fromkeys((1, 2, 3), torch.zeros(3, 32)))


def _refuse_weight_shape(model: Any) -> None:
    _distillation(model).capture(torch.ones(4))


def _refuse_empty_update(model: Any) -> None:
    _distillation(model).finish()


def rescaled_by_ddp(**ddp: Any) -> None:
    """A model whose DDP rescales or averages gradients; its config says by now that it does not."""
    from stock_models import wrapped

    from nemo_oprd.integrations.hidden_states import adopt

    layout = Layout(data=2)
    with megatron_groups(layout):
        (model,) = stock_model("student", layout)
        model.config.calculate_per_token_loss = False
        (chunk,) = wrapped([model], **ddp)
        model.config.calculate_per_token_loss = True
        adopt([chunk])


def target_on_another_stage() -> None:
    """A teacher whose layers are split over two stages in another way than the student's."""
    from nemo_oprd.integrations.hidden_states import HiddenStateDistillation, adopt

    layout = Layout(pipeline=2)
    with megatron_groups(layout):
        student = stock_model("student", layout)
        teacher = stock_model("teacher", layout, num_layers_in_first_pipeline_stage=1)
        HiddenStateDistillation(adopt(student), adopt(teacher))


def build_local(layout: dict[str, Any]) -> None:
    """Builds a stock model of local layers."""
    with megatron_groups(Layout(**layout)):
        stock_model("student", Layout(**layout))
