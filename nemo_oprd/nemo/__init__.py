"""On-policy representation distillation in models and training loops that another program has built.

`adopt` makes the layers of stock Megatron-core models pass their outputs to an observer, `observed` attaches a
microbatch's observer to its `packed_seq_params`, and `HiddenStateDistillation` makes the observers. docs/nemo.md and
`examples/adopt_in_your_script.py` show how the parts fit together.
"""

from nemo_oprd.config.loss_schema import RepresentationLossConfig
from nemo_oprd.models.megatron.adopt import adopt, observed
from nemo_oprd.models.megatron.pipeline_schedule import zero_loss
from nemo_oprd.nemo.hidden_states import HiddenStateDistillation, row_weights

__all__ = ["HiddenStateDistillation", "RepresentationLossConfig", "adopt", "observed", "row_weights", "zero_loss"]
