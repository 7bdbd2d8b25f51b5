import pytest

from jspec_train.data.conversations import Conversation, clean, read_conversation


def read(messages, **more):
    return read_conversation("a.jsonl:1", {"messages": messages, **more}, "messages")


def roles_after(*roles, system=None):
    messages = tuple({"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles))
    cleaned = clean(Conversation(messages=messages), system=system)
    return [message["content"] for message in cleaned.messages], cleaned.cut


def test_both_dialects_become_role_and_content():
    theirs = [
        {"from": "human", "value": "1"},
        {"from": "gpt", "value": "2"},
        {"from": "system", "value": "3"},
    ]
    ours = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "system", "content": "3"},
    ]
    assert list(read(theirs).messages) == ours == list(read(ours).messages)


def test_text_parts_are_joined_and_no_content_is_empty():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read([{"role": "user", "content": parts}, {"role": "assistant", "content": None}]).messages == (
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    )


def test_reasoning_and_names_stay_and_other_keys_go():
    message = {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
        "weight": 1,
        "name": "x",
        "thinking": None,
    }
    assert read([message]).messages == (
        {"role": "assistant", "content": "a", "reasoning_content": "r", "name": "x"},
    )


@pytest.mark.parametrize(
    "calls",
    [
        [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "index": 0}],
        [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        '[{"id": "c1", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]',
        [{"id": "c1", "name": "add", "arguments": {"a": 1}}],
    ],
)
def test_tool_calls_have_one_form(calls):
    (message,) = read([{"role": "assistant", "content": "", "tool_calls": calls}]).messages
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]


def test_tools_may_be_a_list_or_its_json():
    tool = {"type": "function", "function": {"name": "add"}}
    message = [{"role": "user", "content": "1"}]
    assert read(message, tools=[tool]).tools == (tool,)
    assert read(message, tools='[{"type": "function", "function": {"name": "add"}}]').tools == (tool,)
    assert read(message, tools="").tools == read(message).tools == ()


@pytest.mark.parametrize(
    "values, message",
    [
        ("hello", r"a.jsonl:1: expected a list of messages in 'messages', got 'hello'"),
        ({}, r"expected a list of messages in 'messages', got \{\}"),
        (["hello"], r"a.jsonl:1: message 0: expected \{\"role\": ..., \"content\": ...\}, got 'hello'"),
        (
            [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}],
            "a.jsonl:1: message 1: expected a role of system, .*, got 'bot'; rename it",
        ),
        ([{"content": "a"}], "expected a role of .*, got None"),
        ([{"role": "user", "content": [{"type": "image"}]}], "expected text as content, got"),
        ([{"role": "user", "content": 3}], "expected text as content, got 3"),
        ([{"role": "assistant", "tool_calls": "no"}], "expected tool_calls as a list or its JSON, got 'no'"),
        ([{"role": "assistant", "tool_calls": [3]}], "expected tool calls with"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            "expected JSON arguments of f",
        ),
    ],
)
def test_what_is_no_conversation_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        read(values)


def test_an_order_that_is_one_stays():
    for roles in (
        ("user", "assistant"),
        ("system", "user", "assistant", "user", "assistant"),
        ("user", "assistant", "tool", "tool", "assistant"),
        ("user", "user", "assistant", "user"),
        ("assistant_reasoning_effort", "user", "assistant_analysis", "assistant_final"),
    ):
        kept, cut = roles_after(*roles)
        assert [content.split()[0] for content in kept] == list(roles) and not cut


@pytest.mark.parametrize(
    "roles, kept",
    [
        (("assistant", "user", "assistant"), ["user 1", "assistant 2"]),
        (("system", "assistant", "tool", "user", "assistant"), ["system 0", "user 3", "assistant 4"]),
        (("system", "system", "user", "assistant"), ["system 0", "user 2", "assistant 3"]),
        (("user", "assistant", "assistant", "user", "assistant"), ["user 0", "assistant 1"]),
        (("user", "tool", "assistant"), ["user 0"]),
        (("user", "system", "assistant"), ["user 0", "system 1"]),
        (("user", "assistant_final", "assistant"), ["user 0", "assistant_final 1"]),
        (("assistant",), []),
        (("system",), []),
    ],
)
def test_a_conversation_is_cut_where_the_order_ends(roles, kept):
    contents, cut = roles_after(*roles)
    assert contents == kept
    assert cut == ((len(kept) < len(roles) and "user" in roles) or roles == ("assistant",))


def test_no_messages_are_no_conversation():
    assert clean(read([]), system="S").messages == ()


def test_a_system_message_is_added_where_there_is_none():
    assert roles_after("user", "assistant", system="S")[0] == ["S", "user 0", "assistant 1"]
    assert roles_after("system", "user", system="S")[0] == ["system 0", "user 1"]
