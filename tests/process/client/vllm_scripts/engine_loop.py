"""Requests that are added while the engine steps."""

import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = [
    ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=6)),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=10)),
    ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=12)),
]


def process(engine: LLMEngine) -> dict[str, RequestOutput]:
    waiting = list(enumerate(PROMPTS))
    finished = {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, (prompt, params) = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    return finished


def main(args: argparse.Namespace) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    finished = process(engine)
    assert [len(finished[str(number)].outputs) for number in range(3)] == [1, 1, 2]
    assert engine.get_num_unfinished_requests() == 0
    engine.add_request("long", "Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True))
    engine.step()
    engine.abort_request(["long"])
    print(engine.has_unfinished_requests(), len(finished), "finished")


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="requests in a loop"))
    main(parser.parse_args(["--model", "pagoda-tiny", "--max_num_seqs", "4"]))
