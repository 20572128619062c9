"""Keys that config.json may have besides those that a family reads.

Any other key might change the computation. A family reads its values from a ReadConfig, which records them;
`check_unread` refuses the rest.
"""

import re
from collections.abc import Mapping
from typing import Any

from pagoda_common.errors import ModelLoadError

PARTS = ("text_config", "attn_config")
"""Objects in config.json that families read value by value."""

HARMLESS = frozenset(
    """
    architectures auto_map cache_implementation compression_config custom_pipelines dtype finetuning_task
    id2label label2id language library_name license mlx_version model_name model_type name_or_path peft_version
    pipeline_tag prefix problem_type pruned_heads quantization quantization_config task_specific_params tokenizer_class
    torch_dtype torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version
    is_llama_config max_length max_sequence_length max_new_tokens min_length model_max_length seq_length seq_len
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    remove_invalid_values repetition_penalty suppress_tokens temperature top_k top_p typical_p
    bias_dropout_fusion chunk_size_feed_forward device_map embedding_fraction gradient_checkpointing init_config
    init_device is_decoder keys_to_ignore_at_inference layerdrop line_by_line logits_to_keep loss_fn
    masked_softmax_fusion n_ctx neftune_noise_alpha num_labels offset_alibi pretraining_tp return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise router_z_loss_coef skip_bias_add
    slow_but_exact tf_legacy_loss tie_encoder_decoder use_bfloat16 use_cache use_flash_attention use_flash_attn
    use_parallel_embedding verbose vision_config
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 softmax_in_fp32 attn_impl
    mm_tokens_per_image image_size
    """.split()  # noqa: SIM905
)
"""Keys without effect on a forward pass of text: origin, training, generation, files, other tasks."""

_HARMLESS = re.compile(
    r"_.*|.*dropout|.*_pdrop|init.*|.*_init|.*_token|.*_token_ids?|.*_token_index|output_.*|summary_.*"
)
"""Patterns of further keys without effect."""

ON_BY_DEFAULT = frozenset(("is_causal", "causal", "use_causal_mask", "use_rope", "rotary"))
"""Keys that must be true if set: false asks for another computation."""


class ReadConfig(dict[str, Any]):
    """A config.json, or an object in it, that records which of its values were read."""

    def __init__(self, values: Mapping[str, Any], *, read: set[str] | None = None) -> None:
        parts = {name: ReadConfig(values[name]) for name in PARTS if type(values.get(name)) is dict}
        super().__init__({**values, **parts})
        self.read: set[str] = set() if read is None else read

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __or__(self, other: Any) -> Any:
        return ReadConfig({**self, **other}, read=self.read)

    def __ror__(self, other: Any) -> Any:
        return ReadConfig({**other, **self}, read=self.read)


def unused(config: Mapping[str, Any], *names: str) -> None:
    """Mark the values of `names` as without effect on this model."""
    if isinstance(config, ReadConfig):
        config.read.update(names)


def expect(config: Mapping[str, Any], **values: Any) -> None:
    """Check values that describe what this model always computes; missing and null mean the same.

    Raises:
        ModelLoadError: a value differs.
    """
    for name, value in values.items():
        given = config.get(name)
        if given is not None and given != value:
            raise ModelLoadError(f"config.json has {name} {_shown(given)}, which is not supported; must be {value!r}")


def check_unread(config: ReadConfig, path: str = "") -> None:
    """Check that every unread value is known to be harmless.

    Raises:
        ModelLoadError: an unread value may change the computation.
    """
    for name, value in config.items():
        if name in PARTS and isinstance(value, ReadConfig) and name in config.read:
            check_unread(value, f"{path}{name}.")
        elif name not in config.read and not is_harmless(name, value):
            raise ModelLoadError(
                f"config.json has {path}{name} {_shown(value)}, which is not supported and may change what the model "
                "computes"
            )


def is_harmless(name: str, value: Any) -> bool:
    """Whether an unread value has no effect: it is empty, or its name or value is known."""
    if name in ON_BY_DEFAULT:
        return value is None or value is True
    return not value or name in HARMLESS or _HARMLESS.fullmatch(name) is not None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
