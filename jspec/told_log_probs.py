"""Log-probabilities on the host: what a report holds, as results tell it."""

from jspec.request import Request
from jspec.results import TokenLogProb
from jspec.target_rows import LogProbs


def told(request: Request, rows: LogProbs | None, lane: int, index: int, token: int) -> TokenLogProb:
    """One token's, with as many alternatives as the request asked for.

    Args:
      request: with `log_probs` set.
      rows: of a report, on the host.
      lane: the request's.
      index: of the token in its lane.
      token: its id.
    """
    assert rows is not None and request.settings.log_probs is not None
    return TokenLogProb(
        token_id=token,
        log_prob=float(rows.chosen[lane, index]),
        top=tuple(
            (int(rows.top_ids[lane, index, k]), float(rows.top[lane, index, k]))
            for k in range(request.settings.log_probs)
        ),
    )


def tell_prompt(request: Request, rows: LogProbs | None, lane: int, committed: int) -> None:
    """Adds those of the tokens behind a chunk's to the request; after a preemption, only what it had not.

    Args:
      request: before the chunk is counted as committed.
      rows: of the chunk's nodes.
      lane: the request's.
      committed: tokens of the chunk.
    """
    known = request.prompt_log_probs
    for node in range(committed):
        if request.committed + node == len(known) < len(request.prompt_ids) - 1:
            token = request.prompt_ids[len(known) + 1]
            known.append(told(request, rows, lane, node, token))
