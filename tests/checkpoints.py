"""Tiny randomly initialised checkpoints of every supported architecture, as transformers writes them."""

import json
import math
from pathlib import Path
from typing import Any

from tests.small_models.dense import DENSE
from tests.small_models.experts import EXPERTS
from tests.small_models.gemma import GEMMA
from tests.small_models.latents import LATENTS
from tests.small_models.recurrent import RECURRENT
from tests.small_models.sizes import VOCAB_SIZE

EOS_TOKEN_ID = 257
"""In the vocabulary: 256 bytes, then <s> (256) and </s> (257); the rest are never text."""

SOFT_ROUTERS = (
    *("gpt_oss", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "nemotron_h", "lfm2_moe"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "llama4", "llama4_text", "minimax_m2"),
    "jamba",
)
"""Model types whose experts that are left out would have a share: weights that are not normalised change tokens."""

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = DENSE | GEMMA | LATENTS | EXPERTS | RECURRENT
"""Architecture to model_type and options."""

ARCHITECTURES = tuple(CONFIGS)

TEXT_PARTS = {"gemma3n": "gemma3n_text"}
"""Model types whose module needs a package for images that tests have not, and those of their text parts; the
architecture of both is ForConditionalGeneration and ForCausalLM."""


def make_checkpoint(architecture: str, directory: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """Write config.json, model.safetensors and a byte-level tokenizer; returns the directory.

    Args:
        architecture: a key of CONFIGS.
        overrides: options of the transformers config.
    """
    import torch  # only those who make a checkpoint pay for the import
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if architecture == "DeciLMForCausalLM":
        import tests.deci_lm  # noqa: F401  # transformers has no such model

    model_type, options = CONFIGS[architecture]
    special = {"bos_token_id": 256, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 258}
    common = {"vocab_size": VOCAB_SIZE} | special
    options = options | common | overrides
    if "text_config" in options:
        options["text_config"] = options["text_config"] | common
    config = AutoConfig.for_model(model_type, **options)
    # Of Llama 4's multimodal configs, AutoModelForCausalLM makes the text part alone.
    auto_class = AutoModelForImageTextToText if model_type == "llama4" else AutoModelForCausalLM
    model = auto_class.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, is_soft = _norm_mean(model_type, name), model_type in SOFT_ROUTERS
            _initialise(name, parameter, generator, norm_mean=mean, is_soft=is_soft)
        if model_type == "youtu":  # transformers reads it as zeros
            model.get_input_embeddings().weight[special["pad_token_id"]] = 0.0
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of a router
                buffer.copy_(0.2 * buffer.new_empty(buffer.shape).normal_(generator=generator))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * buffer.new_empty(buffer.shape).normal_(generator=generator))
    directory = Path(directory)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_as_text_part(directory: Path, architecture: str, model_type: str) -> None:
    """Have a checkpoint say that it is the text part of a multimodal one, some of whose other tensors are there."""
    import torch
    from safetensors.torch import load_file, save_file

    text = json.loads((directory / "config.json").read_text())
    config = {"architectures": [architecture], "model_type": model_type, "text_config": text, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    for other in ("vision_tower.stem.weight", "embed_vision.embedding.weight", "audio_tower.layer.weight"):
        renamed[f"model.{other}"] = torch.zeros(2, 2)
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})


def _norm_mean(model_type: str, name: str) -> float:
    """Gemma stores norm weights less one until its third; in its later models what a layer adds must not drown in large
    embeddings."""
    if not model_type.startswith("gemma"):
        return 1.0
    if model_type == "gemma3n_text" and ".k_norm." in name:
        return 0.4  # scores are not scaled
    less = 0.0 if model_type.startswith(("gemma3n", "gemma4")) else 1.0
    return (10.0 if model_type != "gemma" and ".post_" in name else 1.0) - less


def _initialise(name: str, parameter: Any, generator: Any, *, norm_mean: float, is_soft: bool) -> None:
    """Weights so large that greedy outputs vary, and that logits differ by far more than rounding."""
    noise = parameter.new_empty(parameter.shape).normal_(generator=generator)
    is_norm = any(part in name for part in ("norm", "ln_")) and name.endswith("weight")
    if is_norm:
        parameter.copy_(norm_mean + 0.2 * noise)
    elif name.endswith("A_log"):
        parameter.copy_(noise - 2.0)  # a state that is not forgotten within a few tokens
    elif name.endswith(("sinks", ".D")):
        parameter.copy_(noise)
    elif name.endswith(("correct_output_scale", "router.scale", "per_expert_scale")):
        parameter.copy_(1.0 + 0.3 * noise)
    elif name.endswith("dt_bias"):
        parameter.copy_(0.5 * noise)
    elif parameter.dim() == 1:
        parameter.copy_(0.05 * noise)
    elif (is_soft and name.endswith((".gate.weight", ".router.weight"))) or name.endswith(
        ("conv1d.weight", "conv.conv.weight")
    ):
        parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    elif name.endswith("per_layer_input_gate.weight"):  # of hidden states that pass no norm: gelu must not drown them
        parameter.copy_(0.15 * noise / math.sqrt(parameter.shape[-1]))
    elif name.endswith("_coefs.weight"):  # what mixes hidden states
        parameter.copy_(0.5 * noise / math.sqrt(parameter.shape[-1]))
    elif ".shared_transformer." in name or name.endswith(".linear.weight"):  # errors grow in every layer that has them
        parameter.copy_(0.7 * noise / math.sqrt(parameter.shape[-1]))
    elif name.endswith(("x_proj.weight", "dt_proj.weight")):  # what float16 can hold
        parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    elif any(part in name for part in ("embed_positions", "wpe")):
        parameter.copy_(1.5 * noise)
    elif any(part in name for part in ("embed", "wte", "lm_head")):
        parameter.copy_(0.5 * noise)
    else:
        parameter.copy_(noise * 2.5 / math.sqrt(min(parameter.shape)))


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer with a few special tokens."""
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
