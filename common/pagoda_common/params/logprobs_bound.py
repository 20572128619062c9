"""The limit on log probabilities of one token: `max_logprobs` of the engine; -1 is no limit."""

ALL = -1
"""As a number of log probabilities: one for each token of the vocabulary."""


def exceeds_max_logprobs(value: int | None, *, max_logprobs: int, vocab_size: int) -> bool:
    """Whether `value` asks for more than `max_logprobs`; -1 asks for `vocab_size`."""
    if value is None or max_logprobs == ALL:
        return False
    return (vocab_size if value == ALL else value) > max_logprobs
