"""A GGUF file is served by name: chat, its template and its end token, as transformers says; and LLM takes it too."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

from pagoda import LLM, SamplingParams
from pagoda_common.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.process.stack import Process, Stack
from tests.unit.worker.loader.gguf_checkpoints import write_gguf

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
NUM_TOKENS = 24


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Bytes, two tokens of roles, and one merge."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens + [f"filler{index}" for index in range(len(tokens), 300)])
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens] + [5] * (300 - len(tokens)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    source = make_checkpoint("LlamaForCausalLM", directory / "source", **sizes)
    return write_gguf(source, directory / "tiny-q8_0.gguf", lambda name: Type.Q8_0, write_tokenizer=add_tokenizer)


def expected(file: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers, up to the end token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) < len(prompt) + NUM_TOKENS and 257 not in ids[len(prompt) :]:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def served(file: Path) -> Iterator[str]:
    stack = Stack("--model", str(file), "--dtype", "float32", "--device", "cpu")
    try:
        stack.wait_ready()
        yield stack.url
    finally:
        stack.end()


def ask(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as response:
        return json.load(response)


def test_chat_over_a_file(served: str, file: Path) -> None:
    tokenizer = Tokenizer.load(str(file))
    prompt = tokenizer.encode("<s>user: hello there</s><s>assistant: ", add_special_tokens=False)
    body = {
        "model": str(file),
        "messages": [{"role": "user", "content": "hello there"}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
    }
    answer = ask(f"{served}/v1/chat/completions", body | {"return_token_ids": True})
    tokens = expected(file, prompt)
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == tokens
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(tokens)


def test_llm_takes_a_file(file: Path) -> None:
    with LLM(str(file), dtype="float32", device="cpu") as llm:
        (output,) = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    prompt = Tokenizer.load(str(file)).encode("hello")
    assert list(output.outputs[0].token_ids) == expected(file, prompt)


def test_a_file_that_is_cut_off_ends_the_command_with_one_sentence(file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "cut.gguf"
    bad.write_bytes(file.read_bytes()[:-1000])
    process = Process("-m", "pagoda", "serve", str(bad), "--port", "0")
    try:
        assert process.wait() == 2
        assert "cut.gguf ends within tensor " in process.log
        assert "Traceback" not in process.log
    finally:
        process.end()
