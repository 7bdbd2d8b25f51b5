"""/v1/responses: input items in, output items out. Nothing is stored, so every call brings its whole chat."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json

from jspec.grammar.grammar import Grammar
from jspec_serve.api.answer import Answer
from jspec_serve.api.call_forms import FIELDS, call_form
from jspec_serve.api.chat import encode_chat
from jspec_serve.api.fields import SamplingRequest, Strict
from jspec_serve.api.forms import (
    FlatJsonSchemaForm,
    JsonObjectForm,
    ResponseForm,
    TextForm,
    field_names,
    grammar_of,
)
from jspec_serve.api.messages import FunctionCall, Message, ToolCall
from jspec_serve.api.output_items import OutputItems
from jspec_serve.api.speculation_details import spec_details
from jspec_serve.api.tools import (
    CallReader,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    template_tools,
)
from jspec_serve.calls import Update
from jspec_serve.problem import Problem
from jspec_serve.service import Prepared, Service

LOG_PROBS = "message.output_text.logprobs"
Status = Literal["in_progress", "completed", "incomplete"]


class ResponseText(Strict):
    """A part of an item's content."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Strict):
    """A message of anybody; the assistant's are sent back as they came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ResponseText]
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(Strict):
    """A call that the model made before."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionOutputItem(Strict):
    """What such a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: Status | None = None


def _kind_of_item(value: Any) -> Any:
    """Messages need not say that they are one."""
    return (value.get("type") or "message") if isinstance(value, dict) else getattr(value, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_kind_of_item),
]


class FunctionTool(Function):
    """A function; unlike in chats its fields lie beside its type."""

    type: Literal["function"]


class NamedFunctionTool(Strict):
    """A choice of one function."""

    type: Literal["function"]
    name: str


class TextOptions(Strict):
    """How text is formed."""

    format: ResponseForm | None = None


class ResponsesRequest(SamplingRequest):
    """Body of /v1/responses."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "previous_response_id": "nothing is stored here; send the whole chat as input",
        "conversation": "nothing is stored here; send the whole chat as input",
        "background": "nothing is stored here; wait for the answer",
        "metadata": "nothing is stored here",
        "prompt": "nothing is stored here; send instructions and input",
        "reasoning": "pass what the chat template reads in chat_template_kwargs",
        "service_tier": "there is one tier",
        "max_tool_calls": "only the client calls functions",
        "prompt_cache_key": "prefixes are found by their tokens",
        "safety_identifier": "nothing is moderated here",
        "stream_options": "streams here have no obfuscation, and always end with the usage",
    }

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # not OpenAI's

    @property
    def tokens_asked(self) -> tuple[str, int | None]:
        """See `SamplingRequest`."""
        return "max_output_tokens", self.max_output_tokens

    @property
    def text_form(self) -> TextForm | JsonObjectForm | FlatJsonSchemaForm | None:
        """The format of the text."""
        return None if self.text is None else self.text.format

    @property
    def form(self) -> Grammar | None:
        """See `SamplingRequest`."""
        return grammar_of(self.text_form, self.grammar, self.calls)

    @property
    def form_fields(self) -> Mapping[str, str]:
        """See `SamplingRequest`."""
        if self.calls:
            return FIELDS
        return field_names("text.format", "text.format.schema", self.text_form)

    @property
    def calls(self) -> dict[str, Any]:
        """The form that its tools ask for."""
        return call_form(self.chat_tools, self.chat_choice, self.parallel_tool_calls)

    @property
    def chat_choice(self) -> ToolChoice | None:
        """The choice among the tools as chats say it."""
        choice = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            return NamedTool(type="function", function=NamedFunction(name=choice.name))
        return choice

    @property
    def chat_tools(self) -> list[Tool] | None:
        """The tools as chats declare them."""
        if self.tools is None:
            return None
        return [
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))
            for tool in self.tools
        ]


def prepare_response(service: Service, body: ResponsesRequest) -> Prepared:
    """Checks a request and puts its items through the chat template; see `Service.prepare`."""
    if body.top_logprobs is not None and LOG_PROBS not in (body.include or ()):
        raise Problem(
            400,
            f'top_logprobs: expected it with include ["{LOG_PROBS}"], got it alone; include them',
            param="top_logprobs",
        )
    tools = template_tools(service.tokenizer, body.chat_tools, body.chat_choice, body.parallel_tool_calls)
    ids = encode_chat(service, messages_of(body), tools, body.chat_template_kwargs or {}, field="input")
    log_probs = (body.top_logprobs or 0) if LOG_PROBS in (body.include or ()) else None
    return service.prepare(body, [ids], prompt="input", log_probs=log_probs)


def messages_of(body: ResponsesRequest) -> list[Message]:
    """The chat that instructions and items stand for; calls that follow each other are one message's."""
    messages: list[Message] = []
    if body.instructions is not None:
        messages.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for item in body.input:
        if isinstance(item, MessageItem):
            text = item.content if isinstance(item.content, str) else "".join(p.text for p in item.content)
            messages.append(Message(role=item.role, content=text))
        elif isinstance(item, FunctionOutputItem):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
        else:
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":
                messages[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or []), call]})
            else:
                messages.append(Message(role="assistant", tool_calls=[call]))
    return messages


class ResponseAnswer(Answer[ResponsesRequest]):
    """The reply to a `ResponsesRequest`."""

    prefix = "resp"
    stream_end = b""

    def __init__(self, service: Service, body: ResponsesRequest, prepared: Prepared):
        """See `Answer`."""
        super().__init__(service, body, prepared)
        reads_calls = bool(body.tools) and body.tool_choice != "none"
        self._reader = CallReader() if reads_calls else None
        self._items = OutputItems()
        self._status = "in_progress"
        self._spec: dict[str, Any] | None = None
        self._number = 0

    def _add(self, update: Update) -> list[dict[str, Any]]:
        piece, last = update.piece, update.result is not None
        events: list[dict[str, Any]] = []
        if not self._number:
            events += [
                {"type": f"response.{name}", "response": self.whole()} for name in ("created", "in_progress")
            ]
        log_probs: Sequence[Any] = ()
        if piece.log_probs is not None:
            log_probs = self.service.token_text.chat_log_probs(piece.log_probs)["content"]
        found = [piece.text] if self._reader is None else self._reader.push(piece.text, last=last)
        events += self._items.add(found, log_probs)
        if update.result is not None:
            reason = self.finish_reasons[0] = str(piece.finish_reason)
            self._status = "incomplete" if reason == "length" else "completed"
            self._spec = spec_details(self.service.engine, update.result)
            events += self._items.finish("incomplete" if reason == "length" else "completed")
            events.append({"type": f"response.{self._status}", "response": self.whole()})
        return [self._numbered(event) for event in events]

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return event | {"sequence_number": self._number - 1}

    def last_chunks(self) -> list[dict[str, Any]]:
        """The last update's event is the last."""
        return []

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Events here have names."""
        return b"event: " + chunk["type"].encode() + b"\ndata: " + to_json(chunk) + b"\n\n"

    def failure(self, problem: Problem) -> dict[str, Any]:
        """An event, too."""
        said = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._numbered({"type": "error", **said})

    def whole(self) -> dict[str, Any]:
        """The response as it is so far."""
        body, usage, form, choice = (
            self.body,
            self.usage,
            self.body.text_form,
            self.body.tool_choice or "auto",
        )
        ended = self._status != "in_progress"
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self._status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.service.name,
            "output": self._items.values(),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
            if ended
            else None,
            "metadata": {},
            "spec": self._spec,
        }
