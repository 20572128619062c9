"""LLM with its own engine: real tokens, kills that no one notices, clear errors, no orphans."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pagoda import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.errors import InvalidRequest, ModelLoadError

PROMPTS = [f"Story {i}: Once upon a time" for i in range(8)]
# Greedy: recomputing a prompt changes logits in the last float digits, which a drawn token may show.
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, max_tokens=30, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_gpu_blocks_override=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[list[int]]:
    return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, LONG, use_tqdm=False)]


def child(module: str) -> psutil.Process:
    return next(process for process in psutil.Process().children() if module in process.cmdline())


def test_one_beam_is_greedy_and_more_beams_give_as_many_hypotheses(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    for width in (1, 3):
        outputs = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=width, max_tokens=8))
        assert [len({tuple(one.tokens) for one in output.sequences}) for output in outputs] == [width] * 2
        if width == 1:
            expected = [output.prompt_token_ids + output.outputs[0].token_ids for output in greedy]
            assert [output.sequences[0].tokens for output in outputs] == expected


def test_a_hypothesis_has_the_log_probability_of_its_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    (greedy,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    (output,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=1, max_tokens=6))
    [only] = output.sequences
    assert only.cum_logprob == pytest.approx(greedy.outputs[0].cumulative_logprob, abs=1e-3)
    assert len(only.logprobs) == 6
    (output,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=0.0))
    scores = [sequence.cum_logprob for sequence in output.sequences]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= only.cum_logprob - 1e-3


def test_an_output_obeys_its_constraint(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["north", "south"]))
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} <= {"north", "south"}


def test_a_search_obeys_its_constraint(llm: LLM) -> None:
    choices = ["north", "south", "the north"]
    constraint = StructuredOutputsParams(choice=choices)
    params = BeamSearchParams(beam_width=4, max_tokens=20, structured_outputs=constraint)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        scores = [one.cum_logprob / len(one.logprobs) for one in output.sequences]
        assert scores == sorted(scores, reverse=True)
        assert {one.text.removeprefix(prompt) for one in output.sequences} <= set(choices)
    broken = StructuredOutputsParams(grammar="start: other")
    with pytest.raises(InvalidRequest, match="other"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=4, structured_outputs=broken))


def test_a_forgotten_prefix_is_computed_again(llm: LLM) -> None:
    prompt, params = "A prompt that is long enough to fill some blocks of the cache. " * 4, SamplingParams(max_tokens=1)
    llm.generate(prompt, params, use_tqdm=False)
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_conversation_gets_an_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    (output,) = llm.chat([{"role": "user", "content": "Who are you?"}], params, use_tqdm=False)
    assert len(output.outputs[0].text.split()) > 3
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_a_batch_gives_the_tokens_of_each_alone(llm: LLM) -> None:
    batch = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SEEDED, use_tqdm=False)]
    alone = [llm.generate(prompt, SEEDED, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert alone == batch
    assert len({tuple(ids) for ids in batch}) > 1


def test_logprobs_come_with_the_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    (output,) = llm.generate("Once upon a", params, use_tqdm=False)
    entries = output.outputs[0].logprobs
    assert entries is not None
    for token_id, entry in zip(output.outputs[0].token_ids, entries, strict=True):
        assert entry[token_id].rank == 1
        assert len(entry) == 2
        assert max(logprob.logprob for logprob in entry.values()) == entry[token_id].logprob <= 0


def test_prompt_logprobs_stand_at_their_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate("Once upon a time there was", params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert entry[token_id].logprob < 0


def test_too_many_logprobs_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="logprobs is 30, max_logprobs is 20"):
        llm.generate("a", SamplingParams(logprobs=30), use_tqdm=False)


@pytest.mark.parametrize("module", ["pagoda_worker", "pagoda_scheduler"])
def test_a_killed_process_is_only_a_pause(llm: LLM, undisturbed: list[list[int]], module: str) -> None:
    victim = child(module)
    killer = threading.Timer(0.3, victim.kill)
    killer.start()
    assert tokens(llm) == undisturbed
    killer.join()
    assert child(module).pid != victim.pid


def test_a_checkpoint_without_weights_is_an_error_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(resolve_model(EMBEDDED_MODEL), directory)
    (directory / "model.safetensors").unlink()
    before = psutil.Process().children()
    with pytest.raises(ModelLoadError, match="safetensors"):
        LLM(model=str(directory))
    assert psutil.Process().children() == before


def test_no_orphan_survives_a_killed_program() -> None:
    code = "from pagoda import LLM; import time; llm = LLM(); print('ready', flush=True); time.sleep(60)"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    children = psutil.Process(program.pid).children()
    assert len(children) == 2
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    _, alive = psutil.wait_procs(children, timeout=240)
    assert alive == []


def test_the_quickstart_program_runs_and_ends_cleanly() -> None:
    example = Path(__file__).parents[3] / "examples" / "offline_inference.py"
    result = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Output:") == 4
    assert "Traceback" not in result.stderr
    assert "WARNING" not in result.stderr


def test_embeddings_are_there_beside_generation_and_after_a_lost_worker(llm: LLM) -> None:
    once = [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]
    assert all(sum(value * value for value in embedding) == pytest.approx(1.0, abs=1e-4) for embedding in once)
    child("pagoda_worker").kill()
    again = [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]
    for one, other in zip(once, again, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
