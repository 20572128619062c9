"""Small checkpoints of encoders: random weights, a tokenizer of bytes, and what transformers makes of texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES = {
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 514,
}
CLS, SEP, PAD = 256, 257, 258
FAMILIES: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "RobertaModel": {"max_position_embeddings": 514 + PAD + 1},
    "XLMRobertaModel": {"max_position_embeddings": 514 + PAD + 1},
    "CamembertModel": {"max_position_embeddings": 514 + PAD + 1},
    "DistilBertModel": {},
    "ElectraModel": {"embedding_size": 32},
    "MPNetModel": {"max_position_embeddings": 514 + PAD + 1},
    "AlbertModel": {"embedding_size": 32},
    "NomicBertModel": {},
    "ModernBertModel": {"local_attention": 32, "global_attn_every_n_layers": 2},
    "GteModel": {},
    "JinaEmbeddingsV3Model": {"lora_adaptations": ["retrieval.query"], "max_position_embeddings": 514 + PAD + 1},
    "EuroBertModel": {"num_key_value_heads": 2, "head_dim": 16},
    "DebertaV2Model": {
        "relative_attention": True,
        "position_buckets": 64,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
}
"""By the name of transformers' class: options besides SIZES."""
DECODERS: dict[str, dict[str, Any]] = {
    "Qwen3Model": {"num_key_value_heads": 2, "head_dim": 16},
    "MistralModel": {"num_key_value_heads": 2, "sliding_window": 24},
    "Gemma2Model": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 2.0},
    "Lfm2Model": {
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_ff_dim": 128,
        "block_auto_adjust_ff_dim": False,
    },
    "Gemma3TextModel": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "use_bidirectional_attention": True,
    },
}
SEED = 3


def make_encoder(architecture: str, directory: Path, **options: Any) -> Any:
    """Save a checkpoint of transformers' class; the module."""
    import transformers

    known = {**FAMILIES, **DECODERS}
    base = next((one for one in known if one.removesuffix("Model") == architecture.partition("For")[0]), architecture)
    model_class = getattr(transformers, architecture)
    given = SIZES | known.get(base, {}) | {"pad_token_id": PAD} | options
    if model_class.config_class.model_type == "distilbert":
        given |= {"dim": given["hidden_size"], "hidden_dim": 128, "n_layers": 3, "n_heads": 4}
    torch.manual_seed(SEED)
    config = model_class.config_class(**given)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if "embed" in name else 0.12))
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    write_pair_tokenizer(directory)
    return model


def write_pair_tokenizer(directory: Path) -> None:
    """Bytes, with [CLS] and [SEP] around texts and pairs, as BERT has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: place for place, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(directory)


def write_modules(
    directory: Path, pooling: str | None = "mean", *, normalizes: bool = True, dense: Tensor | None = None, **more: Any
) -> None:
    """sentence-transformers' files: a pooling, a matrix after it, and what is in `more` by file name."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    if pooling is not None:
        modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
        (directory / "1_Pooling").mkdir(exist_ok=True)
        switches = {f"pooling_mode_{name}": True for name in pooling.split("+")}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **switches}))
    if dense is not None:
        from safetensors.torch import save_file

        path = directory / "2_Dense"
        path.mkdir(exist_ok=True)
        modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
        config = {"in_features": dense.shape[1], "out_features": dense.shape[0], "bias": False}
        config["activation_function"] = "torch.nn.modules.activation.Tanh"
        (path / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": dense}, path / "model.safetensors")
    if normalizes:
        modules.append({"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"})
    (directory / "modules.json").write_text(json.dumps(modules))
    for name, content in more.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of random bytes, with special tokens where there is room."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for length in lengths:
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        if length > 2:
            ids[0], ids[-1] = CLS, SEP
        made.append(ids)
    return made


@torch.inference_mode()
def hidden_of(model: Any, ids: Sequence[int], token_types: Sequence[int] | None = None) -> Tensor:
    """[num_tokens, size] of one sequence alone, by transformers."""
    named = {} if token_types is None else {"token_type_ids": torch.tensor([list(token_types)])}
    given = torch.tensor([list(ids)])
    output = model(input_ids=given, attention_mask=torch.ones_like(given), **named)
    return output.last_hidden_state[0]  # type: ignore[no-any-return]  # transformers: Any
