"""The files of a model in GGUF: all parts of one that is split, and the factors of its rope."""

import struct
from pathlib import Path

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf import directory
from pagoda_common.gguf.config import ROPE_FACTORS
from pagoda_common.gguf.file import GgufFile
from tests.unit.common.gguf.test_gguf_header import F32, tensor, write

F16 = 1


def parts(folder: Path, *numbers: int, count: int) -> list[Path]:
    """Parts of a model with these numbers."""
    made = [folder / f"m-{number:05}-of-{count:05}.gguf" for number in numbers]
    for path in made:
        path.write_bytes(b"")
    return made


def test_a_file_is_whole_unless_its_name_says_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert directory._shards(Path("m.gguf")) == [tmp_path / "m.gguf"]
    assert directory._shards(Path("m-1-of-2.gguf")) == [tmp_path / "m-1-of-2.gguf"]


@pytest.mark.parametrize("count", [1, 2, 11])
def test_all_parts_are_read_in_their_order(tmp_path: Path, count: int) -> None:
    made = parts(tmp_path, *range(1, count + 1), count=count)
    assert directory._shards(made[0]) == made


def test_a_model_is_named_by_its_first_part(tmp_path: Path) -> None:
    made = parts(tmp_path, 1, 2, 3, count=3)
    for later in made[1:]:
        with pytest.raises(
            ModelLoadError, match=r"is a later part of a model: m-00001-of-00003\.gguf is its"
        ) as caught:
            directory._shards(later)
        assert caught.value.field == "model"


@pytest.mark.parametrize(("there", "missing"), [((1, 3), ["m-00002-of-00012.gguf"]), ((1,), None)])
def test_parts_that_are_missing_are_named_up_to_eight(
    tmp_path: Path, there: tuple[int, ...], missing: list[str] | None
) -> None:
    first, *_ = parts(tmp_path, *there, *(range(4, 13) if missing else ()), count=12)
    with pytest.raises(ModelLoadError) as caught:
        directory._shards(first)
    named = caught.value.message.partition("are missing: ")[2].split(", ")
    assert named == (missing or [f"m-{number:05}-of-00012.gguf" for number in range(2, 10)])
    assert caught.value.field == "model"


def rope_factors(folder: Path, *values: float, shape: tuple[int, ...], kind: int = F32) -> list[float] | None:
    path = write(folder / "m.gguf", tensors=(tensor(ROPE_FACTORS, *shape, kind=kind),), data=4 * len(values) or 64)
    if values:
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) - 4 * len(values)] + struct.pack(f"<{len(values)}f", *values))
    return directory._rope_factors(GgufFile.read(path))


def test_factors_of_the_rope_are_the_tensor_s_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rope_factors(tmp_path, 1.0, 2.5, 8.0, shape=(3,)) == [1.0, 2.5, 8.0]
    assert directory._rope_factors(GgufFile.read(write(tmp_path / "none.gguf"))) is None
    monkeypatch.setattr(directory, "MAX_ROPE_FACTORS", 2)
    assert rope_factors(tmp_path, 1.0, 2.5, shape=(2,)) == [1.0, 2.5]


@pytest.mark.parametrize(
    ("shape", "kind", "told"), [((3,), F32, r"\[3\]"), ((2, 1), F32, r"\[1, 2\]"), ((2,), F16, "F16")]
)
def test_factors_that_are_none_are_named(
    tmp_path: Path, shape: tuple[int, ...], kind: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_ROPE_FACTORS", 2)
    with pytest.raises(ModelLoadError, match=f"{told}.*must be F32 of at most 2 values"):
        rope_factors(tmp_path, shape=shape, kind=kind)
