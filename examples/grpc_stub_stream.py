"""Stream a chat answer over gRPC: start `make serve`, then run `python examples/grpc_stub_stream.py`.

Arguments: the question, and the address of the frontend's gRPC port (127.0.0.1:50051).
"""

import sys

import grpc

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2

question = sys.argv[1] if len(sys.argv) > 1 else "Tell me a short story."
address = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:50051"
request = inference_pb2.ChatRequest(
    messages=[inference_pb2.ChatMessage(role="user", content=question)],
    sampling_params=types_pb2.SamplingParams(temperature=0.7, max_tokens=200),
)
with grpc.insecure_channel(address) as channel:
    for response in inference_pb2_grpc.InferenceStub(channel).Chat(request, timeout=60):
        print(response.content, end="", flush=True)
print()
