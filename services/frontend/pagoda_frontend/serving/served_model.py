"""Facts of the loaded model: tokenizer, limits, defaults, names."""

import asyncio
import time
from dataclasses import dataclass, field

from pagoda_common.config.checkpoint.generation_config import resolve_generation_config
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.structured_outputs_config import StructuredOutputsDefaults, structured_outputs_defaults
from pagoda_common.engine.interface import Engine
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.pooling_params import PoolingTask
from pagoda_common.text.prompt_files import PromptFiles
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.version import VERSION
from pagoda_frontend.budget.work_pool import WorkPool
from pagoda_frontend.requests.grammar_checks import GrammarChecks
from pagoda_frontend.requests.params import SamplingDefaults, sampling_defaults
from pagoda_frontend.requests.prompts import Prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """Facts of the loaded model."""

    names: tuple[str, ...]
    """Names that clients may use; responses show the first one."""
    tokenizer: Tokenizer
    prompts: Prompts
    grammars: GrammarChecks
    max_model_len: int
    vocab_size: int
    embedding_size: int
    """Length of an embedding; 0: the worker makes no embeddings."""
    pooling_tasks: tuple[PoolingTask, ...] = ()
    """Pooling tasks, the default first; empty: only embeddings."""
    unserved_pooling_tasks: tuple[PoolingTask, ...] = ()
    """Tasks that the pooler config leaves out."""
    only_pools: bool = False
    """The model does not generate text."""
    labels: tuple[str, ...] = ()
    """Labels of a classification model."""
    has_matryoshka: bool = False
    """Whether embeddings may be shortened."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """Lengths to which embeddings may be shortened; empty: any."""
    prompt_files: PromptFiles = field(default_factory=PromptFiles)
    """Prompts that are put before texts, by name."""
    defaults: SamplingDefaults
    structured_outputs: StructuredOutputsDefaults
    """Options of structured outputs that hold for every request."""
    fingerprint: str
    """The system_fingerprint of responses, which changes with the version and the model."""
    created: int
    """Unix time in seconds at which the model was ready."""
    lora: LoraAdapter | None = None
    """The adapter that the request names, if any."""

    def label(self, place: int) -> str:
        """The name of a label."""
        return self.labels[place] if place < len(self.labels) else f"LABEL_{place}"


async def load_served_model(
    config: FrontendConfig, *, engine: Engine, work: WorkPool, chat_template: str | None
) -> ServedModel:
    """Load the model of `engine`, as soon as the engine is ready.

    Args:
        work: pool that makes prompts.
        chat_template: Jinja text; None takes the tokenizer's.

    Raises:
        PagodaError: the tokenizer cannot be loaded, or the engine was closed.
    """
    source = config.tokenizer or (config.model if config.model != EMBEDDED_MODEL else None)
    if source is not None:
        tokenizer = await asyncio.to_thread(Tokenizer.load, source, revision=config.revision)
    await engine.wait_until_ready()
    summary = engine.model_summary
    assert summary is not None
    if source is None:
        tokenizer = await asyncio.to_thread(Tokenizer.load, summary.model, revision=config.revision)
    own_name = config.model if config.model != EMBEDDED_MODEL else summary.model
    return ServedModel(
        names=config.served_model_name or (own_name,),
        tokenizer=tokenizer,
        prompts=Prompts(
            tokenizer=tokenizer,
            chat_template=chat_template,
            max_model_len=summary.max_model_len,
            vocab_size=summary.vocab_size,
            work=work,
            longest_token_chars=await asyncio.to_thread(lambda: tokenizer.longest_token_bytes),
        ),
        grammars=GrammarChecks(
            tokenizer=tokenizer.name,
            revision=config.revision,
            vocab_size=summary.vocab_size,
            eos_token_ids=summary.eos_token_ids,
        ),
        max_model_len=summary.max_model_len,
        vocab_size=summary.vocab_size,
        embedding_size=summary.embedding_size,
        pooling_tasks=summary.pooling_tasks,
        unserved_pooling_tasks=summary.unserved_pooling_tasks,
        only_pools=summary.only_pools,
        labels=summary.labels,
        has_matryoshka=summary.has_matryoshka,
        matryoshka_dimensions=summary.matryoshka_dimensions,
        prompt_files=tokenizer.prompt_files,
        defaults=sampling_defaults(
            resolve_generation_config(
                summary.generation_config_json,
                source=config.generation_config,
                override=config.override_generation_config,
            )
        ),
        structured_outputs=structured_outputs_defaults(config.structured_outputs_config),
        fingerprint=f"pagoda-{VERSION}-{summary.digest[:8]}",
        created=int(time.time()),
    )
