"""``vllm.grpc.engine.VllmEngine`` next to Pagoda's own service, for routers that know vLLM's engine."""
