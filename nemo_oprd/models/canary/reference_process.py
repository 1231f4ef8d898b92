"""The process that computes transformers' states: `python -m nemo_oprd.models.canary.reference_process FOLDER`.

It reads what is asked as JSON from stdin, and writes the states and a report into the folder. An error that a user can
understand becomes the report, as one line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from nemo_oprd.models.canary.layer_by_layer import layered_states
from nemo_oprd.models.canary.reference import REPORT, STATES


def main() -> None:
    """See the module."""
    folder, asked = Path(sys.argv[1]), json.load(sys.stdin)
    try:
        states = layered_states(Path(asked["directory"]), asked["prompts"], asked["dtype"], head=asked["head"])
    except (ValueError, OSError, ImportError, KeyError, NotImplementedError, AttributeError) as error:
        first = " ".join(str(error).split())[:400]
        text = f"{asked['directory']}: transformers cannot compute the canary ({type(error).__name__}: {first}); "
        text += "expected a model that transformers runs from safetensors without code of its own"
        report: dict[str, int | str] = {"error": text}
    else:
        save_file(states.tensors(), folder / STATES)
        names = ("dtype", "peak_bytes", "largest_layer_bytes", "total_bytes")
        report = {name: getattr(states, name) for name in names}
    (folder / REPORT).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
