"""The generating endpoints by their paths, for HTTP and for batches."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jspec_serve.api.answer import Answer
from jspec_serve.api.chat import ChatAnswer, ChatRequest, prepare_chat
from jspec_serve.api.completions import CompletionAnswer, CompletionRequest, prepare_completion
from jspec_serve.api.fields import SamplingRequest
from jspec_serve.api.responses import ResponseAnswer, ResponsesRequest, prepare_response
from jspec_serve.service import Prepared, Service


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What makes an answer of a body."""

    body: type[SamplingRequest]
    prepare: Callable[[Service, Any], Prepared]  # blocks: runs in a thread of its own
    answer: Callable[[Service, Any, Prepared], Answer[Any]]


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(body=ChatRequest, prepare=prepare_chat, answer=ChatAnswer),
    "/v1/responses": Endpoint(body=ResponsesRequest, prepare=prepare_response, answer=ResponseAnswer),
    "/v1/completions": Endpoint(body=CompletionRequest, prepare=prepare_completion, answer=CompletionAnswer),
}
