import dataclasses
import json
import random
import re

import pytest
import tokenizers

from jspec.text.tokenizer import Tokenizer
from jspec_train.data.answers import AnswerRules, find_answers, find_answers_in_text
from jspec_train.data.chat import chat_with_template
from jspec_train.data.conversations import Conversation

PROMPTED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPTLESS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
STRIPPING = PROMPTED.replace("{{ m.content }}", "{{ m.content | trim }}")
# Shows the reasoning of the last message alone, and an empty block there if it has none.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if quiet %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The prompt opens the reasoning; what is rendered afterwards shows none.
OPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
OTHER_END = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|eot_id|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
RENAMING = (
    "{% for m in messages %}{% if m.role == 'system' %}{% set system = m.content %}"
    "{% else %}<|start|>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{% if m.role == 'user' and loop.index0 < 2 and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
BRACKETS = "{% for m in messages %}{{ '[I] ' + m.content + ' [/I]' if m.role == 'user' else ' ' + m.content + '<|end|>' }}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
TAGGED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def talk(*pairs, **more):
    return Conversation(messages=tuple({"role": role, "content": content} for role, content in pairs), **more)


TWO_TURNS = talk(("user", "1 + 1"), ("assistant", "It is 2."), ("user", "2 + 2"), ("assistant", "4"))


def found(tokenizer, template, conversation=TWO_TURNS, rules=AnswerRules(), unfinished=False, **variables):  # noqa: B008
    chat = chat_with_template(tokenizer, template, variables)
    marked = find_answers(chat, conversation, rules, unfinished=unfinished)
    return [marked.text[start:end] for start, end in marked.answers], marked


@pytest.mark.parametrize(
    "template, answers",
    [
        (PROMPTED, ["It is 2.<|im_end|>", "4<|im_end|>"]),
        (PROMPTLESS, ["It is 2.<|im_end|>", "4<|im_end|>"]),
        (STRIPPING, ["It is 2.<|im_end|>", "4<|im_end|>"]),
        (RENAMING, ["It is 2.<|end|>", "4<|end|>"]),
        (PLAIN, ["It is 2.\n", "4\n"]),
        (BRACKETS, ["It is 2.<|end|>", "4<|end|>"]),
        (TAGGED, ["It is 2.<|im_end|>", "4<|im_end|>"]),
        # The prompt ends before the channel or role mark that the target writes itself.
        (OTHER_END, ["<|message|>It is 2.<|end|>", "<|message|>4<|eot_id|>"]),
    ],
    ids=["prompted", "promptless", "stripping", "renaming", "plain", "brackets", "tagged", "other-end"],
)
def test_answers_are_what_follows_the_prompt_up_to_the_end_of_the_turn(tiny, template, answers):
    texts, marked = found(tiny, template)
    assert texts == answers
    assert (marked.unserved, marked.missed) == (0, 0)


@pytest.mark.parametrize("template", [PROMPTED, STRIPPING, RENAMING, OTHER_END, PLAIN, TOOLS])
def test_the_text_before_an_answer_is_what_a_server_sends(tiny, template):
    conversation = talk(
        ("system", "Be brief."),
        ("user", " 1 + 1\n"),
        ("assistant", "\n\nIt is 2. "),
        ("user", "2"),
        ("assistant", "4"),
    )
    chat = chat_with_template(tiny, template, {})
    marked = find_answers(chat, conversation, AnswerRules())
    for (start, _), turn in zip(marked.answers, (2, 4), strict=True):
        assert marked.text[:start] == tiny_render(tiny, template, conversation.messages[:turn])


def tiny_render(tokenizer, template, messages):
    served = dataclasses.replace(tokenizer, chat_templates={"default": template})
    return served.render(messages)


def test_content_is_not_confused_with_what_the_template_writes(tiny):
    conversation = talk(
        ("user", "assistant\n4<|im_end|>\n<|im_start|>assistant\n4"),
        ("assistant", "4"),
        ("user", "4"),
        ("assistant", "4"),
    )
    texts, marked = found(tiny, PROMPTED, conversation)
    assert texts == ["4<|im_end|>", "4<|im_end|>"]
    assert marked.answers[0][0] == len("<|im_start|>user\n" + conversation.messages[0]["content"]) + len(
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_white_space_behind_a_turn_is_trained_on_only_if_asked_for(tiny):
    assert found(tiny, PROMPTED, rules=AnswerRules(through_turn=True))[0] == [
        "It is 2.<|im_end|>\n",
        "4<|im_end|>\n",
    ]


def test_the_last_answer_alone(tiny):
    for template in (PROMPTED, PROMPTLESS, TAGGED):
        assert found(tiny, template, rules=AnswerRules(last_only=True))[0] == ["4<|im_end|>"]


def test_a_question_at_the_end_belongs_to_no_answer(tiny):
    conversation = talk(("user", "1"), ("assistant", "2"), ("user", "3"))
    assert found(tiny, PROMPTED, conversation)[0] == ["2<|im_end|>"]


def thoughts(*thinking):
    messages = []
    for number, thought in enumerate(thinking):
        answer = {"role": "assistant", "content": f"It is {number}."}
        messages += [
            {"role": "user", "content": "?"},
            answer if thought is None else answer | {"reasoning_content": thought},
        ]
    return Conversation(messages=tuple(messages))


def test_reasoning_is_part_of_the_answer_and_earlier_reasoning_that_is_dropped_is_not_missed(tiny):
    texts, marked = found(tiny, FORGETFUL, thoughts("first", "second"))
    assert texts == ["It is 0.<|im_end|>", "<think>\nsecond\n</think>\n\nIt is 1.<|im_end|>"]
    # The target wrote the first answer after its reasoning, which is not there any more.
    assert (marked.unserved, marked.missed) == (1, 0)
    rules = AnswerRules(served_only=True)
    assert found(tiny, FORGETFUL, thoughts("first", "second"), rules)[0] == texts[1:]
    assert found(tiny, FORGETFUL, thoughts("first", "second"), AnswerRules(last_only=True))[0] == texts[1:]


def test_a_prompt_with_an_empty_think_block_keeps_it_out_of_the_answer(tiny):
    texts, _ = found(tiny, FORGETFUL, thoughts(""), quiet=True)
    assert texts == ["It is 0.<|im_end|>"]
    # Without the variable the target would have to write the block itself.
    texts, _ = found(tiny, FORGETFUL, thoughts(""))
    assert texts == ["<think>\n\n</think>\n\nIt is 0.<|im_end|>"]
    rules = AnswerRules(ignored=("<think>\n\n</think>\n\n",))
    assert found(tiny, FORGETFUL, thoughts(""), rules)[0] == ["It is 0.<|im_end|>"]


def test_a_prompt_that_opens_the_reasoning_is_not_what_stands_before_a_plain_answer(tiny):
    texts, marked = found(tiny, OPENING)
    assert texts == ["It is 2.<|im_end|>", "4<|im_end|>"]
    assert marked.unserved == 2
    assert found(tiny, OPENING, rules=AnswerRules(served_only=True))[0] == []


def test_ignored_strings_split_an_answer(tiny):
    conversation = talk(("user", "?"), ("assistant", "one two one"))
    texts, _ = found(tiny, PROMPTED, conversation, AnswerRules(ignored=("one",)))
    assert texts == [" two ", "<|im_end|>"]


@pytest.mark.parametrize("template", [PROMPTED, PROMPTLESS, TAGGED, OTHER_END])
def test_an_answer_that_was_cut_off_has_no_end_of_turn(tiny, template):
    texts, marked = found(tiny, template, unfinished=True)
    assert texts[-1].endswith("4") and marked.text.endswith("4")
    assert "It is 2.<|" in texts[0]


def test_tool_calls_are_answers_and_tool_results_are_not(tiny):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    conversation = Conversation(
        messages=(
            {"role": "user", "content": "1 + 1"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "It is 2."},
        ),
        tools=({"name": "add"},),
    )
    texts, marked = found(tiny, TOOLS, conversation)
    assert texts == ['<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>', "It is 2.<|im_end|>"]
    assert marked.text.startswith('[{"name": "add"}]\n')


def test_channels_of_one_answer_are_one_answer(tiny):
    conversation = talk(
        ("user", "2 + 2"),
        ("assistant_analysis", "easy"),
        ("assistant_final", "4"),
        ("user", "?"),
        ("assistant", "!"),
    )
    texts, _ = found(tiny, "harmony", conversation)
    assert texts == [
        "<|channel|>analysis<|message|>easy<|end|><|start|>assistant<|channel|>final<|message|>4<|end|>",
        "<|channel|>final<|message|>!<|end|>",
    ]


def test_harmony_takes_effort_and_system_text(tiny):
    _, marked = found(
        tiny, "harmony", talk(("assistant_reasoning_effort", "High"), ("user", "?"), ("assistant", "!"))
    )
    assert "\n\nReasoning: high\n\n" in marked.text
    _, marked = found(tiny, "harmony", talk(("system", "Mine."), ("user", "?"), ("assistant", "!")))
    assert marked.text.startswith("<|start|>system<|message|>Mine.<|end|><|start|>user")


@pytest.mark.parametrize("template", [PROMPTED, PROMPTLESS, STRIPPING, RENAMING, PLAIN, BRACKETS])
def test_rendered_text_has_the_same_answers_as_the_conversation(tiny, template):
    texts, marked = found(tiny, template)
    again = find_answers_in_text(chat_with_template(tiny, template, {}), marked.text, AnswerRules())
    assert [again.text[start:end] for start, end in again.answers] == texts


def test_a_text_that_ends_within_an_answer_keeps_what_there_is(tiny):
    chat = chat_with_template(tiny, PROMPTED, {})
    text = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\nIt is"
    assert find_answers_in_text(chat, text, AnswerRules()).answers == ((len(text) - 5, len(text)),)


def test_a_template_without_a_mark_before_answers_cannot_find_them_in_text(tiny):
    chat = chat_with_template(tiny, "{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(ValueError, match="marks the beginning of answers, got one without"):
        find_answers_in_text(chat, "abc", AnswerRules())


def test_a_template_that_hides_answers_is_refused(tiny):
    with pytest.raises(ValueError, match="expected one that shows the assistant's messages"):
        found(tiny, "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")


# An independent statement of the rule by which the public data pipelines mask: header and end of turn as strings.
def by_strings(text, header, end, last_only):
    spans = [
        match.span(1)
        for match in re.finditer(f"{re.escape(header)}(.*?(?:{re.escape(end)}|$))", text, re.DOTALL)
    ]
    return spans[-1:] if last_only else spans


WORDS = [
    "Hello",
    "there",
    "2 + 2",
    "\n",
    "\n\n",
    "   ",
    "ça",
    "日本",
    "</think>",
    "<think>",
    "def f():\n    return",
    "assistant",
]


@pytest.mark.parametrize("seed", range(4))
def test_answers_found_from_the_template_are_those_found_by_its_strings(tiny, seed):
    random_ = random.Random(seed)

    def content():
        return " ".join(random_.choices(WORDS, k=random_.choice([0, 1, 2, 6])))

    for _ in range(40):
        turns = random_.randint(1, 3)
        pairs = [(role, content()) for _ in range(turns) for role in ("user", "assistant")]
        template = random_.choice([PROMPTED, PROMPTLESS, STRIPPING])
        rules = AnswerRules(through_turn=True, last_only=random_.random() < 0.3)
        _, marked = found(tiny, template, talk(*pairs), rules)
        expected = by_strings(marked.text, "<|im_start|>assistant\n", "<|im_end|>\n", rules.last_only)
        assert list(marked.answers) == expected, json.dumps(pairs)


def test_a_sentencepiece_template_without_special_tokens(tiny):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    bare = Tokenizer(backend=backend, chat_templates={}, special_tokens={}, bos_id=None, eos_ids=())
    assert found(bare, PLAIN)[0] == ["It is 2.\n", "4\n"]
