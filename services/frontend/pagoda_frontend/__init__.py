"""The frontend: OpenAI HTTP and public gRPC in, token ids to the scheduler, text back. Knows no tensors, no blocks."""
