"""Tensor parallelism: a model on two ranks samples what it samples on one, and what transformers does."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_common.config.engine_config import EMBEDDED_MODEL, EngineConfig, ModelConfig
from pagoda_common.errors import ConfigError, NotReady, PagodaError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.loader.held_parts import copy_part
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.registry import FAMILIES
from pagoda_worker.models.sharding import Sharding
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import WeightSource
from pagoda_worker.parallel import peers, tensor_parallel
from pagoda_worker.parallel.handshake import receive_into
from pagoda_worker.parallel.tensor_parallel import TensorParallel
from pagoda_worker.steps.step import StepInput
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import NUM_TOKENS, make_prompts, open_reference
from tests.unit.worker.parallel.ranks import Ranks

SPEC: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 11,
    "hidden_size": 12,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 3,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "activation": "silu",
}


def sharding(rank: int, world_size: int, **options: Any) -> Sharding:
    return Sharding(DecoderSpec(**SPEC | options), TensorParallel(rank=rank, world_size=world_size))


# The whole is in the parts.


def shards(parameter: str, whole: torch.Tensor, world_size: int, **options: Any) -> list[torch.Tensor]:
    """What each rank holds of a parameter."""
    parts = []
    for rank in range(world_size):
        mine = sharding(rank, world_size, **options)
        with torch.device("meta"):
            model = Decoder(spec=mine.spec, parallel=mine.parallel)
        part = torch.full(model.get_parameter(parameter).shape, float("nan"))
        copy_part(whole, WeightSource(name="", parameter=parameter), part, mine, num_rows=whole.shape[0])
        parts.append(part)
    return parts


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + int(np.prod(shape))).view(shape)


def test_heads_are_shared_out() -> None:
    whole = numbered(8 * 3, 12)
    first, second = shards("layers.0.attention.qkv_proj.weight", whole, 2)
    query, key, value = whole.split([12, 6, 6])
    assert torch.equal(first, torch.cat([query[:6], key[:3], value[:3]]))
    assert torch.equal(second, torch.cat([query[6:], key[3:], value[3:]]))


def test_a_kv_head_is_on_every_rank_that_asks_it() -> None:
    whole = numbered(8 * 3, 12)
    parts = shards("layers.0.attention.qkv_proj.weight", whole, 4)
    query, key, value = whole.split([12, 6, 6])
    for rank, part in enumerate(parts):
        head = slice(3 * (rank // 2), 3 * (rank // 2) + 3)
        assert torch.equal(part, torch.cat([query[3 * rank : 3 * rank + 3], key[head], value[head]]))


def test_norms_over_all_heads_go_by_heads() -> None:
    whole = numbered(12)
    assert torch.equal(torch.cat(shards("layers.0.attention.q_norm.weight", whole, 2, qk_norm="width")), whole)
    whole = numbered(6)
    parts = shards("layers.0.attention.k_norm.weight", whole, 4, qk_norm="width")
    assert torch.equal(torch.stack(parts), whole.view(2, 3).repeat_interleave(2, dim=0))


def test_the_outputs_columns_are_those_of_the_heads() -> None:
    whole = numbered(12, 12)
    assert torch.equal(torch.cat(shards("layers.0.attention.o_proj.weight", whole, 4), dim=1), whole)
    whole = numbered(12, 8)
    assert torch.equal(torch.cat(shards("layers.0.mlp.down_proj.weight", whole, 2), dim=1), whole)


def test_a_summed_bias_is_added_once() -> None:
    whole = numbered(12)
    parts = shards("layers.0.mlp.down_proj.bias", whole, 2, mlp_bias=True)
    assert torch.equal(parts[0] + parts[1], whole)


def test_gate_and_up_go_together() -> None:
    whole = numbered(16, 12)
    parts = shards("layers.0.mlp.up_proj.weight", whole, 2)
    gate, up = whole.chunk(2)
    assert torch.equal(torch.cat([part.chunk(2)[0] for part in parts]), gate)
    assert torch.equal(torch.cat([part.chunk(2)[1] for part in parts]), up)


def test_a_vocabulary_need_not_be_divisible() -> None:
    whole = numbered(11, 12)
    parts = shards("lm_head.weight", whole, 4)
    assert [part.shape[0] for part in parts] == [3, 3, 3, 2]
    assert torch.equal(torch.cat(parts), whole)


def test_a_head_s_bias_goes_with_its_rows() -> None:
    whole = numbered(11)
    parts = shards("lm_head_bias", whole, 4, head_bias=True)
    assert [len(part) for part in parts] == [3, 3, 3, 2]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("parameter", ["embed_tokens.weight", "norm.weight", "layers.0.attention_norm.weight"])
def test_what_everybody_needs_is_everywhere(parameter: str) -> None:
    whole = numbered(11, 12) if parameter.startswith("embed") else numbered(12)
    for part in shards(parameter, whole, 4):
        assert torch.equal(part, whole)


def test_slopes_of_linear_biases_follow_their_heads() -> None:
    specs = [sharding(rank, 2, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)).local_spec for rank in range(2)]
    assert [spec.alibi_slopes for spec in specs] == [(0.5, 0.25), (0.125, 0.0625)]


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (3, {}, "world_size is 3, must divide num_heads, 4"),
        (4, {"intermediate_size": 6}, "world_size is 4, must divide intermediate_size, 6"),
        (2, {"num_heads": 6, "num_kv_heads": 3}, "must divide num_kv_heads, 3, or be a multiple of it"),
        (
            2,
            {"moe": MoeSpec(num_experts=2, num_experts_per_token=1, intermediate_size=5)},
            "world_size is 2, must divide moe intermediate_size, 5",
        ),
        (2, {"qk_norm": "width", "norm": "layer_norm"}, "world_size is 2, must be 1 for LlamaForCausalLM"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(world_size: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharding(0, world_size, **options)


def test_a_rank_beyond_the_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank is 2, must be below world_size, 2"):
        TensorParallel(rank=2, world_size=2)


# The same tokens.


def outputs_of(driver: Driver, **options: Any) -> list[list[int]]:
    return [each.output for each in driver.generate(make_prompts(), **{"max_tokens": NUM_TOKENS} | options)]


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
        ("GPT2LMHeadModel", {}),
        ("GPTNeoXForCausalLM", {"num_attention_heads": 4, "hidden_size": 64}),
        ("CohereForCausalLM", {"use_qk_norm": True}),
        ("FalconForCausalLM", {}),
        ("BloomForCausalLM", {}),
        ("MixtralForCausalLM", {}),
        ("Olmo2ForCausalLM", {}),
        ("Olmo3ForCausalLM", {}),
        ("OlmoeForCausalLM", {"num_key_value_heads": 1}),
        ("Qwen2MoeForCausalLM", {}),
        ("HunYuanDenseV1ForCausalLM", {"tie_word_embeddings": True}),
        ("HunYuanMoEV1ForCausalLM", {"num_key_value_heads": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_two_ranks_equal_transformers(architecture: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    assert architecture in FAMILIES
    reference = open_reference(tmp_path, architecture, world_size=2, **overrides)
    assert outputs_of(reference.driver, chunk=50) == reference.outputs


def test_two_ranks_equal_one_on_the_embedded_model() -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=3, prompt_logprobs=1),
        *(SamplingParams(temperature=0.9, top_p=0.9, seed=seed, max_tokens=NUM_TOKENS) for seed in range(5)),
    ]
    one, two = Driver(EMBEDDED_MODEL), Driver(EMBEDDED_MODEL, world_size=2)
    results = [
        driver.generate(make_prompts(), params, max_tokens=NUM_TOKENS, chunk=40, budget=100) for driver in (one, two)
    ]
    assert [each.output for each in results[0]] == [each.output for each in results[1]]
    for alone, shared in zip(results[0][0].logprobs, results[1][0].logprobs, strict=True):
        assert alone == pytest.approx(shared, abs=1e-4)
    assert isinstance(two.worker, Ranks)
    (acknowledged,) = two.worker.acknowledged
    assert not acknowledged.token_ids.size, "only rank 0 says what was sampled"


def test_dummy_weights_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    make_checkpoint("LlamaForCausalLM", tmp_path)
    one, two = (Driver(tmp_path, world_size=size, load_format="dummy") for size in (1, 2))
    assert outputs_of(one) == outputs_of(two)


def test_a_sequence_that_cannot_be_sampled_is_forgotten_by_all_ranks() -> None:
    driver = Driver(EMBEDDED_MODEL, world_size=2)
    alone = driver.generate([[5, 6, 7]], max_tokens=4)[0].output
    nothing = SamplingParams(
        temperature=0, max_tokens=4, logit_bias={}, allowed_token_ids=[3], bad_words_token_ids=[[3]]
    )
    bad, good = driver.generate(
        [[5, 6, 7], [5, 6, 7]], [nothing, SamplingParams(temperature=0, max_tokens=4)], max_tokens=4
    )
    assert bad.bad is not None
    assert good.output == alone
    assert driver.generate([[5, 6, 7]], max_tokens=4)[0].output == alone


# Sums.


def on_all(num: int, operation: Callable[[TensorParallel], Any]) -> list[Any]:
    """What every rank of a group gets."""
    ranks = [TensorParallel(rank=rank, world_size=num) for rank in range(num)]
    ranks[0].open()
    for rank in ranks[1:]:
        rank.invite(ranks[0].address)

    def run(rank: TensorParallel) -> Any:
        rank.connect(torch.device("cpu"))
        return operation(rank)

    with ThreadPoolExecutor(num) as threads:
        results = list(threads.map(run, ranks, timeout=240))
    for rank in ranks:
        rank.close()
    return results


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 16 * 1024, 90_001, 700_000], ids=lambda size: f"{size}")
def test_a_sum_is_the_same_on_all_ranks_small_or_large(num: int, dtype: torch.dtype, size: int) -> None:
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(num)]
    sums = on_all(num, lambda rank: rank.all_reduce(parts[rank.rank].clone().view(1, -1)).view(-1))
    for total in sums:
        assert torch.equal(total, sums[0])
    expected = torch.stack(parts).float().sum(0)
    tolerance = 1e-6 if dtype == torch.float32 else 0.05
    assert torch.allclose(sums[0].float(), expected, atol=tolerance, rtol=tolerance)


def test_16_bit_parts_are_rounded_once_they_are_added_up() -> None:
    parts = [torch.tensor([256.0, 1.0]), torch.tensor([1.0, 256.0]), torch.tensor([1.0, 1.0])]
    sums = on_all(3, lambda rank: rank.all_reduce(parts[rank.rank].bfloat16()).tolist())
    assert sums == [[258.0, 258.0]] * 3  # 257 is none of bfloat16's numbers


def test_two_ranks_that_send_more_than_buffers_hold_do_not_wait_for_each_other() -> None:
    parts = [torch.full((8 << 20,), float(rank + 1)) for rank in range(2)]

    def operation(rank: TensorParallel) -> None:
        assert rank._peers is not None
        rank._peers.all_reduce(parts[rank.rank])

    on_all(2, operation)
    assert all(bool((part == 3.0).all()) for part in parts)


def test_columns_meet_at_rank_0_and_its_tokens_at_all() -> None:
    whole = numbered(3, 11)

    def operation(rank: TensorParallel) -> tuple[torch.Tensor, list[int]]:
        part = rank.part(11)
        gathered = rank.gather_columns(whole[:, part.start : part.stop], 11)
        return gathered, rank.broadcast(torch.tensor([5, 6]) * (1 - rank.rank)).tolist()

    results = on_all(2, operation)
    assert torch.equal(results[0][0], whole)
    assert [told for _, told in results] == [[5, 6], [5, 6]]


def test_another_secret_is_that_of_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "CONNECT_TIMEOUT_S", 0.5)
    leader, stranger = (TensorParallel(rank=rank, world_size=2) for rank in range(2))
    leader.open()
    place, _, secret = leader.address.partition("#")
    assert len(bytes.fromhex(secret)) == 32
    stranger.invite(f"{place}#{bytes(32).hex()}")
    with ThreadPoolExecutor(2) as threads:
        meeting = [threads.submit(each.connect, torch.device("cpu")) for each in (leader, stranger)]
        errors = [str(each.exception(timeout=240)) for each in meeting]
    assert errors[0].endswith("rank 1 did not come")
    assert errors[1].startswith("rank 1 could not meet the other ranks of its group: rank 0 (")


def test_every_start_has_a_place_and_a_secret_of_its_own_and_a_rank_without_one_is_refused() -> None:
    leader, other = (TensorParallel(rank=rank, world_size=2) for rank in range(2))
    addresses = set()
    for _ in range(3):
        leader.open()
        addresses.add(leader.address.partition("#")[2])
    assert len(addresses) == 3
    other.invite(leader.address.partition("#")[0])
    with pytest.raises(NotReady, match="no secret: all ranks of a group must have the same version"):
        other.connect(torch.device("cpu"))
    leader.close()
    assert leader.address == ""


# Ranks come and go.


def test_a_sum_that_waits_for_a_hanging_rank_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    is_waiting = threading.Event()

    def receive(connection: socket.socket, target: memoryview) -> None:
        is_waiting.set()
        receive_into(connection, target)

    monkeypatch.setattr(peers, "receive_into", receive)

    def give_up(rank: TensorParallel) -> None:
        assert is_waiting.wait(timeout=240)
        rank.abandon()

    def operation(rank: TensorParallel) -> str:
        if rank.rank:
            return ""  # it hangs elsewhere
        threading.Thread(target=give_up, args=(rank,), daemon=True).start()
        with pytest.raises(OSError, match="connection"):
            rank.all_reduce(torch.ones(4))
        return "given up"

    assert on_all(2, operation) == ["given up", ""]


def test_a_rank_that_is_lost_fails_the_others_step_and_the_group_meets_anew() -> None:
    driver = Driver(EMBEDDED_MODEL, world_size=2)
    ranks = driver.worker
    assert isinstance(ranks, Ranks)
    before = driver.generate([[5, 6, 7]], max_tokens=4)[0].output
    leader, other = ranks.workers
    step = StepInput(num_seqs=1, slots=np.array([0]), num_scheduled_tokens=np.array([1]))
    other.parallel.close()
    with pytest.raises(PagodaError, match="the step failed"):
        driver.generate([[5, 6, 7]], max_tokens=4)
    with pytest.raises(PagodaError, match="call InitializeCache first"):
        leader.execute_model(step)
    config = leader._config
    assert config is not None
    weights = leader._weights
    ranks.init_device(config)
    ranks.load_model(lambda loaded, total: None)
    assert leader._weights is weights, "nothing is loaded again"
    ranks.initialize_cache(num_blocks=600, num_cpu_blocks=4)
    driver._to_free = []
    assert driver.generate([[5, 6, 7]], max_tokens=4)[0].output == before


def test_a_rank_that_was_given_up_waits_again_once_it_is_invited() -> None:
    leader, other = (TensorParallel(rank=rank, world_size=2) for rank in range(2))
    leader.open()
    for ranks in (leader, other):
        ranks.abandon()
    leader.open()
    other.invite(leader.address)
    for first, second in ((other, leader), (leader, other)):
        with ThreadPoolExecutor(2) as threads:
            waiting = threads.submit(first.connect, torch.device("cpu"))
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            threads.submit(second.connect, torch.device("cpu")).result(timeout=240)
            waiting.result(timeout=240)
        for ranks in (other, leader):
            ranks.abandon()
            ranks.close()
        leader.open()
        other.invite(leader.address)


def test_a_rank_that_does_not_come_is_named_and_waiting_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "CONNECT_TIMEOUT_S", 3600.0)
    leader = TensorParallel(rank=0, world_size=3)
    other = TensorParallel(rank=2, world_size=3)
    leader.open()
    other.invite(leader.address)
    failures: list[str] = []

    def connect(ranks: TensorParallel) -> None:
        try:
            ranks.connect(torch.device("cpu"))
        except NotReady as error:
            failures.append(error.message)

    threads = [threading.Thread(target=connect, args=(ranks,), daemon=True) for ranks in (leader, other)]
    for thread in threads:
        thread.start()
    for ranks, thread in zip((other, leader), reversed(threads), strict=True):  # the meeting place goes last
        ranks.abandon()
        thread.join(timeout=240)
    assert len(failures) == 2
    assert any("rank 1" in failure for failure in failures)


def test_a_rank_without_a_meeting_place_says_what_is_missing() -> None:
    with pytest.raises(PagodaError, match="call InitDevice first"):
        TensorParallel(rank=1, world_size=2).connect(torch.device("cpu"))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="not an address of this machine"):
        TensorParallel(rank=0, world_size=2, host="192.0.2.1").open()


def test_a_world_size_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    make_checkpoint("LlamaForCausalLM", tmp_path)
    ranks = Ranks(3)
    ranks.init_device(EngineConfig(model=ModelConfig(model=str(tmp_path), device="cpu")))
    with pytest.raises(ConfigError, match="world_size is 3, must divide num_heads, 4"):
        ranks.load_model(lambda loaded, total: None)
