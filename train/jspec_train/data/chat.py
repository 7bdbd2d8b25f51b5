"""A tokenizer's chat template as a renderer of training text, and the marks it puts around answers."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.text.tokenizer import Tokenizer
from jspec_train.data.harmony import HARMONY_TEMPLATE

# Private-use characters stand for contents, so that a template's own text can be told from them.
ASKED, ANSWERED = "\ue0a1\ue0a2", "\ue0b1\ue0b2"
GENERATION = ("\ue0c1", "\ue0c2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marks:
    """What a template writes around the assistant's content."""

    begin: str  # the end of the prompt: what a server adds before it lets the target write
    inserted: str  # between that and the content of a message without reasoning; usually nothing
    between: str  # from the question's content to the answer's
    end: str  # after the content of the last message
    prompted: bool  # the template knows add_generation_prompt
    tagged: bool  # the template marks answers itself, with {% generation %}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chat:
    """Renders conversations with one template and one set of variables."""

    tokenizer: Tokenizer
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # enable_thinking, ...
    channels: bool = False  # an answer may be several messages in a row, one a channel

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        **more: Any,
    ) -> str:
        """The template's text.

        Args:
          messages: as in `Tokenizer.render`.
          prompt: whether to end where the target's next answer begins.
          tools: JSON schemas of functions.
          **more: further variables.

        Raises:
          ValueError: there is no template, or it refuses the messages.
        """
        values = {**self.variables, **more, **({"tools": tools} if tools else {})}
        return self.tokenizer.render(messages, add_generation_prompt=prompt, **values)

    @functools.cached_property
    def marks(self) -> Marks:
        """The marks, read from what the template makes of one question and one answer.

        Raises:
          ValueError: the template does not show an answer's content.
        """
        asked = [{"role": "user", "content": ASKED}]
        begins, ends = GENERATION
        answered = [*asked, {"role": "assistant", "content": ANSWERED}]
        bare, prompt, whole = self.render(asked), self.render(asked, prompt=True), self.render(answered)
        before, found, end = whole.partition(ANSWERED)
        if not found:
            raise ValueError(
                "chat template: expected one that shows the assistant's messages, got one that shows "
                f"{whole[-60:]!r} at the end; pass the template that the target is served with"
            )
        shown = before[common_length(bare, before) :]
        prompted = prompt != bare
        if prompted:
            added = prompt[common_length(bare, prompt) :]
            begin = shown[: common_length(shown, added)]
        else:
            begin = _renamed_header(bare[: bare.find(ASKED)], shown)
        tagged = begins in self.render(answered, generation_begins=begins, generation_ends=ends)
        return Marks(
            begin=begin,
            inserted=shown[len(begin) :],
            between=before.rpartition(ASKED)[2],
            end=end,
            prompted=prompted,
            tagged=tagged,
        )

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Spelling of the tokenizer's special tokens."""
        backend = self.tokenizer.backend
        tokens = (backend.id_to_token(id_) for id_ in sorted(self.tokenizer.special_ids))
        return tuple(token for token in tokens if token)

    @functools.cached_property
    def template_hash(self) -> str:
        """SHA-256 over the template's source."""
        templates = sorted(self.tokenizer.chat_templates.items())
        return hashlib.sha256(
            "\0".join(f"{name}\0{source}" for name, source in templates).encode()
        ).hexdigest()


def chat_with_template(tokenizer: Tokenizer, template: str | None, variables: Mapping[str, Any]) -> Chat:
    """A chat of the tokenizer's own template, or of another one.

    Args:
      tokenizer: of the target.
      template: jinja2 source; "harmony" for the built-in one; None for the tokenizer's.
      variables: that the template reads.
    """
    channels = template == "harmony"
    if template is not None:
        source = HARMONY_TEMPLATE if channels else template
        tokenizer = dataclasses.replace(tokenizer, chat_templates={"default": source})
    return Chat(tokenizer=tokenizer, variables=variables, channels=channels)


def common_length(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # by halves: comparing slices is fast, comparing characters is not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _renamed_header(asked: str, shown: str) -> str:
    """An answer's header in a template without prompt: the question's header with the role exchanged.

    Args:
      asked: text up to the question's content.
      shown: text from the question's end to the answer's content.
    """
    for start in range(len(asked)):
        header = asked[start:]
        if "user" in header and shown.startswith(header.replace("user", "assistant")):
            return header.replace("user", "assistant")
    return shown
