"""Sends one call's texts through the engine, and scores pairs. Knows no HTTP and no messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda_common.engine.similarity import SIMILARITIES, late_interaction
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import POOLED, PoolingParams, PoolingTask
from pagoda_common.params.truncation import Truncation
from pagoda_common.text.pooling_prompts import Given, PoolingPrompt, mean_of
from pagoda_frontend.pooling.texts import maker_of, pooling_prompts
from pagoda_frontend.requests.call_context import CallContext
from pagoda_frontend.requests.embeddings import check_task, embedding_of
from pagoda_frontend.requests.params import check_cache_salt
from pagoda_frontend.requests.run import Run
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import Serving

PER_TOKEN = ("token_embed", "token_classify")
"""Tasks with values for each token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingCall:
    """Options of one call, besides its texts."""

    call: CallContext
    model: ServedModel
    field: str
    """Field of the request with the texts."""
    add_special_tokens: bool = True
    truncation: Truncation | None = None
    prefix: str = ""
    """Prompt that is put before each text that is not a pair."""
    max_query_tokens: int = 0
    """Maximum number of tokens that are kept of the first text of a pair; 0: all."""
    max_document_tokens: int = 0
    """Maximum number of tokens that are kept of the second text of a pair; 0: all."""
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Pooled:
    """The engine's results."""

    run: Run
    values: list[Embedding]
    """One per text; for a text in pieces, the mean."""
    prompts: list[PoolingPrompt]

    def of_task(self, task: PoolingTask, place: int) -> Embedding:
        """Values of an input by task: [size], [num_tokens, size], or the lexical weight of each token [num_tokens]."""
        is_lexical = task == "token_classify" and not self.run.model.labels
        return self.by_token(place) if task in PER_TOKEN and not is_lexical else self.values[place]

    def by_token(self, place: int) -> Embedding:
        """[num_tokens, size] of an input; some pooling methods leave out the first token."""
        values, num_tokens = self.values[place], len(self.prompts[place].token_ids)
        for num_rows in (num_tokens, num_tokens - 1):
            if num_rows and len(values) % num_rows == 0:
                return values.reshape(num_rows, -1)
        return values.reshape(-1, 1)

    def num_pieces(self, place: int) -> int:
        """Number of pieces of an input; usually 1."""
        return len(self.prompts[place].pieces)


async def pool_texts(asked: PoolingCall, given: Sequence[Given], params: PoolingParams, *, serving: Serving) -> Pooled:
    """The result of each text; long texts are embedded in pieces with `enable_long_inputs`.

    Raises:
        PagodaError: a text is invalid, or the engine refused it or failed.
    """
    check_cache_salt(asked.cache_salt)
    maker = maker_of(
        asked.model,
        field=asked.field,
        add_special_tokens=asked.add_special_tokens,
        truncation=asked.truncation,
        prefix=asked.prefix,
        max_query_tokens=asked.max_query_tokens,
        max_document_tokens=asked.max_document_tokens,
        splits_long=params.task == "embed" and serving.config.enable_long_inputs,
    )
    prompts = await pooling_prompts(given, maker, serving=serving)
    pieces = [piece for prompt in prompts for piece in prompt.pieces]
    run = Run(
        asked.call,
        serving=serving,
        model=asked.model,
        prompts=pieces,
        sampling_params=[POOLED] * len(pieces),
        cache_salt=asked.cache_salt or "",
        pooling=[_paired(params, prompt.second_text_start) for prompt in prompts for _ in prompt.pieces],
    )
    made = iter([embedding_of(one) for one in await run.collect()])
    values = [mean_of([next(made) for _ in one.pieces], [len(piece) for piece in one.pieces]) for one in prompts]
    return Pooled(run, values, prompts)


async def score_pairs(
    asked: PoolingCall, pairs: list[tuple[str, str]], params: PoolingParams, *, serving: Serving
) -> tuple[list[float], Pooled]:
    """A score for each pair, from a model that scores or from the texts' vectors; errors as in `pool_texts`."""
    tasks = asked.model.pooling_tasks
    if "score" in tasks:
        done = await pool_texts(asked, pairs, params, serving=serving)
        return [float(values[0]) for values in done.values], done
    by_tokens = tasks[:1] == ("token_embed",)
    task: PoolingTask = "token_embed" if by_tokens else "embed"
    check_task(asked.model, task)
    maker = maker_of(
        asked.model,
        field=asked.field,
        max_query_tokens=asked.max_query_tokens,
        max_document_tokens=asked.max_document_tokens,
    )
    if maker.cuts_pairs:
        size = sum(len(one) + len(other) for one, other in pairs)
        whole = pairs
        pairs = await serving.work.run(lambda: [maker.cut_pair(*pair) for pair in whole], num_bytes=size)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    done = await pool_texts(asked, texts, PoolingParams(task=task), serving=serving)
    found = {text: done.by_token(place) if by_tokens else done.values[place] for place, text in enumerate(texts)}
    alike = late_interaction if by_tokens else SIMILARITIES[asked.model.prompt_files.similarity]
    scores = await serving.work.run(
        lambda: [alike(found[one], found[other]) for one, other in pairs],
        num_bytes=sum(values.nbytes for values in found.values()),
    )
    return scores, done


def ranked(scores: Sequence[float], top_n: int | None) -> list[int]:
    """Indices by descending score, equal scores in their order; at most `top_n`, if that is not 0."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or None]


def _paired(params: PoolingParams, second_text_start: int) -> PoolingParams:
    if not second_text_start:
        return params
    return PoolingParams(task=params.task, use_activation=params.use_activation, second_text_start=second_text_start)
