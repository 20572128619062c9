"""A shared prefix is computed once; a beam search gives its hypotheses."""

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TextPrompt
from vllm.sampling_params import BeamSearchParams
from vllm.v1.metrics.reader import Counter, Histogram

PREFIX = "You are a teacher who writes short, friendly sentences for small children in a school by a river. " * 2


def main() -> None:
    llm = LLM(model="pagoda-tiny", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = [PREFIX + end for end in ("The dog is", "The sun is", "A boat is")]
    llm.generate(prompts[0], params)
    cached = [output.num_cached_tokens for output in llm.generate(prompts, params)]
    assert min(cached) > 0, cached
    llm.reset_prefix_cache()
    search = BeamSearchParams(beam_width=3, max_tokens=6)
    (found,) = llm.beam_search([TextPrompt(prompt="Once upon a time")], search)
    assert len(found.sequences) == 3
    figures = {metric.name: metric for metric in llm.get_metrics()}
    assert isinstance(figures["vllm:prompt_tokens"], Counter)
    first = figures["vllm:time_to_first_token_seconds"]
    assert isinstance(first, Histogram)
    assert first.count == first.buckets["+Inf"]
    print(cached, len(found.sequences), "hypotheses")
    del llm
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
