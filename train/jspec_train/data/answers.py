"""Where the target's answers are in a rendered conversation, found from the template itself."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jspec_train.data.chat import ANSWERED, GENERATION, Chat, common_length
from jspec_train.data.conversations import Conversation, is_answer
from jspec_train.data.harmony import HARMONY_USER


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerRules:
    """Which of the text after a prompt is trained on. The defaults are what a target writes when served."""

    through_turn: bool = False  # also white space that the template puts behind the token that ends a turn
    served_only: bool = (
        False  # leave out answers before which the text is not the one a server would have sent
    )
    last_only: bool = False  # the last answer of a conversation alone
    ignored: tuple[str, ...] = ()  # strings that are no part of an answer, such as an empty think block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marked:
    """A rendered conversation."""

    text: str
    answers: tuple[tuple[int, int], ...]  # first character, and the one past the last
    unserved: int = 0  # answers whose text before them differs from what a server would have sent
    missed: int = 0  # answers that were not found in the text


def find_answers(
    chat: Chat, conversation: Conversation, rules: AnswerRules, *, unfinished: bool = False
) -> Marked:
    """Renders a conversation and finds the answers in it.

    An answer begins where the prompt for it ends: the messages before it, rendered as a server does. It
    ends with its turn. Where a template renders earlier answers in another way than the last one (it may
    drop their reasoning), the answer is found by rendering the conversation once more with other text in
    its place. A template with {% generation %} tags says itself where its answers are.

    Args:
      chat: the template.
      conversation: cleaned; its last message need not be an answer.
      rules: which part of the answers counts.
      unfinished: the last answer was cut off, so what follows its content is not part of the text.

    Raises:
      ValueError: the template refuses the messages.
    """
    if chat.marks.tagged:
        marked = _tagged(chat, conversation)
    else:
        marked = _prompted(chat, conversation)
    if unfinished and is_answer(conversation.messages[-1]):
        marked = _cut_off(chat, marked)
    pairs = list(zip(marked.answers, marked.served, strict=True))
    if rules.last_only:
        pairs = pairs[-1:] if marked.last_found else []
    kept = [span for span, served in pairs if served or not rules.served_only]
    return Marked(
        text=marked.text,
        answers=_refined(chat, marked.text, kept, rules),
        unserved=marked.served.count(False),
        missed=marked.missed,
    )


def find_answers_in_text(chat: Chat, text: str, rules: AnswerRules) -> Marked:
    """Finds the answers in a text that was rendered before, by the template's marks.

    Args:
      chat: the template that made the text.
      text: a whole conversation.
      rules: as above; `served_only` does not apply.

    Raises:
      ValueError: the template has no mark before answers.
    """
    marks = chat.marks
    begin = marks.begin if marks.begin.strip() else marks.between
    if not begin.strip():
        raise ValueError(
            "text: expected a chat template that marks the beginning of answers, got one without; pass "
            '"conversations", or "input_ids" with "loss_mask"'
        )
    if chat.channels:
        end = f"(?={re.escape(HARMONY_USER)}|$)"  # an answer goes on over its channels
    else:
        end = f"(?:{re.escape(marks.end)}|$)" if marks.end else "$"
    found = re.finditer(f"{re.escape(begin)}(.*?{end})", text, re.DOTALL)
    answers = [match.span(1) for match in found]
    kept = answers[-1:] if rules.last_only else answers
    return Marked(text=text, answers=_refined(chat, text, kept, rules))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    text: str
    answers: tuple[tuple[int, int], ...]
    served: tuple[bool, ...]
    missed: int = 0
    last_found: bool = True


def turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """First and last message of every answer; several messages in a row are its channels."""
    found: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if not is_answer(message):
            continue
        if found and found[-1][1] == index - 1:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found


def _tagged(chat: Chat, conversation: Conversation) -> _Found:
    begins, ends = GENERATION
    marked = chat.render(
        conversation.messages, tools=conversation.tools, generation_begins=begins, generation_ends=ends
    )
    text, spans, start = "", [], 0
    for piece in re.split(f"([{begins}{ends}])", marked):
        if piece == begins:
            start = len(text)
        elif piece == ends:
            spans.append((start, len(text)))
        else:
            text += piece
    return _Found(text=text, answers=tuple(spans), served=(True,) * len(spans))


def _prompted(chat: Chat, conversation: Conversation) -> _Found:
    messages, tools, marks = conversation.messages, conversation.tools, chat.marks
    text = chat.render(messages, tools=tools)
    answers, served, floor = [], [], 0
    listed = turns(messages)
    span = None
    for first, last in listed:
        prompt = chat.render(messages[:first], tools=tools, prompt=True)
        whole = text if last == len(messages) - 1 else chat.render(messages[: last + 1], tools=tools)
        begin = prompt if marks.prompted else prompt + marks.begin
        span = (len(begin), len(whole)) if text.startswith(begin) and text.startswith(whole) else None
        as_served = text.startswith(prompt) and common_length(text, whole) >= len(whole) - len(marks.end)
        if span is None:
            span = _exchanged(chat, conversation, text, first, last, floor)
        if span is not None:
            answers.append(span)
            served.append(as_served)
            floor = span[1]
    return _Found(
        text=text,
        answers=tuple(answers),
        served=tuple(served),
        missed=len(listed) - len(answers),
        last_found=span is not None,
    )


def _exchanged(
    chat: Chat, conversation: Conversation, text: str, first: int, last: int, floor: int
) -> tuple[int, int] | None:
    """The answer of messages first..last: what changes when other text stands in its place."""
    messages, marks = conversation.messages, chat.marks
    other = {"role": messages[last]["role"], "content": ANSWERED}
    try:
        changed = chat.render([*messages[:first], other, *messages[last + 1 :]], tools=conversation.tools)
    except ValueError:
        return None  # later messages refer to what was exchanged
    before = common_length(text, changed)
    after = common_length(text[before:][::-1], changed[before:][::-1])
    if not changed[: len(changed) - after].endswith(ANSWERED):
        return None  # more than the answer has changed
    content_end = len(text) - after
    header = text.rfind(marks.begin, floor, before) if marks.begin else -1
    start = header + len(marks.begin) if header >= 0 else before
    if text.startswith(marks.end, content_end):
        return start, content_end + len(marks.end)
    # Another end than after a last message: the special token that follows, if one does.
    rest = text[content_end:].lstrip()
    stop = max((token for token in chat.special_tokens if rest.startswith(token)), key=len, default="")
    return start, len(text) - len(rest) + len(stop) if stop else content_end


def _cut_off(chat: Chat, found: _Found) -> _Found:
    """Without what follows the content of the answer that the conversation ends with."""
    if not found.answers or not found.last_found:
        return found
    start, _ = found.answers[-1]
    text = found.text.removesuffix(chat.marks.end)
    return dataclasses.replace(found, text=text, answers=(*found.answers[:-1], (start, len(text))))


def _refined(
    chat: Chat, text: str, answers: Sequence[tuple[int, int]], rules: AnswerRules
) -> tuple[tuple[int, int], ...]:
    if not rules.through_turn:
        answers = [(start, _stop(chat, text, start, end)) for start, end in answers]
    for string in rules.ignored:
        answers = [piece for span in answers for piece in _without(text, span, string)]
    return tuple((start, end) for start, end in answers if start < end)


def _stop(chat: Chat, text: str, start: int, end: int) -> int:
    """The end of the token that ends the turn, if white space alone follows it; else `end`."""
    written = text[start:end].rstrip()
    return start + len(written) if written.endswith(chat.special_tokens) else end


def _without(text: str, span: tuple[int, int], string: str) -> list[tuple[int, int]]:
    """The pieces of a span that lie in no occurrence of `string`."""
    pieces, position = [], span[0]
    for found in re.finditer(re.escape(string), text):
        if found.end() > position and found.start() < span[1]:
            pieces.append((position, found.start()))
            position = found.end()
    return [*pieces, (position, span[1])]
