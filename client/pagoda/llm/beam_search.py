"""LLM.beam_search's parameters and outputs, in vLLM's shapes."""

from dataclasses import dataclass, field

from pagoda_common.params.beam_search import BeamSearchParams as EngineBeamSearchParams
from pagoda_common.params.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams(EngineBeamSearchParams):
    """How to search, and when a hypothesis ends. All beam_width hypotheses are returned.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names it.
    """

    max_tokens: int
    """Maximum number of tokens to generate."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens."""
    temperature: float = 0.0
    """Accepted for compatibility: a search takes no chances."""
    include_stop_str_in_output: bool = False
    """Keep the token that ended a hypothesis."""
    structured_outputs: StructuredOutputsParams | None = None
    """Only what it allows is searched."""

    def sampling_params(self) -> SamplingParams:
        """Sampling parameters for the engine; a search ignores the temperature."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            seed=0,
            structured_outputs=self.structured_outputs,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One hypothesis."""

    tokens: list[int]
    """Token ids, the prompt's first."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Log probabilities of each output token, including the last one."""
    cum_logprob: float = 0.0
    """Their sum; over the length to the power of length_penalty it is the hypothesis's score."""
    text: str = ""
    """Their text, special tokens included."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token that ended it."""


@dataclass(slots=True)
class BeamSearchOutput:
    """The hypotheses of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """`output`, of a request that searched, in vLLM's shape."""
    return BeamSearchOutput([_sequence(output.prompt_token_ids, one, params, tokenizer) for one in output.outputs])


def _sequence(
    prompt_token_ids: list[int], output: CompletionOutput, params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchSequence:
    tokens, stop_reason = output.token_ids, output.stop_reason
    if output.finish_reason == "stop" and tokens:
        stop_reason = tokens[-1]
        if not params.include_stop_str_in_output:
            tokens = tokens[:-1]
    tokens = prompt_token_ids + tokens
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    return BeamSearchSequence(
        tokens=tokens,
        text=text,
        finish_reason=output.finish_reason,
        stop_reason=stop_reason,
        logprobs=output.logprobs or [],
        cum_logprob=output.cumulative_logprob or 0.0,
    )
