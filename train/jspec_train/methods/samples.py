"""A look at the first samples: what they show about settings that cannot be meant."""

from jspec_train.data.supervision import longest_run
from jspec_train.samples import SampleSource

LOOKED_AT = 1000  # samples that are read before the start


def look_at(source: SampleSource, mask_token_id: int | None) -> int:
    """The longest stretch of supervised tokens in the first samples.

    Raises:
      ValueError: a text has the token that stands for unknown ones.
    """
    longest = 0
    for index in range(min(len(source), LOOKED_AT)):
        sample = source[index]
        longest = max(longest, longest_run(sample.loss_mask))
        if mask_token_id is not None and (sample.ids == mask_token_id).any():
            raise ValueError(
                f"drafter.mask_token_id: expected an id that no text has, got {mask_token_id}, which is in sample "
                f"{sample.id}; choose a token that is never used"
            )
    return longest
