"""Why a drafter is not accepted: the order of checks from data to decoding, on a user's own files."""
