"""LoRA adapters of small checkpoints, as peft writes them, and what peft makes of them."""

import re
from pathlib import Path
from typing import Any

import torch


def make_adapter(checkpoint: Path, directory: Path, *, seed: int = 1, **options: Any) -> Path:
    """An adapter with random matrices, so large that it changes what a model says.

    Args:
        options: of peft.LoraConfig; by default rank 8 in all projections.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    given: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}
    wrapped = get_peft_model(model, LoraConfig(**(given | options)))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if re.search(r"lora_(embedding_)?[AB]", name):
            scale = 0.05 if re.search(r"lora_(embedding_)?B", name) else parameter.shape[-1] ** -0.5
            parameter.data.normal_(std=scale, generator=generator)
    wrapped.save_pretrained(directory, save_embedding_layers=False)
    return directory


def merged(checkpoint: Path, adapter: Path, *, merges: bool = True) -> Any:
    """The model of transformers with the adapter in its weights; `merges`: False computes it beside them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    wrapped = PeftModel.from_pretrained(model, adapter)
    return (wrapped.merge_and_unload() if merges else wrapped).eval()


def base_model(checkpoint: Path) -> Any:
    """The model of transformers without an adapter."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab_size] of the token after each.

    They are computed in float64, since float32 is off by up to 2e-4; experts have no product of that type.
    """
    if not any("experts" in name for name, _ in model.named_modules()):
        model = model.double()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1).float()  # type: ignore[no-any-return]  # transformers: Any
