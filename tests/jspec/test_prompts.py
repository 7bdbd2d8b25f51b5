"""What counts as a prompt, and what is refused before anything runs."""

import numpy as np
import pytest
from contract.engines import shared
from contract.words import words_tokenizer

from jspec.prompts import as_list, checked, prompt_ids

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompts", "listed"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        (range(2), [[0, 1]]),
        ([[1], "two"], [[1], "two"]),
        ([USER, USER], [[USER, USER]]),
        ([[USER]], [[USER]]),
        ([], []),
    ],
)
def test_one_prompt_or_several(prompts, listed):
    assert as_list(prompts) == listed


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, r"prompts: expected text, token ids or chat messages, or a list of these, got None; pass one"),
        (3, r"prompts: expected text, .* got 3; pass one"),
        (np.array(3), r"prompts: expected text, .* got array\(3\); pass one"),
        (USER, r"prompts: expected text, .* got the mapping .*; put a single message into a list"),
        ([None], r"prompts\[0\]: expected text, token ids or chat messages, got None; pass one of these"),
        ([1.0], r"prompts\[0\]: expected text, token ids or chat messages, got 1.0; pass one of these"),
        ([1, "a"], r"prompts\[0\]: expected text, token ids or chat messages, got 1; pass"),
        ([True, False], r"prompts\[0\]: expected text, .* got True; pass"),
        ([[1], None], r"prompts\[1\]: expected text, .* got None; pass"),
        ([[1], USER], r"prompts\[1\]: expected text, .*; put a message into a list"),
        ([[1, 2.0]], r"prompts\[0\]\[1\]: expected a token id or a chat message, got 2.0; pass"),
        ([[1, "a"]], r"prompts\[0\]\[1\]: expected a token id or a chat message, got 'a'; pass"),
        ([np.array([[1, 2]])], r"prompts\[0\]\[0\]: expected a token id or a chat message, got array"),
        ([[USER, 1]], r'prompts\[0\]\[1\]: expected a message {"role": ..., "content": ...}, got 1; pass'),
        ([USER, "a"], r"prompts\[0\]: expected text, .* got .*; put a message into a list"),
        ([{"content": "a"}], r'prompts\[0\]\[0\]\["role"\]: expected a string, got none; name'),
        ([{"role": 5, "content": "a"}], r'prompts\[0\]\[0\]\["role"\]: expected a string, got 5; name'),
        ([{"role": "user"}], r'prompts\[0\]\[0\]\["content"\]: expected a string, got none; write'),
        (
            [[USER, {"role": "user", "content": None}]],
            r'prompts\[0\]\[1\]\["content"\]: expected a string, got None',
        ),
        (
            [{"role": "user", "content": 3}],
            r'prompts\[0\]\[0\]\["content"\]: expected a string, got 3; write',
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "b"}],
                }
            ],
            r'prompts\[0\]\[0\]\["content"\]\[1\]: expected a part {"type": "text", "text": ...}, got .*image_url',
        ),
        (
            [{"role": "user", "content": ["a"]}],
            r'prompts\[0\]\[0\]\["content"\]\[0\]: expected a part .*, got \'a\'; models',
        ),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(prompts, message, unchecked):
    used = shared("plain")
    with pytest.raises(ValueError, match=f"^{message}"):
        used.generate(prompts)
    with pytest.raises(ValueError, match=f"^{message}"):
        used.stream(prompts)


@pytest.mark.parametrize("settings", [5, "greedy", [5], {"max_tokens": 3}])
def test_settings_of_another_kind_are_refused(settings, unchecked):
    with pytest.raises(ValueError, match=r"^settings: expected jspec.Settings, or a list of them, got"):
        shared("plain").generate([[1]], settings)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "One, "}, {"type": "text", "text": "two."}]
    message = {"role": "user", "content": parts, "name": "Ann"}
    assert checked(0, [message]) == [{"role": "user", "content": "One, two.", "name": "Ann"}]
    assert message["content"] is parts


def test_an_assistant_that_calls_a_tool_may_say_nothing():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert checked(0, [USER, call]) == [USER, call]


def test_a_long_value_is_quoted_in_part():
    with pytest.raises(ValueError) as error:
        checked(0, {"content": "x" * 1000 + "\n" * 50})
    assert len(str(error.value)) < 250
    assert len(str(error.value).splitlines()) == 1


def test_what_the_tokenizer_refuses_is_named_by_its_prompt():
    words = words_tokenizer()
    with pytest.raises(ValueError, match=r"^prompts\[3\]: text: expected Unicode text, got half a surrogate"):
        prompt_ids(3, "a\ud800", words)
    with pytest.raises(ValueError, match=r"^prompts\[3\]: messages: expected JSON values, got a object"):
        prompt_ids(3, [{**USER, "name": object()}], words)
    assert prompt_ids(0, "three one", words) == [3, 1]
    assert prompt_ids(0, [{"role": "user", "content": "three one"}], words) == [3, 1, 7]
