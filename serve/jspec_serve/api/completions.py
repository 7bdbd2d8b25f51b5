"""/v1/completions: text or ids in, text out."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from jspec.grammar.grammar import Grammar
from jspec_serve.api.answer import ChoicesAnswer
from jspec_serve.api.fields import GenerationRequest, StopString, TokenId, refused
from jspec_serve.api.forms import grammar_of
from jspec_serve.api.speculation_details import spec_details
from jspec_serve.api.token_text import CompletionLogProbs
from jspec_serve.calls import Update
from jspec_serve.problem import Problem
from jspec_serve.service import COMPLETION_TOKENS, Prepared, Service

Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "suffix": "models here write what follows, they fill no gaps",
        "best_of": "every answer is returned; use n",
    }

    prompt: (
        StopString
        | Annotated[list[StopString], Field(min_length=1)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0, description="0 = only the prompt, with echo.")] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def form(self) -> Grammar | None:
        """See `SamplingRequest`."""
        return grammar_of(None, self.grammar)

    @property
    def tokens_asked(self) -> tuple[str, int | None]:
        """The engine emits a token at least; the answer leaves it out if none was asked for."""
        return "max_tokens", None if self.max_tokens is None else max(self.max_tokens, 1)


def prepare_completion(service: Service, body: CompletionRequest) -> Prepared:
    """Checks and encodes a request; see `Service.prepare`."""
    if body.max_tokens == 0 and not body.echo:
        raise Problem(
            400,
            'max_tokens: expected at least 1 without "echo": true, got 0; the answer would be empty',
            param="max_tokens",
        )
    try:
        prompts = [
            service.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts
        ]
    except ValueError as problem:
        raise refused(problem) from problem
    return service.prepare(
        body,
        prompts,
        prompt="prompt",
        log_probs=body.logprobs,
        prompt_log_probs=bool(body.echo) and body.logprobs is not None,
        default_tokens=COMPLETION_TOKENS,
    )


class CompletionAnswer(ChoicesAnswer[CompletionRequest]):
    """The reply to a `CompletionRequest`."""

    prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, prepared: Prepared):
        """See `Answer`."""
        super().__init__(service, body, prepared)
        self.echoed = [
            service.tokenizer.decode(request.prompt_ids) if body.echo else "" for request in prepared.requests
        ]
        self._choices = [
            {"index": number, "text": echoed, "logprobs": None, "finish_reason": None}
            for number, echoed in enumerate(self.echoed)
        ]
        self._log_probs = [CompletionLogProbs(service.tokenizer, offset=len(one)) for one in self.echoed]

    def add(self, update: Update) -> list[dict[str, Any]]:
        """See `Answer`."""
        return super().add(_without_answer(update) if self.body.max_tokens == 0 else update)

    def _add(self, update: Update) -> list[dict[str, Any]]:
        number, piece = update.choice, update.piece
        choice = self._choices[number]
        choice["text"] += piece.text
        part = None if piece.log_probs is None else self._log_probs[number].push(piece.log_probs)
        if part is not None and piece.prompt_log_probs is not None:
            first, *_ = self.prepared.requests[number].prompt_ids
            before = CompletionLogProbs(self.service.tokenizer).prompt(first, piece.prompt_log_probs)
            part = {key: [*before[key], *part[key]] for key in part}
        if part is not None:
            known = choice["logprobs"] = choice["logprobs"] or {key: [] for key in part}
            for key, values in part.items():
                known[key].extend(values)
        text = piece.text if number in self._begun else self.echoed[number] + piece.text
        self._begun.add(number)
        chunk = {"index": number, "text": text, "logprobs": part, "finish_reason": piece.finish_reason}
        if self.body.tells_tokens:
            chunk["tokens"] = self._tokens[number].push(piece)
        if update.result is not None:
            choice["spec"] = chunk["spec"] = spec_details(self.service.engine, update.result)
            choice["finish_reason"] = piece.finish_reason
            self.finish_reasons[number] = str(piece.finish_reason)
        if not text and part is None and update.result is None and not self.body.tells_tokens:
            return []
        return [self._chunk([chunk])]


def _without_answer(update: Update) -> Update:
    """The prompt alone: as if no token had followed."""
    piece = dataclasses.replace(
        update.piece,
        text="",
        token_ids=(),
        drafted=(),
        log_probs=None if update.piece.log_probs is None else (),
        finish_reason="length",
    )
    return dataclasses.replace(update, piece=piece)
