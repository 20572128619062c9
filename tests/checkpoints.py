"""Tiny randomly initialised checkpoints of every supported architecture, as transformers writes them."""

import math
from pathlib import Path
from typing import Any

VOCAB_SIZE = 300
EOS_TOKEN_ID = 257
"""In the vocabulary: 256 bytes, then <s> (256) and </s> (257); the rest are never text."""

_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", _LLAMA),
    # The window is shorter than the prompts of most tests, and no multiple of a block.
    "MistralForCausalLM": ("mistral", _LLAMA | {"sliding_window": 21, "tie_word_embeddings": True}),
    "Qwen2ForCausalLM": (
        "qwen2",
        _LLAMA | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "Qwen3ForCausalLM": ("qwen3", _LLAMA | {"head_dim": 24}),
    "GPT2LMHeadModel": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "OPTForCausalLM": (
        "opt",
        {
            "hidden_size": 64,
            "ffn_dim": 112,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        },
    ),
}
"""Architecture to model_type and options."""

ARCHITECTURES = tuple(CONFIGS)


def make_checkpoint(architecture: str, directory: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """Write config.json, model.safetensors and a byte-level tokenizer; returns the directory.

    Args:
        architecture: a key of CONFIGS.
        overrides: options of the transformers config.
    """
    import torch  # only those who make a checkpoint pay for the import
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = CONFIGS[architecture]
    special = {"bos_token_id": 256, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 258}
    config = AutoConfig.for_model(model_type, **(options | {"vocab_size": VOCAB_SIZE} | special | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _initialise(name, parameter, generator)
    directory = Path(directory)
    model.save_pretrained(directory)
    _write_tokenizer(directory)
    return directory


def _initialise(name: str, parameter: Any, generator: Any) -> None:
    """Weights so large that greedy outputs vary, and that logits differ by far more than rounding."""
    noise = parameter.new_empty(parameter.shape).normal_(generator=generator)
    is_norm = any(part in name for part in ("norm", "ln_")) and name.endswith("weight")
    if is_norm:
        parameter.copy_(1 + 0.2 * noise)
    elif parameter.dim() == 1:
        parameter.copy_(0.05 * noise)
    elif any(part in name for part in ("embed_positions", "wpe")):
        parameter.copy_(1.5 * noise)
    elif any(part in name for part in ("embed", "wte", "lm_head")):
        parameter.copy_(0.5 * noise)
    else:
        parameter.copy_(noise * 2.5 / math.sqrt(min(parameter.shape)))


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token_id for token_id, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=512
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(directory)
