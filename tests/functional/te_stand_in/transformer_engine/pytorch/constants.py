"""The one constant among the defaults of the attention's interface."""

import enum


class CPLoadBalancingStrategy(enum.Enum):
    """How context ranks share a sequence; Transformer Engine 2.11 has the first way only, without a name."""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"
