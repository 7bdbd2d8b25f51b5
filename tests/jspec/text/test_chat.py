"""Chat templates come out as transformers renders them."""

import datetime

import pytest

from jspec.text.chat import render_chat

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  東京?  ", "name": None},
    {
        "role": "assistant",
        "content": "ok",
        "thinking": "hm",
        "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": "é"}}],
    },
    {"role": "tool", "content": ["x", 1.5, True, None]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

TEMPLATES = {
    "blocks": """{%- for message in messages %}
    {% if message.role != 'tool' %}
  [{{ message['role'] }}] {{ message.content | trim }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
[assistant]
{% endif %}""",
    "json": "{{ tools | tojson }}{{ messages | tojson(indent=2) }}{{ messages[2].tool_calls[0] | tojson }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.role }};{% endfor %}",
    "generation": "{% for m in messages %}\n{% if m.role == 'assistant' %}\n{% generation %}\n"
    "{% set x = 1 %}{{ m.content }}{{ eos_token }}\n{% endgeneration %}\n{{ x is defined }}{% endif %}"
    "{% endfor %}",
    "namespace": "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}"
    "{{ n.a }}",
    "missing keys": "{{ messages[1].name is defined }}{{ messages[0].no }}{{ tools is none }}"
    "{{ other is defined }}",
    "reasoning": "{{ messages[2].reasoning_content }} {{ messages[2].thinking }}",
    "values": "{{ messages[3].content }} {{ bos_token }} {{ documents }} {{ flag }} {{ dict(a=1) }}",
    "macro": "{% macro show(m) %}<{{ m.role | upper }}>{% endmacro %}"
    "{% for m in messages[::-1] %}{{ show(m) }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_templates_render_as_in_transformers(name, add_generation_prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"bos_token": "<s>", "eos_token": "</s>", "flag": False}
    messages = [{key: item for key, item in message.items() if item is not None} for message in MESSAGES]
    (expected,), _ = render_jinja_template(
        conversations=[messages],
        tools=TOOLS if name == "json" else None,
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    ours = render_chat(
        TEMPLATES[name],
        MESSAGES,
        tools=TOOLS if name == "json" else None,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    assert ours == expected


def test_strftime_now_tells_the_date():
    year = datetime.datetime.now().year
    assert render_chat("{{ strftime_now('%Y') }}", MESSAGES) in (str(year), str(year + 1))


def test_variables_may_have_any_name():
    assert render_chat("{{ template }}{{ messages | length }}", MESSAGES, template="t") == "t4"


def test_a_refusal_of_the_template_names_its_reason():
    template = "{{ raise_exception('Roles must alternate') }}"
    with pytest.raises(ValueError, match=r"^messages: the chat template refuses them: Roles must alternate"):
        render_chat(template, MESSAGES)


def test_a_message_without_the_key_that_a_template_needs_is_refused():
    with pytest.raises(ValueError, match=r"^messages: the chat template refuses them"):
        render_chat("{{ messages[0]['content'] + 'x' }}", [{"role": "user"}])


def test_a_template_cannot_reach_python():
    with pytest.raises(ValueError, match=r"unsafe"):
        render_chat("{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", MESSAGES)
    with pytest.raises(ValueError, match=r"unsafe"):
        render_chat("{{ messages.append(1) }}", MESSAGES)


def test_a_broken_template_is_named():
    with pytest.raises(ValueError, match=r"^chat template: expected jinja2, got an error in line 2"):
        render_chat("\n{% if %}", MESSAGES)


def test_no_messages_are_refused():
    with pytest.raises(ValueError, match=r"^messages: expected a list of at least one message"):
        render_chat("x", [])


def test_values_that_are_not_json_are_refused():
    with pytest.raises(ValueError, match=r"^messages: expected JSON values, got a object"):
        render_chat("x", [{"role": "user", "content": object()}])
