import numpy as np
import pytest

from jspec_train.data.answers import AnswerRules
from jspec_train.data.chat import chat_with_template
from jspec_train.data.convert import Converter, Settings
from jspec_train.data.report import CUT, NO_ANSWER_FOUND, NO_USER, REFUSED, TOO_LITTLE
from jspec_train.data.rows import Row

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quiet %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "It is 4."}]
LONGER = [*CHAT, {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello there"}]


def converter(tokenizer, template=TEMPLATE, variables=None, **settings):
    chat = chat_with_template(tokenizer, template, variables or {})
    return Converter(chat, Settings(**{"max_length": 100, "vocab_size": 420} | settings))


def convert(tokenizer, values, **options):
    return converter(tokenizer, **options).convert(Row(where="a.jsonl:7", values=values))


def trained(tokenizer, sample):
    return tokenizer.decode(sample.ids[sample.loss_mask], skip_special=False)


def test_a_conversation_is_one_sample(tiny):
    (sample,), outcome = convert(tiny, {"messages": LONGER})
    assert (sample.id, sample.task) == ("a.jsonl:7", "")
    assert sample.ids.dtype == np.int32 and sample.loss_mask.dtype == np.bool_
    assert trained(tiny, sample) == "It is 4.<|im_end|>Hello there<|im_end|>"
    assert tiny.decode(sample.ids, skip_special=False).startswith("<|im_start|>user\n2 + 2<|im_end|>")
    assert (outcome.kept, outcome.dropped, outcome.truncated) == (1, None, False)
    assert outcome.longest_answer == 6


def test_id_and_task_are_taken_from_the_row(tiny):
    (sample,), _ = convert(tiny, {"conversations": CHAT, "id": 12, "task": "sums"}, task="chat")
    assert (sample.id, sample.task) == ("12", "sums")
    (sample,), _ = convert(tiny, {"conversations": CHAT}, task="chat")
    assert sample.task == "chat"


def test_each_turn_is_a_sample_that_ends_with_its_answer(tiny):
    samples, outcome = convert(tiny, {"messages": LONGER, "id": "x"}, each_turn=True)
    assert [sample.id for sample in samples] == ["x#0", "x#1"]
    assert [trained(tiny, sample) for sample in samples] == ["It is 4.<|im_end|>", "Hello there<|im_end|>"]
    assert samples[1].ids[: samples[0].ids.size].tolist() == samples[0].ids.tolist()
    assert outcome.kept == 2


def test_text_and_token_rows(tiny):
    (sample,), _ = convert(tiny, {"text": "<|im_start|>assistant\nHello there<|im_end|>\n"})
    assert trained(tiny, sample) == "Hello there<|im_end|>"
    (sample,), _ = convert(tiny, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    assert sample.ids.tolist() == [5, 6, 7] and sample.loss_mask.tolist() == [False, True, True]


def test_ids_and_mask_are_cut_together(tiny):
    values = {"input_ids": list(range(10)), "loss_mask": [0, 0, 0, 1, 1, 1, 0, 1, 1, 1]}
    (sample,), outcome = convert(tiny, values, max_length=8)
    assert sample.ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask.tolist() == [False, False, False, True, True, True, False, True]
    assert outcome.truncated and outcome.longest_answer == 3


@pytest.mark.parametrize(
    "mask, min_run, max_length, reason",
    [
        ([0, 0, 0, 0], 1, 4, NO_ANSWER_FOUND),
        ([0, 1, 0, 1], 2, 4, TOO_LITTLE),
        ([0, 1, 0, 1], 1, 4, None),
        ([0, 0, 1, 1], 2, 3, CUT),
        ([0, 0, 1, 1], 1, 3, None),
        ([0, 0, 1, 1], 1, 2, CUT),
        ([0, 1, 1, 0], 2, 3, None),
    ],
)
def test_a_row_with_too_little_to_learn_is_dropped_with_a_reason(tiny, mask, min_run, max_length, reason):
    values = {"input_ids": [1, 2, 3, 4], "loss_mask": mask}
    samples, outcome = convert(tiny, values, min_run=min_run, max_length=max_length)
    assert outcome.dropped == reason and bool(samples) == (reason is None)


def test_rows_without_an_answer_are_dropped_with_a_reason(tiny):
    for messages in ([CHAT[1]], [CHAT[0]], [{"role": "system", "content": "S"}]):
        assert convert(tiny, {"messages": messages})[1].dropped == NO_USER
    samples, outcome = convert(tiny, {"messages": [*CHAT, {"role": "tool", "content": "x"}]})
    assert not samples and outcome.dropped == REFUSED and "no tools here" in outcome.detail
    assert convert(tiny, {"text": "hello"})[1].dropped == NO_ANSWER_FOUND


def test_a_bad_order_of_roles_is_cut_and_with_strict_it_is_an_error(tiny):
    values = {"messages": [*CHAT, CHAT[1], CHAT[0]]}
    (sample,), outcome = convert(tiny, values)
    assert outcome.out_of_order and trained(tiny, sample) == "It is 4.<|im_end|>"
    message = "a.jsonl:7: expected answers after user or tool .*, got the order user, assistant, assistant, user; mend"
    with pytest.raises(ValueError, match=message):
        convert(tiny, values, strict=True)


def test_an_answer_that_was_cut_off_does_not_learn_to_end(tiny):
    (sample,), _ = convert(tiny, {"messages": CHAT, "finish_reason": "length"})
    assert trained(tiny, sample) == "It is 4."
    assert sample.loss_mask[-1]
    (sample,), _ = convert(tiny, {"messages": CHAT, "finish_reason": "stop"})
    assert trained(tiny, sample) == "It is 4.<|im_end|>"
    samples, _ = convert(tiny, {"messages": LONGER, "finish_reason": "length"}, each_turn=True)
    assert [trained(tiny, sample) for sample in samples] == ["It is 4.<|im_end|>", "Hello there"]


def test_variables_reach_the_template_from_settings_and_columns(tiny):
    row = {"messages": [CHAT[0], {"role": "assistant", "content": "<think>\n\n</think>\n\n4"}]}
    (sample,), _ = convert(tiny, row, variables={"quiet": True})
    assert trained(tiny, sample) == "4<|im_end|>"
    quiet = converter(tiny, template_columns=("quiet",))
    (sample,), _ = quiet.convert(Row(where="a:1", values=row | {"quiet": True}))
    assert trained(tiny, sample) == "4<|im_end|>"
    (sample,), _ = quiet.convert(Row(where="a:1", values=row))
    assert trained(tiny, sample) == "<think>\n\n</think>\n\n4<|im_end|>"


def test_a_training_row_begins_with_the_ids_a_server_sends(tiny):
    import dataclasses

    served = dataclasses.replace(tiny, chat_templates={"default": TEMPLATE})
    answer = {"role": "assistant", "content": "<think>\n\n</think>\n\n4"}
    for variables in ({}, {"quiet": True}):
        (sample,), _ = convert(tiny, {"messages": [CHAT[0], answer]}, variables=variables)
        prompt = served.chat([CHAT[0]], **variables)
        assert sample.ids[: len(prompt)].tolist() == prompt
        assert sample.loss_mask[: len(prompt)].sum() == 0 and sample.loss_mask[len(prompt)]


def test_the_mask_token_may_not_occur(tiny):
    values = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    with pytest.raises(
        ValueError, match=r"does not occur in the data, got 6, which stands in a.jsonl:7; choose"
    ):
        convert(tiny, values, mask_token_id=6)
    assert convert(tiny, values, mask_token_id=8)[0]
    # Past max_length it would not be seen in training, but a drafter would meet it when it is served.
    with pytest.raises(ValueError, match="got 7"):
        convert(tiny, values, mask_token_id=7, max_length=2, min_run=1)


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"prompt": "a"},
            r"a.jsonl:7: expected a column conversations, messages, text, or input_ids with "
            r"loss_mask, got \['prompt'\]; rename yours",
        ),
        ({"input_ids": [1]}, "a.jsonl:7: expected whole numbers in 'loss_mask', got None"),
        ({"input_ids": [1.5], "loss_mask": [1]}, "expected whole numbers in 'input_ids'"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "as many loss_mask values, .* got 2 ids and 1 values"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask values, 0 or 1"),
        ({"input_ids": [], "loss_mask": []}, "at least one, got 0 ids"),
        ({"input_ids": [1, 420], "loss_mask": [1, 1]}, "input_ids from 0 to 419, got 420; tokenise with"),
        ({"input_ids": [-1, 4], "loss_mask": [1, 1]}, "input_ids from 0 to 419, got -1"),
        ({"text": 3}, "expected a string in 'text', got 3"),
    ],
)
def test_a_row_of_no_known_form_is_named(tiny, values, message):
    with pytest.raises(ValueError, match=message):
        convert(tiny, values)


def test_without_a_chat_template_only_token_rows_can_be_read(tiny):
    bare = Converter(chat_with_template(tiny, None, {}), Settings(max_length=10, vocab_size=420))
    assert bare.convert(Row(where="a:1", values={"input_ids": [5, 6], "loss_mask": [1, 1]}))[0]
    with pytest.raises(
        ValueError, match="a:1: expected a tokenizer with a chat template, got one without; pass"
    ):
        bare.convert(Row(where="a:1", values={"messages": CHAT}))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_length": 1}, "max_length: expected 2 or more, got 1"),
        ({"min_run": 0}, "min_run: expected 1 to .*, got 0"),
    ],
)
def test_settings_that_make_no_sample_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"max_length": 10, "vocab_size": 10} | settings)


def test_the_question_of_a_row_is_its_first_user_message(tiny):
    ask = converter(tiny).question
    other = [{"role": "system", "content": "S"}, CHAT[0], {"role": "assistant", "content": "other"}]
    assert (
        ask(Row(where="", values={"messages": LONGER}))
        == ask(Row(where="", values={"messages": other}))
        == "2 + 2"
    )
    text = "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
    assert ask(Row(where="", values={"text": f"{text}4<|im_end|>\n"})) == text
    rows = [{"input_ids": [1, 2, end], "loss_mask": [0, 0, 1]} for end in (3, 4)]
    assert ask(Row(where="", values=rows[0])) == ask(Row(where="", values=rows[1])) == "[1, 2]"


def test_rules_reach_the_answers(tiny):
    (sample,), _ = convert(tiny, {"messages": LONGER}, rules=AnswerRules(last_only=True))
    assert trained(tiny, sample) == "Hello there<|im_end|>"


def test_a_system_message_is_added_where_there_is_none(tiny):
    (sample,), _ = convert(tiny, {"messages": CHAT}, system="Hello")
    assert tiny.decode(sample.ids, skip_special=False).startswith("<|im_start|>system\nHello<|im_end|>\n")
