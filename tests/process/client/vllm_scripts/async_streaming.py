"""A stream of deltas from the asynchronous engine."""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            text += completion.text
        if output.finished:
            break
    return text


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="pagoda-tiny", enforce_eager=True))
    try:
        for number, prompt in enumerate(["Once upon a time", "The little dog"]):
            print(repr(await stream(engine, prompt, f"stream-{number}")))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
