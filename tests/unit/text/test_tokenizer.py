"""The tokenizer is read from a checkpoint's files alone, and renders its chat template in the sandbox."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.errors import InvalidRequest, ModelLoadError
from pagoda_common.text.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <|im_end|>"}]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.load(EMBEDDED_MODEL)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the embedded tokenizer to change."""
    source = Path(resolve_model(EMBEDDED_MODEL))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / name)
    return tmp_path


def configure(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_text_goes_to_ids_and_back(tiny: Tokenizer) -> None:
    ids = tiny.encode("Hello 👋 world")
    assert tiny.decode(ids) == "Hello 👋 world"
    assert tiny.encode_batch(["Hello 👋 world", "x"])[0] == ids
    assert tiny.vocab_size == 3072
    assert (tiny.bos_token, tiny.bos_token_id, tiny.eos_token_id) == ("<|endoftext|>", 0, 0)


def test_long_texts_are_read_as_short_ones(tiny: Tokenizer) -> None:
    """They are given to the library as batches of one."""
    short = tiny.encode("Hello world, " * 20, add_special_tokens=False)
    long = tiny.encode("Hello world, " * 100, add_special_tokens=False)
    assert long[:80] == short[:80]
    assert tiny.decode(long) == tiny.decode(long[:100]) + tiny.decode(long[100:])


def test_tokens_have_bytes_and_a_text(tiny: Tokenizer) -> None:
    ids = tiny.encode("👋")
    assert b"".join(tiny.token_bytes(token_id) or b"" for token_id in ids) == "👋".encode()
    assert tiny.token_text(ids[-1]) == "\N{REPLACEMENT CHARACTER}"
    assert tiny.token_text(1) == "<|im_start|>"
    assert tiny.token_bytes(99_999) is None


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from pagoda_common.text.tokenizer import Tokenizer; import pagoda_common.engine.generation;"
        f"Tokenizer.load({EMBEDDED_MODEL!r}).encode('x'); print({{'torch', 'transformers'}} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_the_detokenizer_knows_no_grpc() -> None:
    code = "import sys; import pagoda_common.text.detokenizer; print({'grpc', 'pagoda.v1'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_a_conversation_becomes_the_prompt_that_transformers_makes(tiny: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(resolve_model(EMBEDDED_MODEL))
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tiny.apply_chat_template(MESSAGES) == expected
    assert tiny.encode(expected, add_special_tokens=False) == theirs.encode(expected, add_special_tokens=False)
    texts = ["Hello 👋", " two  spaces", "漢字\tx"]
    assert [tiny.encode(text) for text in texts] == [theirs.encode(text) for text in texts]


def test_template_variables_and_tools_reach_the_template(tiny: Tokenizer) -> None:
    template = "{{ bos_token }}{{ mood }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages | length }}"
    text = tiny.apply_chat_template(MESSAGES, chat_template=template, tools=[{"name": "é"}], mood="gay")
    assert text == '<|endoftext|>gay{"name": "é"}2'


def test_what_transformers_gives_to_templates_is_there(tiny: Tokenizer) -> None:
    template = (
        "{% generation %}{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}{{ dict(a=1).a }}{% endgeneration %}"
        "{{ strftime_now('%Y') | length }}"
    )
    assert tiny.apply_chat_template(MESSAGES, chat_template=template) == "314"


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ("{{ raise_exception('only user roles') }}", "messages"),
        ("{{ messages[5]['role'] }}", "messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "messages"),
        ("{{ namespace(__class__=1) }}", "messages"),
        ("{% set x = messages.append(1) %}", "messages"),
        ("{% if %}", "chat_template"),
    ],
)
def test_a_bad_template_is_the_requests_fault(tiny: Tokenizer, template: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny.apply_chat_template(MESSAGES, chat_template=template)
    assert caught.value.field == field


def test_without_a_template_a_conversation_is_refused(directory: Path) -> None:
    configure(directory, chat_template=None)
    tokenizer = Tokenizer.load(str(directory))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="has no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_templates_are_found_where_checkpoints_keep_them(directory: Path) -> None:
    templates = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "tools"}]
    configure(directory, chat_template=templates)
    tokenizer = Tokenizer.load(str(directory))
    assert tokenizer.apply_chat_template(MESSAGES) == "config"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "tools"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="tool_use") == "tools"
    (directory / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(str(directory)).apply_chat_template(MESSAGES) == "file"


def test_special_tokens_may_be_objects(directory: Path) -> None:
    configure(directory, eos_token={"content": "<|im_end|>", "special": True})
    assert Tokenizer.load(str(directory)).eos_token_id == 2


def test_the_older_files_of_gpt2_and_opt_are_read(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"</s>": 0, "h": 1, "i": 2, "hi": 3, "Ġ": 4, "Ġhi": 5}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\nĠ hi\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.encode("hi hi") == [0, 3, 5]
    assert tokenizer.encode("hi", add_special_tokens=False) == [3]
    assert tokenizer.decode([0, 3, 5]) == "hi hi"


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    with pytest.raises(ModelLoadError, match="not a directory"):
        Tokenizer.load(str(tmp_path / "missing"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        Tokenizer.load(str(tmp_path))
