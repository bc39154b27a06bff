"""The tiny model with a chat template that knows tools, and reasoning between <think> and </think>."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.models.tiny_model import make_tiny_model

# Tokens of the demo model's tokenizer that nothing needs, and what they are here.
RENAMED = {"<reponame>": "<think>", "<filename>": "</think>"}
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for tool_call in message.tool_calls or [] %}<tool_call>
{"name": "{{ tool_call.name or tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""


def make_tools_model(folder: Path, tokenizer: Path) -> Path:
    """Write it into ``folder``; ``tokenizer`` is the demo model's folder."""
    make_tiny_model(folder, tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for old, new in RENAMED.items():
            assert old in text
            text = text.replace(old, new)
        (folder / name).write_text(text)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder
