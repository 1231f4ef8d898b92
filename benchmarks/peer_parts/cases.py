"""The batches of `benchmarks.peers` and the settings that all products share. Imports neither torch nor the project."""

from __future__ import annotations

from dataclasses import dataclass, replace

OURS = "nemo_oprd"
TRL, PLAIN = "trl", "plain"
ONE_BY_ONE, PAPER, ROWS = "plain_one_by_one", "plain_paper", "plain_rows"
# product -> its name in the table
PRODUCTS = {
    OURS: "this project",
    TRL: "TRL",
    PLAIN: "plain loop",
    ONE_BY_ONE: "plain loop, one by one",
    PAPER: "plain loop, the paper's way",
    ROWS: "plain loop, head on responses only",
}

# of every product's optimizer: AdamW, matrices decayed, one norm of all gradients clipped
RATE, CLIP, WEIGHT_DECAY, BETAS, EPS = 1e-5, 1.0, 0.01, (0.9, 0.999), 1e-8

# name -> (fields of `tests.support.random_pair.Shape`, model type, tied embeddings)
SHAPES: dict[str, tuple[tuple[int, ...], str, bool]] = {
    "qwen2": ((8, 512, 1408, 8, 2, 32768, 2048), "qwen2", False),
    "smollm2": ((30, 576, 1536, 9, 3, 49152, 8192), "llama", True),  # SmolLM2-135M
    "tiny": ((2, 64, 128, 4, 2, 256, 256), "qwen2", False),
    "tiny_tied": ((3, 48, 96, 3, 1, 384, 256), "llama", True),
}
TINY = {"qwen2": "tiny", "smollm2": "tiny_tied"}
PROMPT = 16  # tokens


@dataclass(frozen=True)
class Case:
    """One batch, with what is computed on it and by whom.

    Attributes:
        task: `full_vocab`, `mse`, `top_16`, `sampled_token` or `sampling`.
        batch: what the table calls the batch.
        responses: the responses' lengths; for `sampling` the tokens that are sampled.
        peers: the products that compute it, beside this project.
        shape: of student and teacher.
        last_k: only so many last tokens of a response are supervised; None: all.
        ranks: data-parallel processes.
        start: whether its processes also give the rows of the start.
    """

    task: str
    batch: str
    responses: tuple[int, ...]
    peers: tuple[str, ...]
    shape: str = "qwen2"
    last_k: int | None = None
    ranks: int = 1
    start: bool = False

    @property
    def products(self) -> tuple[str, ...]:
        """This project and its peers."""
        return (OURS, *self.peers)


def spread_lengths(count: int, least: int = 256, most: int = 512) -> tuple[int, ...]:
    """`count` lengths from `least` to `most`, evenly spread."""
    return tuple(round(least + (most - least) * i / (count - 1)) for i in range(count))


EIGHT, FOUR, TWO, MIXED = spread_lengths(8), spread_lengths(4), (256, 256), (1000, *[60] * 7)
CASES = (
    Case("full_vocab", "8 x 256-512", EIGHT, (TRL, PLAIN)),
    Case("full_vocab", "4 x 256-512", FOUR, (TRL, PLAIN)),
    Case("full_vocab", "2 x 256", TWO, (TRL, PLAIN), start=True),
    Case("mse", "4 x 256-512", FOUR, (PLAIN, PAPER)),
    Case("mse", "2 x 256", TWO, (PLAIN,)),
    Case("mse", "1 x 1,000 + 7 x 60", MIXED, (PLAIN, ONE_BY_ONE)),
    Case("top_16", "4 x 256-512", FOUR, (PLAIN,)),
    Case("full_vocab", "SmolLM2-135M, 2 x 256", TWO, (TRL, PLAIN), shape="smollm2"),
    Case("mse", "SmolLM2-135M, 2 x 256", TWO, (PLAIN,), shape="smollm2"),
)
FULL = (
    Case("full_vocab", "2 x 512", (512, 512), (TRL, PLAIN)),
    Case("full_vocab", "2 x 1,024", (1024, 1024), (TRL, PLAIN)),
    Case("mse", "2 x 512", (512, 512), (PLAIN,)),
    Case("mse", "2 x 1,024", (1024, 1024), (PLAIN,)),
    Case("mse", "2 x 1,024, last 250", (1024, 1024), (PLAIN,), last_k=250),
    Case("sampled_token", "4 x 256-512", FOUR, (PLAIN,)),
    Case("full_vocab", "4 x 256-512, rows", FOUR, (ROWS,)),
    Case("full_vocab", "4 x 256-512, 2 ranks", FOUR, (TRL, PLAIN), ranks=2),
    Case("mse", "4 x 256-512, 2 ranks", FOUR, (PLAIN,), ranks=2),
    Case("sampling", "8 x 64", (64,) * 8, (PLAIN,)),
)


def tiny(case: Case) -> Case:
    """The same case for a test of the machinery: small models and a fifteenth of the tokens."""
    shorter = tuple(max(3, length // 15) for length in case.responses)
    last_k = None if case.last_k is None else case.last_k // 15
    return replace(case, responses=shorter, shape=TINY[case.shape], last_k=last_k)
