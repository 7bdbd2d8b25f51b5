"""What the readers of drafter checkpoints return."""

import dataclasses
from typing import Generic, TypeVar

from jspec.drafters.protocol import Drafter
from jspec.net import Params

D = TypeVar("D", bound=Drafter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedDrafter(Generic[D]):
    """A drafter with its weights."""

    drafter: D
    params: Params
