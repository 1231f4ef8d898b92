"""`OPRDActor`: `OPRDWorker` as a Ray actor, under the name that `OPRDPolicy` passes to NeMo-RL."""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker

from nemo_oprd.integrations.rl_worker import OPRDWorker


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class OPRDActor(OPRDWorker):
    """The Ray actor. Classes that Ray has decorated cannot be inherited from, so `OPRDWorker` has the methods."""
