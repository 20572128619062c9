"""What a chat template sees and writes is what transformers gives it."""

from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from pagoda_common.text.chat_template import render_chat_template

BIG = 10**21 + 1
CALL = {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": {"wei": BIG, "to": "é<&>", "x": 1.5}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be <kind>"},
    {"role": "user", "content": "hi there "},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "pay", "content": "ok"},
    {"role": "assistant", "content": " well, ", "reasoning_content": "hm", "reasoning": "hm"},
]
PARAMETERS = {"type": "object", "properties": {"wei": {"type": "integer", "maximum": BIG, "title": "Größe"}}}
TOOLS = [{"type": "function", "function": {"name": "pay", "description": "Pay 'it'.", "parameters": PARAMETERS}}]
DOCUMENTS = [{"title": "T", "text": "é"}]
TEMPLATES = {
    "everything": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ documents | tojson(ensure_ascii=True) }}",
    "tojson options": "{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}{{ '<a>&' | tojson }}",
    "globals": "{{ dict(a=1) }}{{ dict.fromkeys([1, 2], 3) }}{% set n = namespace(a=1) %}"
    "{% set n.b = 2 %}{{ n.a + n.b }}"
    "{{ range(3) | list }}{{ lipsum is defined }}{{ cycler is defined }}{{ joiner is defined }}",
    "date": "{{ strftime_now('%Y') }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "white space": "{% for m in messages %}\n  {% if m.role == 'user' %}\n  <u>\n  {% endif %}\n{{ m.content }}\n"
    "{% endfor %}\n",
    "calls": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{{ c.function.arguments | string }}"
    "{% endfor %}{% endfor %}",
    "types": "{{ tools is none }}{{ tools is defined }}{{ tools is iterable }}{{ messages[0] is mapping }}"
    "{{ thinking is defined }}{{ add_generation_prompt }}{{ mood }}{{ messages[9] is defined }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content | default('-') }}"
    "{{ m.reasoning | default('-') }}{{ m.thinking | default('-') }}{% endfor %}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}",
    "filters": "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user')"
    " | list | length }}{{ messages[1].content | trim | upper }}{{ messages | length }}{{ messages[::-1][0].role }}",
}
SETTINGS: list[dict[str, Any]] = [
    {"add_generation_prompt": True, "tools": TOOLS, "documents": DOCUMENTS, "mood": "glad"},
    {"add_generation_prompt": False, "tools": None, "documents": None, "mood": 1.5},
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_template_writes_what_it_writes_under_transformers(name: str, settings: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=FastTokenizer(models.BPE()), **special)
    expected = theirs.apply_chat_template(MESSAGES, chat_template=TEMPLATES[name], tokenize=False, **settings)
    assert render_chat_template(TEMPLATES[name], messages=MESSAGES, **special, **settings) == expected


@pytest.mark.parametrize("content", ["<", "im_end", "", " a ", "b\n", "user"])
@pytest.mark.parametrize("trims", [True, False])
def test_a_final_message_is_continued_as_under_transformers(content: str, trims: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    shown = "m.content | trim" if trims else "m.content"
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ " + shown + " }}<|im_end|>\n{% endfor %}"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    theirs = PreTrainedTokenizerFast(tokenizer_object=FastTokenizer(models.BPE()))
    expected = theirs.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    assert render_chat_template(template, messages=messages, continue_final_message=True) == expected
