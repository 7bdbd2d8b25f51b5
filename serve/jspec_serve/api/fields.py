"""What the requests of all generating endpoints share, and how their errors are worded."""

import abc
import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jspec.grammar.grammar import Grammar
from jspec.settings import Settings
from jspec_serve.problem import Problem

Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]

NOTHING = object()
# Settings that go by another name in requests.
FIELD_OF_SETTING = {
    "log_probs": "logprobs",
    "draft_length": "speculation.draft_length",
    "min_confidence": "speculation.min_confidence",
}


class Strict(BaseModel):
    """JSON as it was sent: nothing is converted, and a name that is not known is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Fields of OpenAI's API that would change the answer and are not served, and why.
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, values: Any) -> Any:
        """Clients that write every field send null for those that they do not use."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if v is not None or k not in cls.UNSUPPORTED}


class StreamOptions(Strict):
    """What a stream tells besides the text."""

    include_usage: bool = False
    include_tokens: Annotated[
        bool, Field(description="Ids of each chunk's tokens, which of them were drafted, and verify lengths.")
    ] = False


class Speculation(Strict):
    """How much is drafted for one request."""

    draft_length: (
        Annotated[int, Field(ge=0, description="Most draft tokens a round; 0 = none, null = the drafter's.")]
        | None
    ) = None
    min_confidence: Annotated[
        float,
        Field(ge=0, le=1, description="Least probability of a draft token, by the drafter, to be verified."),
    ] = 0.0


class TagField(Strict):
    """A stretch of free text that has a form; see `jspec.StructuralTag`."""

    begin: Annotated[str, Field(min_length=1)]
    json_schema: dict[str, Any] | None = None
    lark: str | None = None
    end: str | None = None
    trigger: Annotated[str, Field(min_length=1)] | None = None


class GrammarField(Strict):
    """The form of the answer: exactly one of all but `after`; see `jspec.Grammar`."""

    json_schema: dict[str, Any] | None = None
    json_object: Literal[True] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    lark: Annotated[str, Field(min_length=1)] | None = None
    ebnf: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    structural_tags: Annotated[list[TagField], Field(min_length=1)] | None = None
    after: (
        Annotated[str, Field(min_length=1, description='Text behind which it begins, such as "</think>".')]
        | None
    ) = None


class SamplingRequest(Strict):
    """How to sample; null is the same as leaving a field out."""

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[BiasKey, Bias] | None = None
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    user: str | None = None
    # Not OpenAI's.
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    speculation: Literal["on", "off"] | Speculation | None = None
    grammar: GrammarField | None = None
    priority: (
        Annotated[
            int, Field(ge=-100, le=100, description="Greater ones go first, and may interrupt lesser ones.")
        ]
        | None
    ) = None

    @property
    def choices(self) -> int:
        """Answers for each prompt."""
        return 1

    @property
    @abc.abstractmethod
    def tokens_asked(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""

    @property
    @abc.abstractmethod
    def form(self) -> Grammar | None:
        """What the answer must look like; raises Problem for what is no grammar."""

    @property
    def form_fields(self) -> Mapping[str, str]:
        """Where the form came from, by the names that the engine has for it."""
        return {}

    def check_stream(self) -> None:
        """Raises Problem for options of a stream that is none."""

    def settings(self, *, max_tokens: int, log_probs: int | None, prompt_log_probs: bool = False) -> Settings:
        """The request as the engine takes it.

        Args:
          max_tokens: resolved against the context.
          log_probs: alternatives to report; None = no log-probabilities.
          prompt_log_probs: report those of the prompt, too.

        Raises:
          Problem: 400; the engine refuses a value, or two that do not go together.
        """
        speculation = Speculation()
        if self.speculation == "off":
            speculation = Speculation(draft_length=0)
        elif isinstance(self.speculation, Speculation):
            speculation = self.speculation
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "seed": self.seed,
            "grammar": self.form,
        }
        if self.logit_bias is not None:
            given["logit_bias"] = {int(id_): bias for id_, bias in self.logit_bias.items()}
        with_values = {name: value for name, value in given.items() if value is not None}
        try:
            return Settings(
                max_tokens=max_tokens,
                log_probs=log_probs,
                prompt_log_probs=prompt_log_probs,
                draft_length=speculation.draft_length,
                min_confidence=speculation.min_confidence,
                stop=stop,
                **with_values,
            )
        except ValueError as problem:
            raise refused(problem, fields=self.form_fields) from problem


class GenerationRequest(SamplingRequest):
    """What chats and completions share besides."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None

    @property
    def choices(self) -> int:
        """Answers for each prompt."""
        return self.n or 1

    @property
    def tokens_asked(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def tells_tokens(self) -> bool:
        """Whether a stream's chunks name their tokens."""
        return self.stream_options is not None and self.stream_options.include_tokens

    def check_stream(self) -> None:
        """Raises Problem for options of a stream that is none."""
        if self.stream_options is not None and not self.stream:
            raise Problem(
                400,
                'stream_options: expected nothing without "stream": true, got some; drop them or stream',
                param="stream_options",
            )


def refused(
    problem: ValueError,
    *,
    prompt: str = "prompt",
    prompts: int = 1,
    choices: int = 1,
    fields: Mapping[str, str] = types.MappingProxyType({}),
) -> Problem:
    """A refusal of the engine as a reply that names the request's field.

    Args:
      problem: `prompts[3]: expected ...`, `settings[0].top_k: expected ...` or `top_k: expected ...`.
      prompt: the field that the prompts came in.
      prompts: how many there are.
      choices: answers for each prompt; the engine was given it as often.
      fields: that settings came in, where that is not their own name.
    """
    name, _, rest = str(problem).partition(": expected")
    field = name.rpartition("].")[2] if name.startswith("settings[") else name
    field = fields.get(field) or FIELD_OF_SETTING.get(field, field)
    if found := re.fullmatch(r"prompts\[(\d+)\](.*)", field):
        number = f"[{int(found[1]) // choices}]" if prompts > 1 else ""
        field = f"{prompt}{number}{found[2]}"
    if not rest or not field.replace("[", "").replace("]", "").replace("_", "").replace(".", "").isalnum():
        return Problem(400, str(problem), param=prompt)
    return Problem(400, f"{field}: expected{rest}", param=field)


def of_choice(settings: Settings, number: int) -> Settings:
    """The settings of one of n answers: a seed counts up, so that they differ."""
    if settings.seed is None or number == 0:
        return settings
    return dataclasses.replace(settings, seed=(settings.seed + number) % 2**32)


def validation_problem(errors: Sequence[Mapping[str, Any]], model: type[Strict], body: Any) -> Problem:
    """Pydantic's errors as one reply, which names every field at fault."""
    messages: dict[str, list[str]] = {}
    code = None
    for error in errors:
        param = path_of(error["loc"], body, missing=error["type"] == "missing")
        if error["type"] == "extra_forbidden":
            name = str(error["loc"][-1])
            if reason := model.UNSUPPORTED.get(name):
                code, said = "unsupported_parameter", f"not supported: {reason}"
            else:
                code, said = code or "unknown_parameter", "unknown field; remove it"
        elif error["type"] == "missing":
            said = "missing; this field is required"
        elif error["type"] == "json_invalid":
            said = f"expected JSON: {error.get('ctx', {}).get('error', error['msg'])}"
        else:
            said = f"{_lowered(error['msg'])}, got {_shown(error.get('input'))}"
        messages.setdefault(param, []).append(said)
    # A member of a union that got further knows better what is wrong.
    vague = {p for p in messages for q in messages if q.startswith((f"{p}.", f"{p}["))}
    messages = {param: said for param, said in messages.items() if param not in vague}
    listed = [f"{param}: {', or '.join(dict.fromkeys(said))}" for param, said in messages.items()]
    if len(listed) > 8:
        listed = [*listed[:8], f"and {len(listed) - 8} more"]
    return Problem(400, "; ".join(listed), param=next(iter(messages), None), code=code)


def path_of(location: Sequence[str | int], body: Any, *, missing: bool = False) -> str:
    """A field as its sender would write it: pydantic's location without the names of union members.

    Args:
      location: steps from the request down.
      body: that was sent.
      missing: the last step is a field that is not there.
    """
    path, value = "", body
    steps = list(location[1:] if location and location[0] == "body" else location)
    for number, step in enumerate(steps):
        child = _child(value, step)
        if child is not NOTHING:
            value = child
        elif not missing or number < len(steps) - 1:
            continue  # a member of a union
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path or "body"


def _child(value: Any, step: Any) -> Any:
    if isinstance(value, dict) and step in value:
        return value[step]
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return NOTHING


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
