"""The device side of an engine: slots that requests occupy, and rounds over some of them."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from jspec.buckets import Bucket
from jspec.cache import new_cache
from jspec.decode import Executed, Method, Models, Report, Round, State
from jspec.grammar.filler import MaskFiller
from jspec.grammar.masks import Masks
from jspec.placement import place_state
from jspec.prefix_cache import PrefixCache
from jspec.programs import Admission, Programs
from jspec.request import Request
from jspec.sampling import settings_row
from jspec.sharding import mesh_of
from jspec.slots import empty_slots
from jspec.targets.view import TargetView
from jspec.timings import Stopwatch, Timings


@dataclasses.dataclass(kw_only=True)
class Launched:
    """A round that the device has been given. What it computes arrives when the device gets there."""

    bucket: Bucket
    lanes: np.ndarray
    certain: tuple[int, ...]  # known tokens that each request's lane executes
    round: Round
    executed: Executed | None  # until it is settled
    masks: Masks | None = None  # of grammars, if they were filled early
    report: Report | None = None  # once it is settled
    watch: Stopwatch

    def read(self) -> Report:
        """The report of a settled round on the host; waits for the round."""
        return jax.device_get(self.report)


class Runner:
    """Holds the state of all slots, and moves it by one round at a time."""

    def __init__(
        self,
        *,
        method: Method,
        models: Models,
        prefixes: PrefixCache,
        max_slots: int,
        max_context: int,
        max_stop_ids: int,
        eos_ids: Sequence[int],
        cache_dtype: DTypeLike,
        seed: int,
        masks: bool,
    ):
        """Allocates the state; arguments as for `jspec.engine.Engine`. With `masks` requests may have grammars."""
        target, drafter = method.target, method.drafter
        self.method, self.models = method, models
        self.prefixes = prefixes
        self.free_slots = list(range(max_slots))
        self.generations = [0] * max_slots  # requests that each slot has had
        self._eos_ids, self._max_stop_ids = tuple(eos_ids), max_stop_ids
        self._rng = np.random.default_rng(seed)
        self._filler = MaskFiller(target.vocab_size) if masks else None
        pool = prefixes.pool

        def empty(models: Models) -> State:
            cache = new_cache(
                target.groups,
                max_slots=max_slots,
                num_pages=pool.num_pages,
                page_size=pool.page_size,
                max_context=max_context,
                dtype=cache_dtype,
            )
            view = TargetView(params=models.target, cache=cache, target=target)
            return State(
                cache=cache,
                drafter=drafter.init(models.drafter, view, max_slots),
                slots=empty_slots(max_slots, max_context, target.vocab_size, max_stop_ids),
            )

        mesh = mesh_of(models)
        self.programs = Programs(method, mesh)
        if mesh is None:
            self.state = empty(models)
        else:  # in a program, so that no device ever holds all pages
            with jax.set_mesh(mesh):
                self.state = jax.jit(lambda models: place_state(empty(models)))(models)

    def admit(self, request: Request) -> bool:
        """Puts a request into a free slot; False if there is no slot or not enough cache now."""
        if not self.free_slots:
            return False
        text = request.text
        lease = self.prefixes.reserve(text, request.limit, reuse=request.reuses)
        if lease is None:
            return False
        request.slot, request.lease = self.free_slots.pop(0), lease
        request.committed, request.known_at_admission = lease.start, len(text)
        if not request.preemptions:
            request.reused = lease.start
        self.generations[request.slot] += 1
        settings = request.settings
        tokens = np.zeros((self.state.slots.text.tokens.shape[1],), np.int32)
        tokens[: len(text)] = text
        # After a preemption, too, a request without a seed gets a new one: the old one's coins may have been used
        # at the lengths at which rounds begin now.
        seed = int(self._rng.integers(2**32)) if settings.seed is None else settings.seed
        vocab_size = self.method.target.vocab_size
        admission = Admission(
            slot=np.asarray(request.slot, np.int32),
            tokens=tokens,
            text_length=np.asarray(len(text), np.int32),
            prompt_length=np.asarray(len(request.prompt_ids), np.int32),
            start=np.asarray(lease.start, np.int32),
            limit=np.asarray(request.limit, np.int32),
            draft_cap=np.asarray(self.draft_cap(request), np.int32),
            min_confidence=np.asarray(settings.min_confidence, np.float32),
            page_rows=self.prefixes.pool.table_rows(lease.reservation),
            settings=settings_row(
                settings, settings.stop_ids(self._eos_ids), seed, vocab_size, self._max_stop_ids
            ),
        )
        try:
            self.state = self.programs.admit(self.state, admission)
        except BaseException:  # an interrupt, too: the request does not run, so nobody will make it leave
            self._release(request)
            raise
        return True

    def draft_cap(self, request: Request) -> int:
        """Most draft tokens that a round may have for it."""
        draft_length, own = self.method.drafter.draft_length, request.settings.draft_length
        return draft_length if own is None else min(draft_length, own)

    def has_room(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Whether `admit` would find a slot and pages, had the requests `without` left."""
        leases = [other.lease for other in without if other.lease is not None]
        return bool(self.free_slots or leases) and self.prefixes.has_room(
            request.text, request.limit, leases, reuse=request.reuses
        )

    def publish(self, request: Request) -> None:
        """Lets later requests use the whole pages that a request has filled, as far as its text was not cut."""
        assert request.lease is not None
        # Both lengths are the host's: it knows of stop strings, past which the device may have committed.
        if self.prefixes.unpublished(request.lease, request.committed, request.known):
            self.prefixes.publish(request.lease, request.committed, request.text)

    def distrust(self, request: Request) -> None:
        """Keeps later requests from what a broken one computed, and from all that begins as its text does."""
        assert request.lease is not None
        self.prefixes.forget(request.lease)

    def leave(self, request: Request) -> None:
        """Frees what a request held. The device row may still be live: end it there, too."""
        self._release(request)
        self.state = self.programs.halt(self.state, request.slot)

    def _release(self, request: Request) -> None:
        assert request.lease is not None
        self.prefixes.release(request.lease)
        self.free_slots.append(request.slot)
        self.free_slots.sort()
        request.lease = None

    def launch(
        self,
        bucket: Bucket,
        active: Sequence[Request],
        timings: Timings | None = None,
        *,
        masks_first: bool = False,
    ) -> Launched:
        """Gives the device the first two programs of a round for the active requests, one per lane.

        Nothing is waited for, unless timings are kept or a grammar's masks have to be there first. `settle` has
        to follow, unless nobody is left in the round; before any other round is launched.
        """
        lanes = np.full((bucket.lanes,), -1, np.int32)
        certain_lengths = np.zeros((bucket.lanes,), np.int32)
        certain = tuple(request.certain(bucket.chunk) for request in active)
        lanes[: len(active)] = [request.slot for request in active]
        certain_lengths[: len(active)] = certain
        # Padding lanes have no anchor, so that drafts may have their nodes, too.
        budget = bucket.nodes - len(active) if bucket.budget else 0
        programs, models = self.programs, self.models
        watch = Stopwatch(timings)
        round_ = watch.lap(
            "draft", programs.propose(bucket, models, self.state, lanes, certain_lengths, budget)
        )
        if self.method.scheduled:
            round_.survival.copy_to_host_async()
        if self._filler is not None and any(request.constraint is not None for request in active):
            self._filler.ask(round_)
        launched = Launched(
            bucket=bucket, lanes=lanes, certain=certain, round=round_, executed=None, watch=watch
        )
        if masks_first:
            launched.masks = self._masks(launched, active)
        launched.executed = programs.execute(bucket, models, round_.nodes, self.state.cache, lanes)
        return launched

    def settle(self, launched: Launched, requests: Sequence[Request | None]) -> None:
        """Gives the device the last program of a round.

        Rounds and what else changes the state happen in the order in which they were asked for: a slot that
        is freed before a round is read is first written by that round, then by whoever gets it.

        Args:
          launched: by `launch`, not settled.
          requests: by lane; None = it has left. Those with a grammar have taken in all that they emitted
            before this round; the host fills their masks here, which waits for the draft tokens.
        """
        bucket, executed = launched.bucket, launched.executed
        assert executed is not None and launched.report is None
        masks = self._masks(launched, requests) if launched.masks is None else launched.masks
        launched.watch.lap("target", executed)
        self.state, report = self.programs.settle(
            bucket, self.models, launched.round, executed, self.state, launched.lanes, masks
        )
        for array in jax.tree.leaves(report):
            array.copy_to_host_async()
        launched.watch.lap("settle", self.state)
        launched.watch.finish(counted=bucket.chunk == 0)
        launched.executed, launched.report = None, report

    def _masks(self, launched: Launched, requests: Sequence[Request | None]) -> Masks | None:
        if self._filler is None:
            return None
        constraints = [
            None if request is None or request.known - request.committed != certain else request.constraint
            for request, certain in zip(requests, launched.certain, strict=True)
        ]
        return self._filler.fill(constraints, launched.round, launched.bucket.nodes)
