"""Finds the family that runs an architecture of config.json."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pagoda_common.config.pooler_config import pooler_config
from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.bamba import BAMBA_NAMES, bamba_spec
from pagoda_worker.models.bloom import BLOOM_NAMES, MPT_NAMES, bloom_spec, mpt_spec
from pagoda_worker.models.cohere import COHERE_NAMES, cohere2_spec, cohere_spec
from pagoda_worker.models.config_keys import ReadConfig, check_unread
from pagoda_worker.models.deci_lm import deci_lm_spec
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.deepseek import deepseek_v2_spec, deepseek_v3_spec, deepseek_weights
from pagoda_worker.models.exaone import exaone_spec, exaone_weights
from pagoda_worker.models.exaone4 import exaone4_spec
from pagoda_worker.models.falcon import falcon_spec, falcon_weights
from pagoda_worker.models.falcon_h1 import FALCON_H1_NAMES, falcon_h1_spec
from pagoda_worker.models.gemma import (
    GEMMA2_NAMES,
    GEMMA3_MULTIMODAL_NAMES,
    GEMMA_NAMES,
    gemma2_spec,
    gemma3_multimodal_spec,
    gemma3_spec,
    gemma_spec,
)
from pagoda_worker.models.gemma3n import (
    gemma3n_multimodal_spec,
    gemma3n_multimodal_weights,
    gemma3n_spec,
    gemma3n_weights,
)
from pagoda_worker.models.gemma4 import gemma4_multimodal_spec, gemma4_multimodal_weights, gemma4_spec, gemma4_weights
from pagoda_worker.models.glm import GLM4_NAMES, GLM_NAMES, glm4_spec, glm_spec
from pagoda_worker.models.glm4_moe import glm4_moe_lite_spec, glm4_moe_spec
from pagoda_worker.models.gpt2 import GPT2_NAMES, gpt2_spec, gpt_bigcode_spec, gpt_bigcode_weights
from pagoda_worker.models.gpt_neox import GPT_NEOX_NAMES, gpt_neox_spec
from pagoda_worker.models.gpt_oss import gpt_oss_spec, gpt_oss_weights
from pagoda_worker.models.gptj import GPTJ_NAMES, gptj_spec
from pagoda_worker.models.granite_hybrid import granite_hybrid_spec, granite_hybrid_weights
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.models.hunyuan import HUNYUAN_NAMES, hunyuan_dense_spec, hunyuan_moe_spec
from pagoda_worker.models.installed import installed_factory
from pagoda_worker.models.jamba import JAMBA_NAMES, jamba_spec
from pagoda_worker.models.lfm2 import LFM2_NAMES, lfm2_moe_spec, lfm2_spec
from pagoda_worker.models.llama import (
    ARCEE_NAMES,
    LLAMA_NAMES,
    arcee_spec,
    ernie4_5_spec,
    granite_spec,
    internlm3_spec,
    llama_spec,
    ministral_spec,
    mistral_spec,
    qwen2_spec,
    qwen3_spec,
    seed_oss_spec,
    smollm3_spec,
)
from pagoda_worker.models.llama4 import llama4_multimodal_spec, llama4_spec, llama4_weights
from pagoda_worker.models.mamba_models import MAMBA_NAMES, falcon_mamba_spec, mamba2_spec, mamba_spec
from pagoda_worker.models.minicpm3 import minicpm3_spec, youtu_spec
from pagoda_worker.models.minimax_m2 import MINIMAX_M2_NAMES, minimax_m2_spec
from pagoda_worker.models.model import BuildConfig, Head, ModelFactory
from pagoda_worker.models.moe import (
    MIXTRAL_NAMES,
    QWEN_MOE_NAMES,
    mixtral_spec,
    olmoe_spec,
    qwen2_moe_spec,
    qwen3_moe_spec,
)
from pagoda_worker.models.nemotron import NEMOTRON_NAMES, nemotron_spec
from pagoda_worker.models.nemotron_h import NEMOTRON_H_NAMES, nemotron_h_spec
from pagoda_worker.models.olmo import OLMO2_NAMES, olmo2_spec, olmo3_spec, olmo_spec
from pagoda_worker.models.opt import OPT_NAMES, opt_spec
from pagoda_worker.models.phi import PHI3_NAMES, PHI_NAMES, phi3_spec, phi_spec
from pagoda_worker.models.qwen3_5 import (
    qwen3_5_moe_multimodal_spec,
    qwen3_5_moe_spec,
    qwen3_5_multimodal_spec,
    qwen3_5_spec,
    qwen3_5_weights,
)
from pagoda_worker.models.qwen3_next import QWEN3_NEXT_NAMES, qwen3_next_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.stablelm import STABLELM_NAMES, stablelm_spec
from pagoda_worker.models.starcoder2 import STARCODER2_NAMES, starcoder2_spec
from pagoda_worker.models.weights import TensorNames, WeightNames, weight_names
from pagoda_worker.models.zamba2 import zamba2_spec, zamba2_weights
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True, slots=True)
class Family:
    """A family: reads one architecture's checkpoints; a ModelFactory of decoders."""

    read: Callable[[HfConfig], DecoderSpec]
    names: TensorNames | Callable[[DecoderSpec], WeightNames]
    """Names of the tensors; a function if they depend on options."""

    def spec(self, config: HfConfig) -> DecoderSpec:
        """The options of a checkpoint.

        Raises:
            ModelLoadError: config.json lacks a value, or has one that is unknown, not supported or of the wrong type.
        """
        read = ReadConfig(config)
        try:
            spec = self.read(read)
        except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
            raise ModelLoadError(f"config.json cannot be understood: {type(error).__name__}: {error}") from error
        check_unread(read)
        return spec

    def __call__(self, *, config: BuildConfig, prefix: str = "", parallel: TensorParallel = ALONE) -> Decoder:
        """See ModelFactory."""
        spec = self.spec(config.checkpoint)
        return Decoder(spec=spec, prefix=prefix, parallel=parallel, names=self.weights(spec))

    def weights(self, spec: DecoderSpec) -> WeightNames:
        """All tensors of a checkpoint."""
        return weight_names(spec, self.names) if isinstance(self.names, TensorNames) else self.names(spec)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama_spec, LLAMA_NAMES),
    "LLaMAForCausalLM": Family(llama_spec, LLAMA_NAMES),
    "DeciLMForCausalLM": Family(deci_lm_spec, LLAMA_NAMES),
    "MistralForCausalLM": Family(mistral_spec, LLAMA_NAMES),
    "MinistralForCausalLM": Family(ministral_spec, LLAMA_NAMES),
    "Qwen2ForCausalLM": Family(qwen2_spec, LLAMA_NAMES),
    "Qwen3ForCausalLM": Family(qwen3_spec, LLAMA_NAMES),
    "GemmaForCausalLM": Family(gemma_spec, GEMMA_NAMES),
    "Gemma2ForCausalLM": Family(gemma2_spec, GEMMA2_NAMES),
    "Gemma3ForCausalLM": Family(gemma3_spec, GEMMA2_NAMES),
    "Gemma3ForConditionalGeneration": Family(gemma3_multimodal_spec, GEMMA3_MULTIMODAL_NAMES),
    "Gemma3nForCausalLM": Family(gemma3n_spec, gemma3n_weights),
    "Gemma3nForConditionalGeneration": Family(gemma3n_multimodal_spec, gemma3n_multimodal_weights),
    "Gemma4ForCausalLM": Family(gemma4_spec, gemma4_weights),
    "Gemma4ForConditionalGeneration": Family(gemma4_multimodal_spec, gemma4_multimodal_weights),
    "Phi3ForCausalLM": Family(phi3_spec, PHI3_NAMES),
    "OlmoForCausalLM": Family(olmo_spec, LLAMA_NAMES),
    "Olmo2ForCausalLM": Family(olmo2_spec, OLMO2_NAMES),
    "Olmo3ForCausalLM": Family(olmo3_spec, OLMO2_NAMES),
    "GraniteForCausalLM": Family(granite_spec, LLAMA_NAMES),
    "SmolLM3ForCausalLM": Family(smollm3_spec, LLAMA_NAMES),
    "ArceeForCausalLM": Family(arcee_spec, ARCEE_NAMES),
    "GlmForCausalLM": Family(glm_spec, GLM_NAMES),
    "Glm4ForCausalLM": Family(glm4_spec, GLM4_NAMES),
    "ExaoneForCausalLM": Family(exaone_spec, exaone_weights),
    "Exaone4ForCausalLM": Family(exaone4_spec, OLMO2_NAMES),
    "Ernie4_5ForCausalLM": Family(ernie4_5_spec, LLAMA_NAMES),
    "SeedOssForCausalLM": Family(seed_oss_spec, LLAMA_NAMES),
    "InternLM3ForCausalLM": Family(internlm3_spec, LLAMA_NAMES),
    "HunYuanDenseV1ForCausalLM": Family(hunyuan_dense_spec, HUNYUAN_NAMES),
    "HunYuanMoEV1ForCausalLM": Family(hunyuan_moe_spec, HUNYUAN_NAMES),
    "NemotronForCausalLM": Family(nemotron_spec, NEMOTRON_NAMES),
    "Starcoder2ForCausalLM": Family(starcoder2_spec, STARCODER2_NAMES),
    "StableLmForCausalLM": Family(stablelm_spec, STABLELM_NAMES),
    "CohereForCausalLM": Family(cohere_spec, COHERE_NAMES),
    "Cohere2ForCausalLM": Family(cohere2_spec, COHERE_NAMES),
    "GPTNeoXForCausalLM": Family(gpt_neox_spec, GPT_NEOX_NAMES),
    "PhiForCausalLM": Family(phi_spec, PHI_NAMES),
    "FalconForCausalLM": Family(falcon_spec, falcon_weights),
    "MixtralForCausalLM": Family(mixtral_spec, MIXTRAL_NAMES),
    "Qwen2MoeForCausalLM": Family(qwen2_moe_spec, QWEN_MOE_NAMES),
    "Qwen3MoeForCausalLM": Family(qwen3_moe_spec, QWEN_MOE_NAMES),
    "DeepseekV2ForCausalLM": Family(deepseek_v2_spec, deepseek_weights),
    "DeepseekV3ForCausalLM": Family(deepseek_v3_spec, deepseek_weights),
    "Glm4MoeForCausalLM": Family(glm4_moe_spec, deepseek_weights),
    "Glm4MoeLiteForCausalLM": Family(glm4_moe_lite_spec, deepseek_weights),
    "MiniCPM3ForCausalLM": Family(minicpm3_spec, LLAMA_NAMES),
    "YoutuForCausalLM": Family(youtu_spec, LLAMA_NAMES),
    "Llama4ForCausalLM": Family(llama4_spec, llama4_weights),
    "Llama4ForConditionalGeneration": Family(llama4_multimodal_spec, llama4_weights),
    "MiniMaxM2ForCausalLM": Family(minimax_m2_spec, MINIMAX_M2_NAMES),
    "GptOssForCausalLM": Family(gpt_oss_spec, gpt_oss_weights),
    "Qwen3NextForCausalLM": Family(qwen3_next_spec, QWEN3_NEXT_NAMES),
    "Qwen3_5ForCausalLM": Family(qwen3_5_spec, qwen3_5_weights),
    "Qwen3_5MoeForCausalLM": Family(qwen3_5_moe_spec, qwen3_5_weights),
    "Qwen3_5ForConditionalGeneration": Family(qwen3_5_multimodal_spec, qwen3_5_weights),
    "Qwen3_5MoeForConditionalGeneration": Family(qwen3_5_moe_multimodal_spec, qwen3_5_weights),
    "GraniteMoeHybridForCausalLM": Family(granite_hybrid_spec, granite_hybrid_weights),
    "FalconH1ForCausalLM": Family(falcon_h1_spec, FALCON_H1_NAMES),
    "NemotronHForCausalLM": Family(nemotron_h_spec, NEMOTRON_H_NAMES),
    "BambaForCausalLM": Family(bamba_spec, BAMBA_NAMES),
    "JambaForCausalLM": Family(jamba_spec, JAMBA_NAMES),
    "MambaForCausalLM": Family(mamba_spec, MAMBA_NAMES),
    "FalconMambaForCausalLM": Family(falcon_mamba_spec, MAMBA_NAMES),
    "Mamba2ForCausalLM": Family(mamba2_spec, MAMBA_NAMES),
    "Zamba2ForCausalLM": Family(zamba2_spec, zamba2_weights),
    "Lfm2ForCausalLM": Family(lfm2_spec, LFM2_NAMES),
    "Lfm2MoeForCausalLM": Family(lfm2_moe_spec, LFM2_NAMES),
    "OlmoeForCausalLM": Family(olmoe_spec, QWEN_MOE_NAMES),
    "GPTJForCausalLM": Family(gptj_spec, GPTJ_NAMES),
    "GPTBigCodeForCausalLM": Family(gpt_bigcode_spec, gpt_bigcode_weights),
    "BloomForCausalLM": Family(bloom_spec, BLOOM_NAMES),
    "MptForCausalLM": Family(mpt_spec, MPT_NAMES),
    "MPTForCausalLM": Family(mpt_spec, MPT_NAMES),
    "GPT2LMHeadModel": Family(gpt2_spec, GPT2_NAMES),
    "OPTForCausalLM": Family(opt_spec, OPT_NAMES),
}
"""Supported architectures. Two have a second name in early checkpoints: LLaMAForCausalLM and MPTForCausalLM."""


_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_HEADS: tuple[tuple[str, Head], ...] = (
    ("ForSequenceClassification", "sequence"),
    ("ForTokenClassification", "token"),
)
_POOLING = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForPreTraining")
"""Suffixes of architectures that generate nothing."""

TOKEN_VECTORS: dict[str, str] = {
    "HF_ColBERT": "linear.weight",
    "ColBERTModernBertModel": "linear.weight",
    "ColBERTJinaRobertaModel": "linear.weight",
    "ColBERTLfm2Model": "linear.weight",
}
"""Models that only give a vector for each token, and the tensor that shortens the vectors; a Dense of modules.json may
replace it. All names except the first are vLLM's, for --hf-overrides."""

MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "nemotron-nas": "DeciLMForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi": "PhiForCausalLM",
    "falcon": "FalconForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "youtu": "YoutuForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "bamba": "BambaForCausalLM",
    "jamba": "JambaForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gptj": "GPTJForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "bloom": "BloomForCausalLM",
    "mpt": "MptForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
}
"""Architecture by model_type, for a config.json without architectures."""

_LLAMA_MODULES = frozenset({"exaone", "internlm3"})
"""Model types that transformers runs with its Llama, so that it writes LlamaForCausalLM instead of their own name."""


def architectures_of(config: HfConfig) -> list[str]:
    """Names of a checkpoint's architecture: those in config.json, else by model_type. A family that transformers runs
    with its Llama gets its own name."""
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    if not names and isinstance(model_type, str) and model_type in MODEL_TYPES:
        names = [MODEL_TYPES[model_type]]
    if isinstance(model_type, str) and model_type in _LLAMA_MODULES:
        names = [MODEL_TYPES[model_type] if name == "LlamaForCausalLM" else name for name in names]
    return [str(name) for name in names]


def find_family(config: HfConfig) -> Family | None:
    """The family of a checkpoint, by its architectures, else by its model_type; None if there is none."""
    return next((FAMILIES[name] for name in architectures_of(config) if name in FAMILIES), None)


def is_foreign(config: HfConfig) -> bool:
    """Whether a checkpoint names a family's architecture, but has another model_type with its own names and options."""
    model_type = config.get("model_type")
    if model_type is None or model_type in MODEL_TYPES:
        return False
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # few checkpoints need it

    return model_type in CONFIG_MAPPING_NAMES


def family_of(config: HfConfig) -> Family:
    """The family of a checkpoint, by its architectures, and by its model_type where it names none.

    Raises:
        ModelLoadError: none of its architectures is supported.
    """
    family = find_family(config)
    if family is not None:
        return family
    names = architectures_of(config)
    found = ", ".join(names) or f"none named (model_type {config.get('model_type')!r})"
    raise ModelLoadError(f"architecture {found} is not supported; supported are {', '.join(FAMILIES)}")


def pooling_head(config: BuildConfig, names: Sequence[str]) -> Head | None:
    """The head of a checkpoint that sees whole sequences; None if it generates, and embeds the last token.

    Args:
        names: architectures of the checkpoint.
    """
    engine, files = config.engine, config.pooling
    if engine.runner == "generate":
        return None
    generates = any(name.endswith(_GENERATING) for name in names)
    needs_all = (
        files.poolings not in ((), ("last",))
        or (files.has_modules and not files.has_pooling)
        or config.checkpoint.get("is_causal") is False
        or config.checkpoint.get("use_bidirectional_attention") is True
        or pooler_config(engine.pooler_config).pooling_type not in (None, "last")
    )
    if generates and engine.runner == "auto" and not needs_all and engine.convert in ("auto", "none"):
        return None
    name = names[0] if names else ""
    if name in TOKEN_VECTORS or config.checkpoint.get("classifier_from_token"):
        return "none"
    if not generates and not name.endswith(_POOLING) and engine.runner == "auto" and not files.has_modules:
        return None
    if files.is_sparse or name.endswith("SpladeSparseEmbeddingModel"):
        return "vocabulary"
    if engine.convert == "embed":
        return "none"
    return next((head for ending, head in _HEADS if name.endswith(ending)), "none")


def factory_of(config: BuildConfig) -> ModelFactory:
    """The factory for a checkpoint, by --model-impl: an installed package, one of Pagoda's families, or transformers.

    Raises:
        ModelLoadError: none of its architectures is supported.
    """
    asked, names = config.engine.model_impl, architectures_of(config.checkpoint)
    if asked != "pagoda" and (head := pooling_head(config, names)) is not None:
        from pagoda_worker.models.encoders.encoder import EncoderModel

        return partial(EncoderModel, head=head)
    if asked != "transformers" and (installed := installed_factory(names)) is not None:
        return installed
    has_family = find_family(config.checkpoint) is not None and not is_foreign(config.checkpoint)
    if asked == "pagoda" or (asked == "auto" and has_family):
        return family_of(config.checkpoint)
    # Imported here: transformers takes seconds, and our own families do without it.
    from pagoda_worker.models.transformers_model.model import TransformersModel

    return TransformersModel
