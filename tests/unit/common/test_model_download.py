"""pagoda-download: what it fetches once, what it keeps, what it refuses."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pagoda_common.process import model_download
from pagoda_common.process.model_download import MARKER, DownloadError, download, is_complete

FILES = {
    "config.json": b"{}",
    "a/model.safetensors": b"weights",
    "2_Dense/pytorch_model.bin": b"a head",
    "pytorch_model-1.bin": b"no",
}


@pytest.fixture
def bucket() -> Any:
    """A store in memory: memory://bucket."""
    store = fsspec.filesystem("memory")
    for name, content in FILES.items():
        store.pipe_file(f"/bucket/model/{name}", content)
    yield store
    store.store.clear()


def test_a_store_is_fetched_once_and_without_what_is_not_read(bucket: Any, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    assert download("memory://bucket/model", target)
    assert (target / "a/model.safetensors").read_bytes() == b"weights"
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {*FILES, MARKER} - {"pytorch_model-1.bin"}
    bucket.store.clear()
    assert not download("memory://bucket/model", target), "it is there"
    with pytest.raises(DownloadError, match="has no files"):
        download("memory://bucket/model", target, revision="other")
    assert not is_complete("memory://bucket/model", target), "what it holds is not known any more"


def test_a_frontend_leaves_weights_out(bucket: Any, tmp_path: Path) -> None:
    assert download("memory://bucket/model", tmp_path, with_weights=False)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [MARKER, "config.json"]
    assert not is_complete("memory://bucket/model", tmp_path)
    assert not download("memory://bucket/model", tmp_path, with_weights=False)


def test_whole_files_of_a_broken_download_are_kept(bucket: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"[]")  # as long as the one there
    (tmp_path / "a").mkdir()
    (tmp_path / "a/model.safetensors").write_bytes(b"weig")
    assert download("memory://bucket/model", tmp_path)
    assert (tmp_path / "config.json").read_bytes() == b"[]"
    assert (tmp_path / "a/model.safetensors").read_bytes() == b"weights"


def test_names_that_lead_out_of_the_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="leads out"):
        model_download._below("bucket/model/../../etc/passwd", "bucket/model")


def test_the_hub_gives_its_files_to_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(name: str, **options: Any) -> None:
        asked.append((name, options))
        (options["local_dir"] / "config.json").write_text(json.dumps({}))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert download("some/model", tmp_path / "model", revision="v1")
    ((name, options),) = asked
    assert (name, options["revision"], options["local_dir"]) == ("some/model", "v1", tmp_path / "model")
    assert is_complete("some/model", tmp_path / "model", revision="v1")
    assert not is_complete("some/model", tmp_path / "model")


def test_a_failure_is_one_line_and_waiting_ends_when_another_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["pagoda-download", "nowhere://model", str(tmp_path)])
    assert model_download.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pagoda-download: error: cannot list 'nowhere://model'")
    (tmp_path / MARKER).write_text("s3://b/m@main\n")
    monkeypatch.setattr("sys.argv", ["pagoda-download", "s3://b/m", str(tmp_path), "--wait"])
    assert model_download.main() == 0
