"""Decodes prompts with a target and a drafter."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.buckets import Ladder
from jspec.decode import Method, Models, State
from jspec.grammar.overlap import GrammarOverlap, resolve_overlap
from jspec.grammar.support import grammars_for
from jspec.intake import Intake
from jspec.pages import PagePool
from jspec.prefix_cache import PrefixCache
from jspec.programs import Programs
from jspec.prompts import Prompt
from jspec.request import Request
from jspec.results import Piece, Result
from jspec.round import Proposal
from jspec.runner import Runner
from jspec.schedule.costs import RoundCosts
from jspec.schedule.scheduler import Scheduler
from jspec.session import Observer, Session
from jspec.settings import Settings
from jspec.targets.view import TargetView
from jspec.text.tokenizer import Tokenizer
from jspec.timings import Timings
from pallas_kernels.attention.pages import PAGE_MULTIPLE

log = logging.getLogger(__name__)


class Engine:
    """A target and a drafter, ready to decode.

    Example:
      engine = jspec.load("model folder", drafter="ngram")
      for result in engine.generate(["Once upon a time"], jspec.Settings(max_tokens=64)):
          print(result.text)
    """

    def __init__(
        self,
        *,
        method: Method,
        models: Models,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        max_slots: int = 8,
        max_context: int | None = None,
        page_size: int = 128,
        cache_tokens: int | None = None,
        cache_dtype: DTypeLike = jnp.float32,
        chunks: Sequence[int] = (31, 63, 127, 255, 511),
        mixed_chunks: Sequence[int] = (),
        max_stop_ids: int = 8,
        costs: RoundCosts | None = None,
        typical: Sequence[float] | None = None,
        prefix_cache: bool | None = None,
        grammar: bool | None = None,
        grammar_overlap: GrammarOverlap | None = None,
        overlap: bool = True,
        seed: int = 0,
    ):
        """Allocates the cache and the slots; compiles nothing yet.

        Args:
          method: target, drafter and rules.
          models: their parameters.
          tokenizer: None = prompts must be ids, and results carry no text.
          eos_ids: ids that end every request unless it ignores them.
          max_slots: requests that run together.
          max_context: tokens of prompt and answer per request; None = the model's own limit.
          page_size: cache rows per page. The kernels for TPUs need a multiple of 128; with another size
            attention is plain XLA there, which the log says.
          cache_tokens: rows of the cache over all requests; None = max_slots x max_context.
          cache_dtype: of keys and values.
          chunks: prompt tokens per prefill round (besides the one that every lane has), ascending.
          mixed_chunks: likewise where running requests decode in the same round; none beyond the longest of
            `chunks`. Empty = they wait while a prompt is executed, as is best where nobody waits for the next
            token. Each is a few programs more, see `jspec.buckets.Ladder.mixed`.
          max_stop_ids: EOS and stop token ids that one request may have.
          costs: of rounds by bucket, so that the schedule can choose; None = every draft token is verified.
          typical: mean survival of draft token 1, 2, ..., for the schedule's first rounds; None = unknown.
          prefix_cache: whether requests share the pages of texts that begin alike. None = if that costs
            nothing: where layers have a window, True lets them keep the whole context, as a ring of pages
            cannot be shared. See `prefix_cache` and `jspec.prefix_cache`.
          grammar: whether requests may have a grammar. None = if llguidance is installed and the tokenizer's
            tokens spell bytes.
          grammar_overlap: when the host does a grammar's work; see `jspec.grammar.overlap`. None = as much of
            it as there is while the device runs. The tokens are the same.
          overlap: whether sessions launch a round before they have read the one before it; see `Session`. It
            pays even where host and device share cores: on 2 of them, beside other work, plain rounds of
            SmolLM2-135M took 7 to 24% less time, and rounds of the n-gram drafter about as long.
          seed: of the requests that set none.

        Raises:
          ValueError: a size that fits no bucket, a drafter that cannot serve this target, or costs with a
            drafter that gives no confidence.
        """
        target, drafter = method.target, method.drafter
        self.method = method = dataclasses.replace(method, scheduled=costs is not None)
        self.tokenizer = tokenizer
        self.cache_dtype = cache_dtype
        self.eos_ids = tuple(eos_ids)
        self.max_slots = max_slots
        self.max_context = target.max_context if max_context is None else max_context
        self._check_sizes(page_size, cache_tokens)
        self._check_rules()
        self.page_size, self.cache_tokens = page_size, cache_tokens
        if jax.default_backend() == "tpu" and page_size % PAGE_MULTIPLE:
            log.warning(
                "attention: plain XLA instead of the kernels for TPU, as page_size %d is no multiple of %d",
                page_size,
                PAGE_MULTIPLE,
            )
        self.max_stop_ids = max_stop_ids
        self.ladder = Ladder(
            max_slots=max_slots,
            draft_length=drafter.draft_length,
            chunks=tuple(chunks),
            mixed_chunks=tuple(mixed_chunks),
        )
        self._pool = PagePool(
            target.groups,
            page_size=page_size,
            max_context=self.max_context,
            max_commit=max(chunks[-1], drafter.draft_depth) + 1,
            max_slots=max_slots,
            total_tokens=cache_tokens,
            rings=not prefix_cache,
        )
        self._prefixes = PrefixCache(
            self._pool, enabled=self._pool.keeps_whole_context if prefix_cache is None else prefix_cache
        )
        if prefix_cache is None and not self.prefix_cache:
            log.info(
                "prefix cache: off, as %s has layers with a window, whose pages are rings; prefix_cache=True lets "
                "them keep the whole context",
                target.identity,
            )
        self._grammars, why_no_grammars = grammars_for(
            tokenizer,
            vocab_size=target.vocab_size,
            eos_ids=self.eos_ids,
            simulated=drafter.simulated,
            wanted=grammar,
        )
        self._intake = Intake(
            vocab_size=target.vocab_size,
            tokenizer=tokenizer,
            eos_ids=self.eos_ids,
            max_context=self.max_context,
            max_log_probs=method.max_log_probs,
            max_stop_ids=max_stop_ids,
            pool=self._pool,
            grammars=self._grammars,
            why_no_grammars=why_no_grammars,
            gives_confidence=lambda: self._gives_confidence or not drafter.draft_length,
        )
        self._runner = Runner(
            method=self.method,
            models=models,
            prefixes=self._prefixes,
            max_slots=max_slots,
            max_context=self.max_context,
            max_stop_ids=max_stop_ids,
            eos_ids=self.eos_ids,
            cache_dtype=cache_dtype,
            seed=seed,
            masks=self._grammars is not None,
        )
        self.overlap = overlap
        resolve_overlap(grammar_overlap, None, overlap=self.overlap)
        self.grammar_overlap: GrammarOverlap | None = grammar_overlap
        self.costs, self._scheduler = costs, None
        if costs is not None:
            self._check_schedule()
            self._scheduler = Scheduler(costs=costs, ladder=self.ladder, max_slots=max_slots, typical=typical)
        elif drafter.draft_length:
            log.info("%s: every draft token is verified, for want of a cost table", drafter.name)

    @property
    def models(self) -> Models:
        """Parameters of target and drafter; others of the same shapes may replace them between requests."""
        return self._runner.models

    @models.setter
    def models(self, models: Models) -> None:
        self._runner.models = models
        self.forget_prefixes()

    @property
    def prefix_cache(self) -> bool:
        """Whether requests share the pages of texts that begin alike; see the argument."""
        return self._prefixes.enabled

    @property
    def grammar(self) -> bool:
        """Whether requests may have a grammar."""
        return self._grammars is not None

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: what comes next is executed whole, as in a new engine."""
        self._prefixes.clear()

    @property
    def programs(self) -> Programs:
        """The compiled programs."""
        return self._runner.programs

    def _check_sizes(self, page_size: int, cache_tokens: int | None) -> None:
        limit = self.method.target.max_context
        if not 2 <= self.max_context <= limit:
            raise ValueError(
                f"max_context: expected 2 to {limit} (the model's limit), got {self.max_context}; lower it"
            )
        if self.max_slots < 1:
            raise ValueError(f"max_slots: expected at least 1, got {self.max_slots}; raise it")
        if page_size < 1:
            raise ValueError(
                f"page_size: expected at least 1, got {page_size}; use a power of two such as 64"
            )
        if cache_tokens is not None and cache_tokens < 1:
            raise ValueError(f"cache_tokens: expected at least 1, got {cache_tokens}; raise it")
        most = self.method.target.vocab_size
        if not 0 <= self.method.max_log_probs <= most:
            raise ValueError(
                f"max_log_probs: expected 0 to the vocabulary size {most}, got {self.method.max_log_probs}; "
                "lower it"
            )

    def _check_rules(self) -> None:
        drafter = self.method.drafter
        if self.method.block_verification and drafter.draft_depth < drafter.draft_length:
            raise ValueError(
                f"block_verification: expected False with {drafter.name}, which drafts trees of {drafter.draft_length} "
                f"tokens and depth {drafter.draft_depth}, got True; draft chains, or leave it out"
            )

    def _check_schedule(self) -> None:
        if not self._gives_confidence:
            raise ValueError(
                f"schedule: expected a drafter that gives confidence, got {self.method.drafter.name}; leave the "
                "schedule out"
            )

    @functools.cached_property
    def _gives_confidence(self) -> bool:
        """Whether the drafter does: it is asked by shapes alone."""
        runner, drafter = self._runner, self.method.drafter
        lanes = jax.ShapeDtypeStruct((1,), jnp.int32)

        def draft(models: Models, state: State, lanes: jax.Array) -> Proposal:
            view = TargetView(params=models.target, cache=state.cache, target=self.method.target)
            slots = state.slots
            return drafter.draft(models.drafter, view, state.drafter, lanes, slots.text, slots.table)

        if not drafter.draft_length:
            return False
        return jax.eval_shape(draft, self.models, runner.state, lanes).confidence is not None

    # -- what callers use ---------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: Settings | Sequence[Settings] | None = None,
        *,
        timings: Timings | None = None,
        on_finish: Callable[[int], None] = lambda _: None,
    ) -> list[Result]:
        """Decodes all prompts and returns their results in order.

        Args:
          prompts: one prompt or several; a prompt is text, a list of ids, or a list of chat messages
            (dicts with "role" and "content"), which go through the model's chat template.
          settings: one for all prompts, or one each. None = greedy, 256 tokens.
          timings: filled if given; see `Timings`.
          on_finish: called with the index of each prompt that is done.

        Raises:
          ValueError: a prompt or a setting is unusable; nothing has been decoded then.
        """
        session = self.session(timings=timings)
        indices = session.add(prompts, settings)
        with session:
            while session.busy:
                for piece in session.step():
                    if piece.finish_reason is not None:
                        on_finish(piece.index)
        return [session.result(index) for index in indices]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], settings: Settings | Sequence[Settings] | None = None
    ) -> Iterator[Piece]:
        """Yields what each round added, as soon as it is known; arguments as for `generate`.

        Closing the iterator early frees the requests' slots.
        """
        session = self.session()
        session.add(prompts, settings)  # here, not in the generator: a wrong prompt is refused at once
        return pieces_of(session)

    def prepare(
        self, prompts: Prompt | Sequence[Prompt], settings: Settings | Sequence[Settings] | None = None
    ) -> list[Request]:
        """Checks and encodes prompts for `Session.enqueue`; arguments as for `generate`. Any thread may ask.

        Raises:
          ValueError: a prompt or a setting is unusable.
        """
        return self._intake.requests(prompts, settings)

    def session(
        self,
        *,
        timings: Timings | None = None,
        observer: Observer | None = None,
        grammar_overlap: GrammarOverlap | None = None,
        overlap: bool | None = None,
        mixed: bool | None = None,
    ) -> Session:
        """Requests that can be added while others run, and a step at a time; see `Session`.

        Args:
          timings: filled if given, without overlap; see `Timings`.
          observer: called after every round.
          grammar_overlap: when the host does a grammar's work; None = the engine's choice.
          overlap: None = the engine's choice.
          mixed: whether running requests decode in rounds that execute a prompt, for which the engine has to
            have mixed chunks; None = if it has.
        """
        overlap = self.overlap if overlap is None else overlap
        return Session(
            runner=self._runner,
            intake=self._intake,
            ladder=self.ladder,
            scheduler=self._scheduler,
            overlap=overlap,
            grammar_overlap=resolve_overlap(grammar_overlap, self.grammar_overlap, overlap=overlap),
            mixed=bool(self.ladder.mixed_chunks) if mixed is None else mixed,
            timings=timings,
            observer=observer,
        )

    def warm_up(self, *, prompt_lengths: Sequence[int] = (1,), lanes: int = 1) -> None:
        """Compiles every program for prompts of these lengths and up to `lanes` requests at a time.

        The rounds that it runs have no request in any lane, so they change nothing.

        Raises:
          ValueError: more lanes than slots.
        """
        buckets = set()
        mixed = lanes > 1 and bool(self.ladder.mixed_chunks)
        for length in prompt_lengths:
            for remaining in range(length, 0, -(self.ladder.chunks[-1] + 1)):
                buckets.add(self.ladder.prefill(remaining))
            if self.prefix_cache or mixed:  # any part of a prompt may be left to execute
                buckets.update(self.ladder.prefill(min(chunk + 1, length)) for chunk in self.ladder.chunks)
            if mixed:
                buckets.update(self.ladder.every_mixed(length))
        for count in range(1, lanes + 1):
            if self.costs is not None:
                buckets.update(self.ladder.scheduled(count))
                continue
            for drafts in range(count * self.ladder.draft_length + 1):
                buckets.add(self.ladder.decode(count, [drafts]))
        for bucket in sorted(buckets):
            launched = self._runner.launch(bucket, [])
            self._runner.settle(launched, [])
            launched.read()
        if self._grammars is not None:
            self._grammars.prepare()
        self.generate([[0]], Settings(max_tokens=1, seed=0))  # the programs that admit and halt

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Cache pages per layer group."""
        return self._pool.num_pages

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Cache pages per layer group that requests could get now, those of the prefix cache included."""
        return self._prefixes.free_pages


def pieces_of(session: Session) -> Iterator[Piece]:
    """All pieces of a session's requests, which end with the iterator."""
    with session:
        while session.busy:
            yield from session.step()
