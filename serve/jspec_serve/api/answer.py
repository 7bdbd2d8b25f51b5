"""Answers of generating endpoints as they grow, the part that chats and completions share."""

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from pydantic_core import to_json

from jspec_serve.api.fields import GenerationRequest, SamplingRequest
from jspec_serve.api.speculation_details import TokenDetails
from jspec_serve.calls import Times, Update
from jspec_serve.problem import Problem
from jspec_serve.service import Prepared, Service

Body = TypeVar("Body", bound=SamplingRequest)
GenerationBody = TypeVar("GenerationBody", bound=GenerationRequest)


class Answer(abc.ABC, Generic[Body]):
    """Takes a call's updates; gives the chunks of a stream, or the whole."""

    prefix: str  # of ids
    stream_end = b"data: [DONE]\n\n"

    def __init__(self, service: Service, body: Body, prepared: Prepared):
        """Of a call that was just submitted."""
        self.service, self.body, self.prepared = service, body, prepared
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.completion_tokens = 0
        self._reused = [0] * len(prepared.requests)
        self.times: list[Times] = []
        self.finish_reasons: dict[int, str] = {}

    def add(self, update: Update) -> list[dict[str, Any]]:
        """Takes an update; returns the chunks that a stream sends for it."""
        self.completion_tokens += len(update.piece.token_ids)
        self._reused[update.choice] = update.piece.reused
        if update.times is not None:
            self.times.append(update.times)
        return self._add(update)

    @abc.abstractmethod
    def _add(self, update: Update) -> list[dict[str, Any]]:
        """See `add`."""

    @abc.abstractmethod
    def whole(self) -> dict[str, Any]:
        """The reply without a stream, after the last update."""

    @abc.abstractmethod
    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream sends after the last update."""

    def event(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as a server-sent event."""
        return b"data: " + to_json(chunk) + b"\n\n"

    def failure(self, problem: Problem) -> dict[str, Any]:
        """The chunk that tells of a failure after the stream's begin."""
        return problem.body

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many answers it has; so does what the prefix cache had."""
        prompts: Sequence[Any] = self.prepared.requests[:: self.prepared.choices]
        prompt_tokens = sum(len(request.prompt_ids) for request in prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._reused[:: self.prepared.choices])},
        }

    @property
    def header(self) -> dict[str, Any]:
        """Fields of every reply and chunk."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.name,
            "system_fingerprint": self.service.fingerprint,
        }


class ChoicesAnswer(Answer[GenerationBody]):
    """An answer of numbered choices: a chat's or a completion's."""

    object_name: str
    chunk_name: str  # "object" of a stream's chunks

    def __init__(self, service: Service, body: GenerationBody, prepared: Prepared):
        """See `Answer`."""
        super().__init__(service, body, prepared)
        self._choices: list[dict[str, Any]] = []
        self._begun: set[int] = set()
        self._tokens = [TokenDetails(service.tokenizer) for _ in prepared.requests]

    def _chunk(self, choices: list[dict[str, Any]], usage: Any = None) -> dict[str, Any]:
        chunk = self.header | {"object": self.chunk_name, "choices": choices}
        return chunk | {"usage": usage} if self.body.tells_usage else chunk

    def last_chunks(self) -> list[dict[str, Any]]:
        """The usage, if it was asked for."""
        return [self._chunk([], usage=self.usage)] if self.body.tells_usage else []

    def whole(self) -> dict[str, Any]:
        """See `Answer`."""
        return self.header | {"object": self.object_name, "choices": self._choices, "usage": self.usage}
