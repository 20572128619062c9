"""Read a chat answer over gRPC to its end, even if its frontend dies.

    python examples/resume_grpc.py 127.0.0.1:50051 [127.0.0.1:50052 ...]

Every response has the place of its tokens (index, offset). If the connection breaks, the program calls the next
frontend with `resume_from`: the response's id, and the number of tokens received for each choice.
"""

import sys
import time
from collections.abc import Iterator
from itertools import cycle

import grpc

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2

REQUEST = inference_pb2.ChatRequest(
    messages=[inference_pb2.ChatMessage(role="user", content="Tell me a story about a dog.")],
    sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=300),
)
GIVE_UP_S = 25.0
"""The scheduler keeps a stream without a frontend for 30 seconds (--orphan-lease)."""


def responses(addresses: list[str], request: inference_pb2.ChatRequest) -> Iterator[inference_pb2.ChatResponse]:
    """The responses of one answer, each once."""
    received = [inference_pb2.ReceivedSequence() for _ in range(max(1, request.sampling_params.n))]
    deadline = time.monotonic() + GIVE_UP_S
    for address in cycle(addresses):
        try:
            with grpc.insecure_channel(address) as channel:
                for response in inference_pb2_grpc.InferenceStub(channel).Chat(request, timeout=60):
                    place = received[response.index]
                    if response.token_ids:
                        place.num_tokens = response.offset + len(response.token_ids)
                    place.is_finished = bool(response.finish_reason)
                    request = inference_pb2.ChatRequest(
                        resume_from=inference_pb2.ResumeFrom(request_id=response.request_id, received=received)
                    )
                    deadline = time.monotonic() + GIVE_UP_S
                    yield response
                return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise
            print(f"[{address}: {error.details()}]", file=sys.stderr)
        time.sleep(0.2)


def main() -> None:
    """Print the answer as it comes."""
    for response in responses(sys.argv[1:] or ["127.0.0.1:50051"], REQUEST):
        print(response.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
