"""``vllm.grpc.engine.VllmEngine`` beside our own service: routers that know vLLM's engine can use a scheduler."""
