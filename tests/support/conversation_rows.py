"""Rows of prompt files with calls and tools, the files, and a template that writes all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# writes everything that a message may hold, as the templates of models with tools do
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}{{ ' ' + m.name if m.name else '' }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if 'content' in m %}{{ 'null' if m.content is none else m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call {{ c.id }}>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
    "{{ '#' + m.tool_call_id if m.tool_call_id else '' }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '<think>' if thinking else '' }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m['content'] or '' }}{% endfor %}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Paris"}}}
ASKED = {"role": "user", "content": "Is it warm in Paris?"}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {**ASKED, "name": "Ann"},
    {"role": "assistant", "content": None, "reasoning_content": "I look it up.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": '{"degrees": 21}'},
]


def jsonl(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def parquet(file: Path, *rows: dict[str, Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), file)
    return file
