"""The engine as replies are made with it: names, limits, the thread, and prompts made ready."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import jax

from jspec.engine import Engine
from jspec.request import Request
from jspec.text.tokenizer import Tokenizer
from jspec.timings import Timings
from jspec_serve.api.fields import SamplingRequest, of_choice, refused
from jspec_serve.api.token_text import TokenText
from jspec_serve.calls import Call
from jspec_serve.engine_thread import EngineThread
from jspec_serve.limits import Limits
from jspec_serve.metrics import Metrics
from jspec_serve.problem import Problem

COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as OpenAI has it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A call's requests, checked and encoded; nothing of it runs yet."""

    requests: tuple[Request, ...]
    choices: int  # answers for each prompt
    priority: int  # see `Session.add`


class Service:
    """One engine, served under one name."""

    def __init__(
        self, engine: Engine, *, name: str, limits: Limits | None = None, timings: Timings | None = None
    ):
        """Starts nothing yet; see `start`.

        Args:
          engine: with a tokenizer; nobody else may decode with it any more.
          name: of the model in requests and replies.
          limits: None = the defaults.
          timings: measured if given: seconds of the parts of a round.

        Raises:
          ValueError: the engine has no tokenizer.
        """
        if engine.tokenizer is None:
            raise ValueError(
                "engine: expected one with a tokenizer, got none; load the model with its tokenizer"
            )
        self.engine, self.name = engine, name
        self.tokenizer: Tokenizer = engine.tokenizer
        self.token_text = TokenText(engine.tokenizer)
        self.limits = Limits() if limits is None else limits
        self.metrics = Metrics()
        self.created = int(time.time())
        self.fingerprint = f"jspec-{engine.method.drafter.name}-jax-{jax.__version__}"
        self.thread = EngineThread(
            engine, max_waiting=self.limits.max_waiting, metrics=self.metrics, timings=timings
        )
        self.metrics.watch(engine, waiting=lambda: self.thread.waiting, running=lambda: self.thread.running)

    def start(self) -> None:
        """Starts the engine's thread."""
        self.thread.start()

    def stop(self) -> None:
        """Ends it; what is unfinished fails."""
        self.thread.stop()

    def check_model(self, name: str) -> None:
        """Raises Problem for the name of another model."""
        if name != self.name:
            raise Problem(
                404,
                f"model: expected {self.name!r}, the only one served here, got {name!r:.80}; use that name",
                param="model",
                code="model_not_found",
            )

    def prepare(
        self,
        body: SamplingRequest,
        prompts: Sequence[Sequence[int]],
        *,
        prompt: str,
        log_probs: int | None,
        prompt_log_probs: bool = False,
        default_tokens: int | None = None,
    ) -> Prepared:
        """Holds a request against model and limits. Any thread may ask; it takes time for long prompts.

        Args:
          body: of the request.
          prompts: token ids.
          prompt: the field that they came in, for errors.
          log_probs: alternatives to report; None = no log-probabilities.
          prompt_log_probs: report those of the prompt, too.
          default_tokens: of answers without a limit; None = as many as there is room for.

        Raises:
          Problem: 400 or 404.
        """
        self.check_model(body.model)
        body.check_stream()
        count = len(prompts) * body.choices
        if count > self.limits.max_choices:
            raise Problem(
                400,
                f"n: expected at most {self.limits.max_choices} answers a call (n times prompts), got {count}; "
                "send several calls",
                param="n",
            )
        listed, settings = [], []
        for ids in prompts:
            max_tokens = self._answer_tokens(body, len(ids), prompt, default_tokens)
            one = body.settings(max_tokens=max_tokens, log_probs=log_probs, prompt_log_probs=prompt_log_probs)
            listed += [ids] * body.choices
            settings += [of_choice(one, number) for number in range(body.choices)]
        try:
            requests = self.engine.prepare(listed, settings)
        except ValueError as problem:
            raise refused(
                problem,
                prompt=prompt,
                prompts=len(prompts),
                choices=body.choices,
                fields=body.form_fields,
            ) from problem
        return Prepared(requests=tuple(requests), choices=body.choices, priority=body.priority or 0)

    def _answer_tokens(
        self, body: SamplingRequest, prompt_tokens: int, prompt: str, default: int | None
    ) -> int:
        most = self.limits.max_prompt_tokens
        context = self.engine.max_context
        if prompt_tokens >= context or (most is not None and prompt_tokens > most):
            held = context - 1 if most is None else min(most, context - 1)
            raise Problem(
                400,
                f"{prompt}: expected at most {held} tokens, got {prompt_tokens}; shorten it",
                param=prompt,
                code="context_length_exceeded",
            )
        room = context - prompt_tokens
        allowed = self.limits.max_output_tokens
        field, asked = body.tokens_asked
        if asked is None:
            return min(n for n in (room, allowed, default) if n is not None)
        if allowed is not None and asked > allowed:
            raise Problem(
                400,
                f"{field}: expected at most {allowed}, this server's limit, got {asked}; ask for fewer",
                param=field,
            )
        if asked > room:
            raise Problem(
                400,
                f"{field}: expected at most {room}, because {prompt_tokens} of the context's {context} tokens are the "
                f"prompt's, got {asked}; ask for fewer or shorten the prompt",
                param=field,
                code="context_length_exceeded",
            )
        return asked

    def submit(self, prepared: Prepared, *, client: str | None = None) -> Call:
        """Hands prepared requests to the engine; see `EngineThread.submit`."""
        return self.thread.submit(prepared.requests, priority=prepared.priority, client=client)

    @property
    def state(self) -> str:
        """ "ok", "draining" or "failed"."""
        if self.thread.failure is not None:
            return "failed"
        return "draining" if self.thread.draining else "ok"

    def deadline(self) -> float:
        """When an answer that begins now must have ended, on the running loop's clock."""
        return asyncio.get_running_loop().time() + self.limits.request_seconds
