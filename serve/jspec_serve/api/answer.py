"""Answers of generating endpoints as they grow, the part that chats and completions share."""

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jspec_serve.api.fields import GenerationRequest
from jspec_serve.calls import Times, Update
from jspec_serve.service import Prepared, Service


class Answer(abc.ABC):
    """Takes a call's updates; gives the chunks of a stream, or the whole."""

    prefix: str  # of ids

    def __init__(self, service: Service, body: GenerationRequest, prepared: Prepared):
        """Of a call that was just submitted."""
        self.service, self.body, self.prepared = service, body, prepared
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.completion_tokens = 0
        self.times: list[Times] = []
        self.finish_reasons: dict[int, str] = {}

    def add(self, update: Update) -> list[dict[str, Any]]:
        """Takes an update; returns the chunks that a stream sends for it."""
        self.completion_tokens += len(update.piece.token_ids)
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

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, however many answers it has."""
        prompts: Sequence[Any] = self.prepared.requests[:: self.prepared.choices]
        prompt_tokens = sum(len(request.prompt_ids) for request in prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
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
