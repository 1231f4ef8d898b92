"""Keeps secrets out of a configuration, which is saved with the run."""

from __future__ import annotations

import os
import re
from typing import Any

# Names of keys and of environment variables that hold secrets, and what the keys of Hugging Face and W&B look like. A
# W&B key must be the whole value: directories of a Hugging Face cache have commit hashes in their names.
SECRET_KEY = re.compile(r"(api_?key|(access|auth|hf)_?token|(^|\.)token|secret|passw(or)?d|credentials?)$", re.I)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{30,}|^[0-9a-f]{40}$")
# shorter values of environment variables (an empty or a dummy one) would be found in harmless text
_SECRET_LENGTH = 8


def refuse_secrets(value: Any, key: str) -> None:
    """Raises ValueError, without the value in its message, where a secret would be saved in config.yaml.

    A secret gets into a configuration e.g. by `${oc.env:HF_TOKEN}`.
    """
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            refuse_secrets(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str):
        secrets = [
            n for n, v in os.environ.items() if _SECRET_VARIABLE.search(n) and len(v) >= _SECRET_LENGTH and v in value
        ]
        if secrets or _SECRET_VALUE.search(value):
            what = f"the value of the environment variable {secrets[0]}" if secrets else "what looks like an access key"
            raise ValueError(
                f"{key} holds {what} (not shown); expected no secrets, because the configuration is saved with the "
                "run: remove it, programs read it from the environment"
            )
