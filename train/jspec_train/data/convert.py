"""From a row of data to samples."""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from jspec_train.data.answers import AnswerRules, Marked, find_answers, find_answers_in_text, turns
from jspec_train.data.chat import Chat
from jspec_train.data.conversations import COLUMNS, Conversation, clean, is_answer, read_conversation
from jspec_train.data.report import CUT, NO_ANSWER_FOUND, NO_USER, REFUSED, TOO_LITTLE, Outcome
from jspec_train.data.rows import Row
from jspec_train.data.supervision import longest_run
from jspec_train.data.tokens import Tokens, tokenise
from jspec_train.sample import Sample

_MOST_CHATS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How rows become samples."""

    max_length: int
    min_run: int = 2  # trained tokens in a row that a sample needs: 2 for block drafters, 1 for others
    rules: AnswerRules = dataclasses.field(default_factory=AnswerRules)
    system: str | None = None  # for conversations that begin without a system message
    each_turn: bool = False  # a sample for every answer, with the conversation up to it
    strict: bool = False  # an order of roles that is none raises instead of being cut
    task: str = ""  # of rows without a column "task"
    template_columns: tuple[str, ...] = ()  # columns that are passed to the template as variables
    vocab_size: int  # ids of rows that bring ids are less
    mask_token_id: int | None = None  # must not occur

    def __post_init__(self):
        """Refuses numbers that make no sample.

        Raises:
          ValueError: naming the setting.
        """
        if self.max_length < 2:
            raise ValueError(f"max_length: expected 2 or more, got {self.max_length}")
        if not 1 <= self.min_run <= self.max_length:
            raise ValueError(f"min_run: expected 1 to max_length ({self.max_length}), got {self.min_run}")


class Converter:
    """Makes samples of rows."""

    def __init__(self, chat: Chat, settings: Settings):
        """Keeps one chat for each set of template variables that the rows bring."""
        self.settings = settings
        self.chat = chat
        self._chats: dict[str, Chat] = {}

    def convert(self, row: Row) -> tuple[tuple[Sample, ...], Outcome]:
        """The samples of a row, usually one, and what became of it.

        Raises:
          ValueError: the row is not of a known form; the message begins with its file and line.
        """
        values = row.values
        if any(name in values for name in COLUMNS):
            return self._conversation(row)
        if "text" in values:
            return self._text(row)
        if "input_ids" in values:
            return self._tokens(row)
        raise ValueError(
            f"{row.where}: expected a column {', '.join(COLUMNS)}, text, or input_ids with loss_mask, "
            f"got {sorted(values)}; rename yours"
        )

    def question(self, row: Row) -> str:
        """What decides on which side of a split a row goes: its first user message, or all before its first answer.

        Raises:
          ValueError: as in `convert`.
        """
        values = row.values
        column = next((name for name in COLUMNS if name in values), None)
        if column is not None:
            messages = read_conversation(row.where, values, column).messages
            return next((message["content"] for message in messages if message["role"] == "user"), "")
        if isinstance(values.get("text"), str):
            answers = find_answers_in_text(self._chat_of(row), values["text"], AnswerRules()).answers
            return values["text"][: answers[0][0]] if answers else values["text"]
        mask = list(values.get("loss_mask", ()))
        return json.dumps(values.get("input_ids", [])[: mask.index(1) if 1 in mask else None])

    def conversation(self, row: Row) -> Conversation:
        """The cleaned conversation of a row; without messages if it holds no question.

        Raises:
          ValueError: the row holds none, or one of an unknown form; with `strict`, one out of order.
        """
        column = next((name for name in COLUMNS if name in row.values), None)
        if column is None:
            raise ValueError(
                f"{row.where}: expected a column {' or '.join(COLUMNS)}, got {sorted(row.values)}; rename yours"
            )
        given = read_conversation(row.where, row.values, column)
        cleaned = clean(given, system=self.settings.system)
        if cleaned.cut and self.settings.strict:
            roles = [message["role"] for message in given.messages]
            raise ValueError(
                f"{row.where}: expected answers after user or tool messages and tool messages after answers, "
                f"got the order {', '.join(roles)}; mend the row, or leave --strict out to use its beginning"
            )
        return cleaned

    def _conversation(self, row: Row) -> tuple[tuple[Sample, ...], Outcome]:
        cleaned = self.conversation(row)
        if not any(map(is_answer, cleaned.messages)):
            return (), Outcome(dropped=NO_USER, out_of_order=cleaned.cut)
        chat = self._chat_of(row)
        _ = chat.marks  # an unusable template is no fault of the row
        rules, parts = self.settings.rules, [cleaned]
        if self.settings.each_turn:
            rules = dataclasses.replace(rules, last_only=True)
            parts = [_up_to(cleaned, last) for _, last in turns(cleaned.messages)]
        unfinished = row.values.get("finish_reason") == "length"
        try:
            marked = [
                find_answers(chat, part, rules, unfinished=unfinished and part is parts[-1]) for part in parts
            ]
        except ValueError as problem:
            return (), Outcome(dropped=REFUSED, detail=f"({problem})", out_of_order=cleaned.cut)
        samples, outcome = self._samples(row, chat, marked)
        return samples, dataclasses.replace(outcome, out_of_order=cleaned.cut)

    def _text(self, row: Row) -> tuple[tuple[Sample, ...], Outcome]:
        text, chat = row.values["text"], self._chat_of(row)
        if not isinstance(text, str):
            raise ValueError(f"{row.where}: expected a string in 'text', got {text!r:.60}")
        return self._samples(row, chat, [find_answers_in_text(chat, text, self.settings.rules)])

    def _tokens(self, row: Row) -> tuple[tuple[Sample, ...], Outcome]:
        arrays = {}
        for name in ("input_ids", "loss_mask"):
            values = row.values.get(name)
            whole = isinstance(values, Sequence) and all(isinstance(value, int) for value in values)
            if not whole:
                raise ValueError(f"{row.where}: expected whole numbers in {name!r}, got {values!r:.60}")
            arrays[name] = np.asarray(values, np.int64)
        ids, mask = arrays["input_ids"], arrays["loss_mask"]
        if not ids.size or ids.shape != mask.shape or not np.isin(mask, (0, 1)).all():
            raise ValueError(
                f"{row.where}: expected as many loss_mask values, 0 or 1, as input_ids and at least one, "
                f"got {ids.size} ids and {mask.size} values"
            )
        if ids.min() < 0 or ids.max() >= self.settings.vocab_size:
            strange = int(ids.max() if ids.min() >= 0 else ids.min())
            raise ValueError(
                f"{row.where}: expected input_ids from 0 to {self.settings.vocab_size - 1}, got {strange}; "
                "tokenise with the target's tokenizer"
            )
        tokens = Tokens(ids=ids.astype(np.int32), loss_mask=mask.astype(np.bool_), exact=True)
        sample, outcome = self._sample(row, self._id(row), tokens)
        return (() if sample is None else (sample,)), outcome

    def _samples(self, row: Row, chat: Chat, marked: Sequence[Marked]) -> tuple[tuple[Sample, ...], Outcome]:
        samples: list[Sample] = []
        outcome = Outcome(dropped=NO_ANSWER_FOUND)
        for number, part in enumerate(marked):
            tokens = tokenise(chat.tokenizer, part.text, part.answers)
            name = self._id(row) if len(marked) == 1 else f"{self._id(row)}#{number}"
            sample, one = self._sample(row, name, tokens)
            samples += [] if sample is None else [sample]
            outcome = Outcome(
                kept=len(samples),
                dropped=None if samples else one.dropped,
                truncated=outcome.truncated or one.truncated,
                unserved=outcome.unserved + part.unserved,
                missed=outcome.missed + part.missed,
                retokenised=outcome.retokenised or not tokens.exact,
                longest_answer=max(outcome.longest_answer, one.longest_answer),
            )
        return tuple(samples), outcome

    def _sample(self, row: Row, name: str, tokens: Tokens) -> tuple[Sample | None, Outcome]:
        """Cuts, and drops what has too little to learn from."""
        limit, masked = self.settings.max_length, self.settings.mask_token_id
        if masked is not None and (tokens.ids == masked).any():
            raise ValueError(
                f"mask_token_id: expected an id that does not occur in the data, got {masked}, which stands in "
                f"{row.where}; choose an unused one"
            )
        ids, mask = tokens.ids[:limit], tokens.loss_mask[:limit]
        truncated, run = tokens.ids.size > limit, longest_run(mask)
        if run < self.settings.min_run:
            if not tokens.loss_mask.any():
                reason = NO_ANSWER_FOUND
            else:
                reason = CUT if longest_run(tokens.loss_mask) >= self.settings.min_run else TOO_LITTLE
            return None, Outcome(dropped=reason, truncated=truncated)
        task = str(row.values.get("task", self.settings.task))
        sample = Sample(id=name, ids=ids, loss_mask=mask, task=task)
        return sample, Outcome(kept=1, truncated=truncated, longest_answer=run)

    def _chat_of(self, row: Row) -> Chat:
        if not self.chat.tokenizer.chat_templates:
            raise ValueError(
                f"{row.where}: expected a tokenizer with a chat template, got one without; pass a template, or rows "
                "of input_ids and loss_mask"
            )
        more = {name: row.values[name] for name in self.settings.template_columns if name in row.values}
        if not more:
            return self.chat
        key = json.dumps(more, sort_keys=True)
        if key not in self._chats:
            if len(self._chats) == _MOST_CHATS:
                self._chats.clear()
            self._chats[key] = dataclasses.replace(self.chat, variables={**self.chat.variables, **more})
        return self._chats[key]

    def _id(self, row: Row) -> str:
        return str(row.values.get("id", row.where))


def _up_to(conversation: Conversation, last: int) -> Conversation:
    return dataclasses.replace(conversation, messages=conversation.messages[: last + 1])
