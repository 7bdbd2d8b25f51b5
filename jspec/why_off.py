"""Why a request was decoded without speculation, in words for its caller."""

from jspec.drafters.protocol import Drafter
from jspec.request import Request


def why_off(request: Request, drafter: Drafter) -> str | None:
    """Why no draft token was verified, in any round or in those that the schedule left plain.

    None if some were.
    """
    if request.settings.draft_length == 0:
        return "the request turned it off"
    if not drafter.draft_length:
        return "there is no drafter"
    if request.declined is not None:
        return (
            f"in {request.declined_rounds} of {request.rounds} rounds it would have cost more than it brought: "
            f"{request.declined}"
        )
    if request.verified:
        return None
    if len(request.token_ids) < 3:
        return "the answer is too short: its first token comes from the prompt, its last is never drafted"
    if not request.proposed:
        return "the drafter had nothing to propose"
    if request.settings.min_confidence:
        return f"no draft token reached the confidence that the request asks for, {request.settings.min_confidence:g}"
    return "no draft token was likely enough to be verified"
