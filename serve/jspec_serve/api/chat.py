"""/v1/chat/completions: messages in, a message out."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from jspec.grammar.grammar import Grammar
from jspec_serve.api.answer import ChoicesAnswer
from jspec_serve.api.call_forms import FIELDS, call_form
from jspec_serve.api.fields import GenerationRequest, refused
from jspec_serve.api.forms import ChatForm, field_names, grammar_of
from jspec_serve.api.messages import Message, template_messages
from jspec_serve.api.speculation_details import spec_details
from jspec_serve.api.tools import Called, CallReader, Tool, ToolChoice, template_tools
from jspec_serve.calls import Update
from jspec_serve.problem import Problem
from jspec_serve.service import Prepared, Service

RESERVED_VARIABLES = {"messages", "tools"}  # of chat templates


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "audio": "models here write text",
        "modalities": "models here write text",
        "prediction": "drafts come from the server's drafter",
        "functions": "it is deprecated; use tools",
        "function_call": "it is deprecated; use tool_choice",
        "store": "nothing is stored here",
        "metadata": "nothing is stored here",
        "service_tier": "there is one tier",
        "reasoning_effort": "pass what the chat template reads in chat_template_kwargs",
        "verbosity": "no model here reads it",
        "web_search_options": "there is no web search here",
        "prompt_cache_key": "prefixes are found by their tokens",
        "safety_identifier": "nothing is moderated here",
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ChatForm | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Not OpenAI's.
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def tokens_asked(self) -> tuple[str, int | None]:
        """The newer name wins over the deprecated one; both are refused in `prepare_chat`."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().tokens_asked

    @property
    def form(self) -> Grammar | None:
        """See `SamplingRequest`."""
        return grammar_of(self.response_format, self.grammar, self.calls)

    @property
    def form_fields(self) -> Mapping[str, str]:
        """See `SamplingRequest`."""
        if self.calls:
            return FIELDS
        return field_names("response_format", "response_format.json_schema.schema", self.response_format)

    @property
    def calls(self) -> dict[str, Any]:
        """The form that its tools ask for."""
        return call_form(self.tools, self.tool_choice, self.parallel_tool_calls)


def prepare_chat(service: Service, body: ChatRequest) -> Prepared:
    """Checks a request and puts its messages through the chat template; see `Service.prepare`."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise Problem(
            400,
            "max_tokens: expected nothing beside max_completion_tokens, which means the same, got both; drop one",
            param="max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(
            400,
            'top_logprobs: expected nothing without "logprobs": true, got some; set logprobs too',
            param="top_logprobs",
        )
    tools = template_tools(service.tokenizer, body.tools, body.tool_choice, body.parallel_tool_calls)
    ids = encode_chat(service, body.messages, tools, body.chat_template_kwargs or {}, field="messages")
    log_probs = (body.top_logprobs or 0) if body.logprobs else None
    return service.prepare(body, [ids], prompt="messages", log_probs=log_probs)


def encode_chat(
    service: Service,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
    *,
    field: str,
) -> list[int]:
    """Token ids of messages.

    Args:
      service: has the tokenizer.
      messages: of the chat.
      tools: for the template; None = none.
      variables: what else the template shall read.
      field: the messages came in, for errors.

    Raises:
      Problem: 400; the template refuses them, or a variable has a field of its own.
    """
    if reserved := RESERVED_VARIABLES & set(variables):
        raise Problem(
            400,
            f"chat_template_kwargs: expected no {', '.join(sorted(reserved))} in it, which have fields of their own; "
            "move them there",
            param="chat_template_kwargs",
        )
    given = dict(variables) | ({"tools": tools} if tools else {})
    try:
        return service.tokenizer.chat(template_messages(messages), **given)
    except ValueError as problem:
        raise refused(problem, prompt=field) from problem


class ChatAnswer(ChoicesAnswer[ChatRequest]):
    """The reply to a `ChatRequest`."""

    prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, prepared: Prepared):
        """See `Answer`."""
        super().__init__(service, body, prepared)
        self._choices = [
            {
                "index": number,
                "message": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
            for number in range(len(prepared.requests))
        ]
        reads_calls = bool(body.tools) and body.tool_choice != "none"
        self._readers = [CallReader() if reads_calls else None for _ in prepared.requests]

    def _add(self, update: Update) -> list[dict[str, Any]]:
        number, piece = update.choice, update.piece
        choice, reader = self._choices[number], self._readers[number]
        part = None if piece.log_probs is None else self.service.token_text.chat_log_probs(piece.log_probs)
        if part is not None:
            known = choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            known["content"].extend(part["content"])
        last = update.result is not None
        found = [piece.text] if reader is None else reader.push(piece.text, last=last)
        delta = self._said(choice["message"], found)
        if number not in self._begun:
            delta = {"role": "assistant", "content": "", **delta}
            self._begun.add(number)
        chunk: dict[str, Any] = {"index": number, "delta": delta, "logprobs": part, "finish_reason": None}
        if self.body.tells_tokens:
            chunk["tokens"] = self._tokens[number].push(piece)
        if update.result is not None:
            choice["spec"] = chunk["spec"] = spec_details(self.service.engine, update.result)
            reason = str(piece.finish_reason)
            if reader is not None and reader.num_calls and reason == "stop":
                reason = "tool_calls"
            choice["finish_reason"] = chunk["finish_reason"] = self.finish_reasons[number] = reason
        if not delta and part is None and not last and not self.body.tells_tokens:
            return []
        return [self._chunk([chunk])]

    def _said(self, message: dict[str, Any], found: Sequence[str | Called]) -> dict[str, Any]:
        """Adds text and calls to a choice's message; returns them as a stream's delta."""
        text = "".join(one for one in found if isinstance(one, str))
        delta: dict[str, Any] = {"content": text} if text else {}
        message["content"] = (message["content"] or "") + text
        calls = [one.message() for one in found if isinstance(one, Called)]
        if calls:
            known = message.setdefault("tool_calls", [])
            delta["tool_calls"] = [{"index": len(known) + n, **call} for n, call in enumerate(calls)]
            known.extend(calls)
        if message.get("tool_calls") and not message["content"]:
            message["content"] = None
        return delta
