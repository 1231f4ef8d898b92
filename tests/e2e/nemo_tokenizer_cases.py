"""Prints as JSON which tokenizers of NeMo's own classes agree with the files written from them. Runs in .venv-nemo.

python tests/e2e/nemo_tokenizer_cases.py DIRECTORY HF_MODEL
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from nemo.collections.common.tokenizers import AutoTokenizer, SentencePieceTokenizer
from nemo_tokenizers import EQUAL, REFUSED, TEXT, train_model

from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.integrations.tokenizers import write_tokenizer

directory, model = Path(sys.argv[1]), sys.argv[2]
SPECIAL = {"eos_token": "<|end|>", "bos_token": "<|start|>", "pad_token": "<|pad|>"}


def sentencepiece(name: str, settings: dict, **more) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(str(train_model(directory / f"{name}.model", **settings)), **more)


tokenizers = {name: sentencepiece(name, settings) for name, settings in EQUAL.items()}
tokenizers["legacy special tokens"] = sentencepiece("legacy", {"kind": "bpe"}, legacy=True, special_tokens=SPECIAL)
tokenizers["AutoTokenizer"] = AutoTokenizer(model)
equal = []
for name, theirs in tokenizers.items():
    ours = Tokenizer.load(write_tokenizer(theirs, directory / f"written {name}"))
    texts = [*TEXT, *(["a<|end|>b <|start|> c"] if name.startswith("legacy") else [])]
    same = [ours.encode(text) for text in texts] == [list(theirs.text_to_ids(text)) for text in texts]
    if same and ours.eos_ids == (theirs.eos_id,) and ours.vocab_size == theirs.vocab_size:
        equal.append(name)
refused = {}
for name, (settings, message) in REFUSED.items():
    try:
        write_tokenizer(sentencepiece(name, settings), directory / f"written {name}")
    except ValueError as error:
        refused[name] = re.search(message, str(error)) is not None
print(json.dumps({"equal": sorted(equal), "refused": refused}))
