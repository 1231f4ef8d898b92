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
# the part of an address before `@`, and an argument behind `?` whose name says what it is
_BEFORE_HOST = re.compile(r"[A-Za-z][\w+.-]*://[^/?#\s]*@")
_ARGUMENT = re.compile(r"([?&][\w-]*(?:key|token|secret|passw(?:or)?d|credentials?|auth)=)[^&#\s'\",\]]+", re.I)
# the former in a text; a password may hold any character but those that end the address
_QUOTED = re.compile(r"//[^\s'\"]*@")
# shorter values of environment variables (an empty or a dummy one) would be found in harmless text
_SECRET_LENGTH = 8


def without_secrets(message: str) -> str:
    """A message without the user names, passwords and tokens in the addresses that it quotes."""
    return _ARGUMENT.sub(r"\1***", _QUOTED.sub("//***@", message))


def refuse_secrets(value: Any, key: str) -> None:
    """Raises ValueError, without the value in its message, where a secret would be saved in config.yaml.

    A secret gets into a configuration e.g. by `${oc.env:HF_TOKEN}`, or with the address of a server. Names of the
    user's own, such as files in `data.train`, are looked at, too.
    """
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(name, str):
                refuse_secrets(name, f"a key of {key}" if key else "a key")
            refuse_secrets(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str) and _is_address_with_secret(value):
        raise ValueError(
            f"{key} holds an address with a user name, a password or a token (not shown); expected an address alone, "
            "because the configuration is saved with the run: leave it out; the token of a server is in the file that "
            "rollout.vllm.token_file or teacher.vllm.token_file names (docs/security.md)"
        )
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


def _is_address_with_secret(value: str) -> bool:
    # a password with a slash, which no address may hold as it stands, is one all the same
    in_url = re.match(r"\s*https?:.*@", value, re.I) is not None
    return in_url or _BEFORE_HOST.search(value) is not None or _ARGUMENT.search(value) is not None
