"""Decodes prompts: the host loop around the three programs of a round."""

import collections
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.buckets import Bucket, Ladder
from jspec.cache import new_cache
from jspec.cut import Finish
from jspec.decode import Method, Models, Report, State
from jspec.intake import Intake
from jspec.pages import PagePool
from jspec.programs import Admission, Programs
from jspec.prompts import Prompt
from jspec.request import Request
from jspec.results import Piece, Result, TokenLogProb
from jspec.sampling import settings_row
from jspec.settings import Settings
from jspec.slots import empty_slots
from jspec.targets.view import TargetView
from jspec.text.tokenizer import Tokenizer
from jspec.timings import Stopwatch, Timings


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
        max_stop_ids: int = 8,
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
          page_size: cache rows per page.
          cache_tokens: rows of the cache over all requests; None = max_slots x max_context.
          cache_dtype: of keys and values.
          chunks: prompt tokens per prefill round (besides the one that every lane has), ascending.
          max_stop_ids: EOS and stop token ids that one request may have.
          seed: of the requests that set none.

        Raises:
          ValueError: a size that fits no bucket, or a drafter that cannot serve this target.
        """
        target, drafter = method.target, method.drafter
        self.method, self.models, self.tokenizer = method, models, tokenizer
        self.cache_dtype = cache_dtype
        self.eos_ids = tuple(eos_ids)
        self.max_slots = max_slots
        self.max_context = target.max_context if max_context is None else max_context
        self._check_sizes(chunks, page_size, cache_tokens)
        self._check_rules()
        self.page_size, self.cache_tokens = page_size, cache_tokens
        self.max_stop_ids = max_stop_ids
        self.ladder = Ladder(max_slots=max_slots, draft_length=drafter.draft_length, chunks=tuple(chunks))
        self.programs = Programs(method)
        self._rng = np.random.default_rng(seed)
        self._pool = PagePool(
            target.groups,
            page_size=page_size,
            max_context=self.max_context,
            max_commit=max(chunks[-1], drafter.draft_depth) + 1,
            max_slots=max_slots,
            total_tokens=cache_tokens,
        )
        self._intake = Intake(
            vocab_size=target.vocab_size,
            tokenizer=tokenizer,
            eos_ids=self.eos_ids,
            max_context=self.max_context,
            max_log_probs=method.max_log_probs,
            max_stop_ids=max_stop_ids,
            pool=self._pool,
        )
        self._free_slots = list(range(max_slots))
        cache = new_cache(
            target.groups,
            max_slots=max_slots,
            num_pages=self._pool.num_pages,
            page_size=page_size,
            max_context=self.max_context,
            dtype=cache_dtype,
        )
        view = TargetView(params=models.target, cache=cache, target=target)
        self._state = State(
            cache=cache,
            drafter=drafter.init(models.drafter, view, max_slots),
            slots=empty_slots(max_slots, self.max_context, target.vocab_size, max_stop_ids),
        )

    def _check_sizes(self, chunks: Sequence[int], page_size: int, cache_tokens: int | None) -> None:
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
        if not chunks or list(chunks) != sorted(set(chunks)) or chunks[0] < 1:
            raise ValueError(f"chunks: expected ascending positive sizes, got {tuple(chunks)}; sort them")

    def _check_rules(self) -> None:
        drafter = self.method.drafter
        if self.method.block_verification and drafter.draft_depth < drafter.draft_length:
            raise ValueError(
                f"block_verification: expected False with {drafter.name}, which drafts trees of {drafter.draft_length} "
                f"tokens and depth {drafter.draft_depth}, got True; draft chains, or leave it out"
            )

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
        requests = self._intake.requests(prompts, settings)
        for piece in self._run(requests, timings):
            if piece.finish_reason is not None:
                on_finish(piece.index)
        simulated = self.method.drafter.simulated
        return [request.result(simulated=simulated) for request in requests]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], settings: Settings | Sequence[Settings] | None = None
    ) -> Iterator[Piece]:
        """Yields what each round added, as soon as it is known; arguments as for `generate`.

        Closing the iterator early frees the requests' slots.
        """
        return self._run(self._intake.requests(prompts, settings), None)

    def warm_up(self, *, prompt_lengths: Sequence[int] = (1,), lanes: int = 1) -> None:
        """Compiles every program for prompts of these lengths and up to `lanes` requests at a time.

        The rounds that it runs have no request in any lane, so they change nothing.

        Raises:
          ValueError: more lanes than slots.
        """
        buckets = set()
        for length in prompt_lengths:
            for remaining in range(length, 0, -(self.ladder.chunks[-1] + 1)):
                buckets.add(self.ladder.prefill(remaining))
        for count in range(1, lanes + 1):
            for drafts in range(count * self.ladder.draft_length + 1):
                buckets.add(self.ladder.decode(count, [drafts]))
        for bucket in sorted(buckets):
            self._round(bucket, [], None)
        self.generate([[0]], Settings(max_tokens=1, seed=0))  # the programs that admit and halt

    # -- the loop -----------------------------------------------------------------------------

    def _run(self, requests: list[Request], timings: Timings | None) -> Iterator[Piece]:
        waiting = collections.deque(requests)
        running: dict[int, Request] = {}  # by slot
        try:
            while waiting or running:
                self._admit(waiting, running)
                if not running:
                    tokens = self._pool.free_pages[0] * self._pool.page_size
                    raise RuntimeError(
                        f"prompts[{waiting[0].index}]: expected a free slot and cache for {waiting[0].limit} tokens, "
                        f"got {len(self._free_slots)} slots and {tokens} tokens; finish or close other streams"
                    )
                prefilling = next((r for r in running.values() if r.prefilling), None)
                if prefilling is not None:
                    active = [prefilling]
                    bucket = self.ladder.prefill(len(prefilling.prompt_ids) - prefilling.committed)
                else:
                    active = [running[slot] for slot in sorted(running)]
                    bucket = self.ladder.decode(len(active), [r.ready for r in active])
                report = self._round(bucket, active, timings)
                for lane, request in enumerate(active):
                    piece = self._take(request, lane, report)
                    if request.finish_reason is not None:
                        self._leave(request, running)
                    if piece is not None:
                        yield piece
        finally:
            for request in list(running.values()):
                self._leave(request, running)

    def _admit(self, waiting: collections.deque[Request], running: dict[int, Request]) -> None:
        while waiting and self._free_slots:
            request = waiting[0]
            reservation = self._pool.reserve(request.limit)
            if reservation is None:
                break
            waiting.popleft()
            request.slot, request.reservation = self._free_slots.pop(0), reservation
            running[request.slot] = request
            settings = request.settings
            tokens = np.zeros((self._state.slots.text.tokens.shape[1],), np.int32)
            tokens[: len(request.prompt_ids)] = request.prompt_ids
            seed = int(self._rng.integers(2**32)) if settings.seed is None else settings.seed
            draft_cap, vocab_size = self.method.drafter.draft_length, self.method.target.vocab_size
            if settings.draft_length is not None:
                draft_cap = min(draft_cap, settings.draft_length)
            admission = Admission(
                slot=np.asarray(request.slot, np.int32),
                tokens=tokens,
                prompt_length=np.asarray(len(request.prompt_ids), np.int32),
                limit=np.asarray(request.limit, np.int32),
                draft_cap=np.asarray(draft_cap, np.int32),
                page_rows=self._pool.table_rows(reservation),
                settings=settings_row(
                    settings, settings.stop_ids(self.eos_ids), seed, vocab_size, self.max_stop_ids
                ),
            )
            self._state = self.programs.admit(self._state, admission)

    def _round(self, bucket: Bucket, active: list[Request], timings: Timings | None) -> Report:
        lanes = np.full((bucket.lanes,), -1, np.int32)
        certain = np.zeros((bucket.lanes,), np.int32)
        for lane, request in enumerate(active):
            lanes[lane] = request.slot
            certain[lane] = min(request.known - request.committed, bucket.chunk + 1)
        programs, models = self.programs, self.models
        watch = Stopwatch(timings)
        round_ = watch.lap("draft", programs.propose(bucket, models, self._state, lanes, certain))
        executed = watch.lap(
            "target", programs.execute(bucket, models, round_.nodes, self._state.cache, lanes)
        )
        self._state, report = programs.settle(bucket, models, round_, executed, self._state, lanes)
        report = jax.device_get(report)
        watch.lap("settle", self._state)
        watch.finish(counted=bucket.chunk == 0)
        return report

    def _take(self, request: Request, lane: int, report: Report) -> Piece | None:
        was_prefilling = request.prefilling
        emitted, accepted = int(report.emitted[lane]), int(report.accepted[lane])
        committed = int(report.committed[lane])
        request.committed += committed
        ids = [int(t) for t in report.tokens[lane, :emitted]]
        drafted = [i < accepted for i in range(emitted)]
        finish = Finish(int(report.finish[lane]))
        if finish is Finish.BROKEN:
            request.finish_reason = "error: the target's logits are NaN, or its settings allow no token"
        elif finish is not Finish.RUNNING:
            request.finish_reason = finish.name.lower()
        text, stopped_at = request.output.push(ids, last=request.finish_reason is not None)
        if stopped_at is not None:
            ids, drafted = ids[: stopped_at + 1], drafted[: stopped_at + 1]
            request.finish_reason = "stop"
        if not was_prefilling:
            # A stop string cuts the counts as a stop token does on the device: one committed node per token.
            request.count(
                proposed=int(report.proposed[lane]),
                verified=int(report.verified[lane]),
                accepted=sum(drafted),
                committed=min(committed, len(ids)),
                depth=self.method.drafter.draft_depth,
            )
        request.token_ids.extend(ids)
        request.ready = self._ready(request, int(report.ready[lane]))
        if request.settings.log_probs is not None:
            request.log_probs.extend(self._log_probs(request, lane, report, ids))
        if not ids and request.finish_reason is None:
            return None
        return Piece(
            index=request.index,
            text=text,
            token_ids=tuple(ids),
            drafted=tuple(drafted),
            finish_reason=request.finish_reason,
        )

    def _ready(self, request: Request, drafts: int) -> int:
        """How many of `drafts` tokens the next round can use. The last one that a request may emit is a bonus."""
        room = max(request.limit - request.known - 1, 0)
        is_tree = self.method.drafter.draft_depth < self.method.drafter.draft_length
        return drafts if is_tree and room else min(drafts, room)

    def _log_probs(self, request: Request, lane: int, report: Report, ids: list[int]) -> list[TokenLogProb]:
        assert report.log_probs is not None and request.settings.log_probs is not None
        rows = report.log_probs
        count = request.settings.log_probs
        return [
            TokenLogProb(
                token_id=token,
                log_prob=float(rows.chosen[lane, i]),
                top=tuple((int(rows.top_ids[lane, i, k]), float(rows.top[lane, i, k])) for k in range(count)),
            )
            for i, token in enumerate(ids)
        ]

    def _leave(self, request: Request, running: dict[int, Request]) -> None:
        """Frees what a request held. The device row may still be live: end it there, too."""
        assert request.reservation is not None
        self._pool.release(request.reservation)
        self._free_slots.append(request.slot)
        self._free_slots.sort()
        del running[request.slot]
        request.reservation = None
        self._state = self.programs.halt(self._state, request.slot)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Free cache pages per layer group."""
        return self._pool.free_pages
