"""Where prompts and settings enter: all of them are checked before the first is decoded."""

import dataclasses
from collections.abc import Callable, Sequence

from jspec.grammar.constraint import Constraint
from jspec.grammar.support import Grammars
from jspec.pages import PagePool
from jspec.prompts import Prompt, as_list, prompt_ids
from jspec.request import Request
from jspec.settings import Settings
from jspec.text.output import Output
from jspec.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intake:
    """The limits of an engine, against which requests are held."""

    vocab_size: int
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    max_context: int
    max_log_probs: int
    max_stop_ids: int
    pool: PagePool
    grammars: Grammars | None  # None = no request may have a grammar,
    why_no_grammars: str  # and why
    gives_confidence: Callable[[], bool]  # whether the drafter does

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: Settings | Sequence[Settings] | None,
    ) -> list[Request]:
        """One request per prompt, numbered from 0 on. Nothing is changed by it, so any thread may ask.

        Raises:
          ValueError: naming the first prompt or setting that is unusable.
        """
        listed = as_list(prompts)
        if settings is None:
            settings = Settings()
        if isinstance(settings, Settings):
            names, per_prompt = [""] * len(listed), [settings] * len(listed)
        else:
            per_prompt = _listed(settings, len(listed))
            names = [f"settings[{index}]." for index in range(len(listed))]
        return [
            self._request(index, prompt, one, name)
            for index, (prompt, one, name) in enumerate(zip(listed, per_prompt, names, strict=True))
        ]

    def _request(self, index: int, prompt: Prompt, settings: Settings, name: str) -> Request:
        self._check_settings(settings, name)
        ids = prompt_ids(index, prompt, self.tokenizer)
        if not ids:
            raise ValueError(
                f"prompts[{index}]: expected at least one token, got an empty prompt; pass some text"
            )
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(
                f"prompts[{index}]: expected ids below {self.vocab_size}, got {bad[0]}; "
                "use this model's tokenizer"
            )
        if len(ids) >= self.max_context:
            raise ValueError(
                f"prompts[{index}]: expected at most {self.max_context - 1} tokens, got {len(ids)}; "
                "shorten the prompt or raise max_context"
            )
        limit = min(len(ids) + int(settings.max_tokens), self.max_context)
        if not self.pool.can_ever_hold(limit):
            raise ValueError(
                f"prompts[{index}]: expected at most {self.pool.num_pages[0] * self.pool.page_size} tokens with "
                f"its answer, got {limit}; lower max_tokens or raise cache_tokens"
            )
        return Request(
            index=index,
            prompt_ids=tuple(ids),
            settings=settings,
            limit=limit,
            output=Output(tokenizer=self.tokenizer, stop=settings.stop),
            constraint=self._constraint(settings, name),
        )

    def _constraint(self, settings: Settings, name: str) -> Constraint | None:
        if settings.grammar is None:
            return None
        if self.grammars is None:
            raise ValueError(
                f"{name}grammar: expected None in this engine, as {self.why_no_grammars}, got one; leave it out"
            )
        try:
            return Constraint(self.grammars.matcher(settings.grammar, ends_by_eos=not settings.ignore_eos))
        except ValueError as problem:
            raise ValueError(f"{name}{problem}") from problem

    def _check_settings(self, settings: Settings, name: str) -> None:
        """`name` stands before the setting's own."""
        try:
            settings.check_against(self.vocab_size, self.eos_ids)
        except ValueError as problem:
            raise ValueError(f"{name}{problem}") from problem
        most = self.max_log_probs
        if settings.log_probs is not None and (settings.log_probs > most or not most):
            raise ValueError(
                f"{name}log_probs: expected {f'at most {most}' if most else 'None'}, got {settings.log_probs}; "
                "load the engine with a larger max_log_probs"
            )
        if settings.stop and self.tokenizer is None:
            raise ValueError(
                f"{name}stop: expected no stop strings without a tokenizer, got {settings.stop!r}; "
                "use stop_token_ids"
            )
        if settings.min_confidence and settings.draft_length != 0 and not self.gives_confidence():
            raise ValueError(
                f"{name}min_confidence: expected 0, as the drafter gives no confidence, got "
                f"{settings.min_confidence}; cap draft_length instead"
            )
        stop_ids = settings.stop_ids(self.eos_ids)
        if len(stop_ids) > self.max_stop_ids:
            raise ValueError(
                f"{name}stop_token_ids: expected at most {self.max_stop_ids} with the model's own, got "
                f"{len(stop_ids)}; load the engine with a larger max_stop_ids"
            )


def _listed(settings: Sequence[Settings], count: int) -> list[Settings]:
    if not isinstance(settings, Sequence) or not all(isinstance(one, Settings) for one in settings):
        raise ValueError(
            f"settings: expected jspec.Settings, or a list of them, got {settings!r:.80}; "
            "pass Settings(max_tokens=...)"
        )
    if len(settings) != count:
        raise ValueError(
            f"settings: expected one, or {count} (one per prompt), got {len(settings)}; pass either"
        )
    return list(settings)
