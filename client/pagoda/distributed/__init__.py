"""Names that programs for vLLM import from vllm.distributed."""

import gc

__all__ = ["cleanup_dist_env_and_memory"]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Let objects go that nothing refers to, an LLM with its processes among them.

    Args:
        shutdown_ray: accepted; there is no Ray.
    """
    gc.collect()
