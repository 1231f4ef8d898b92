"""`OPRDActor`: `OPRDWorker` as Ray's actor, by the name that `OPRDPolicy` gives to NeMo-RL."""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker

from nemo_oprd.integrations.rl_worker import OPRDWorker


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class OPRDActor(OPRDWorker):
    """Classes that Ray has decorated cannot be inherited from, so the methods are in `OPRDWorker`."""
