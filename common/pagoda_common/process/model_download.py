"""``pagoda-download SOURCE TARGET``: fetch a checkpoint into a directory, before the services start.

From the hub, or from any store that fsspec knows (s3://, gs://, file://). Several may run at once, also on machines
that share the directory: one downloads, the others wait. Knows no flags of the services.
"""

import argparse
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

MARKER = ".pagoda-complete"
"""File in a directory that is all there; it names the source."""
IGNORED = ("pytorch_model*.bin", "consolidated*.pth", "*.h5", "*.msgpack", "*.onnx", "onnx/*", "original/*")
"""Paths of weights in forms that Pagoda does not read."""
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
"""Files that a frontend does not need."""
NUM_THREADS = 8
POLL_S = 2.0


class DownloadError(Exception):
    """One line about a failed download."""


def download(source: str, target: Path, *, revision: str | None = None, with_weights: bool = True) -> bool:
    """Have all files of `source` in `target`; whether any had to be fetched.

    Files of an earlier, broken download are kept where they are whole. The marker is written last.

    Raises:
        DownloadError: there is no such source, or it has no files.
    """
    name, ignored = _name(source, revision, with_weights), IGNORED if with_weights else (*IGNORED, *WEIGHTS)
    if _has_all(target, name):
        return False
    target.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if _has_all(target, name):
            return False
        (target / MARKER).unlink(missing_ok=True)
        if "://" in source:
            _fetch_store(source, target, ignored)
        else:
            _fetch_hub(source, target, revision, ignored)
        partial = target / f"{MARKER}.part"
        partial.write_text(name)
        partial.replace(target / MARKER)
    return True


def is_complete(source: str, target: Path, *, revision: str | None = None) -> bool:
    """Whether `target` holds all of `source`."""
    return _has_all(target, _name(source, revision, with_weights=True))


def _has_all(target: Path, name: str) -> bool:
    try:
        return (target / MARKER).read_text() == name
    except OSError:
        return False


def _name(source: str, revision: str | None, with_weights: bool) -> str:
    return f"{source}@{revision or 'main'}{'' if with_weights else ' without weights'}\n"


def _fetch_hub(source: str, target: Path, revision: str | None, ignored: Sequence[str]) -> None:
    from huggingface_hub import snapshot_download  # half a second, and other sources need none of it

    try:
        snapshot_download(source, revision=revision, local_dir=target, ignore_patterns=list(ignored))
    except Exception as error:
        raise DownloadError(f"the hub does not give {source!r}: {_line(error)}") from error


def _fetch_store(source: str, target: Path, ignored: Sequence[str]) -> None:
    import fsspec  # as above

    try:
        store, root = fsspec.core.url_to_fs(source)
        found = {path: entry["size"] for path, entry in store.find(root, detail=True).items()}
    except Exception as error:
        raise DownloadError(f"cannot list {source!r}: {_line(error)}") from error
    if not found:
        raise DownloadError(f"{source!r} has no files")
    wanted = [(path, _below(path, root), size) for path, size in found.items()]
    wanted = [each for each in wanted if not any(fnmatchcase(each[1], pattern) for pattern in ignored)]

    def fetch(path: str, name: str, size: int) -> None:
        place = target / name
        if place.is_file() and place.stat().st_size == size:
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f"{place.name}.part")
        store.get_file(path, str(partial))
        partial.replace(place)
        print(f"{name}: {size / 2**20:.0f} MiB", file=sys.stderr, flush=True)

    try:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            list(threads.map(lambda each: fetch(*each), wanted))
    except Exception as error:
        raise DownloadError(f"cannot read {source!r}: {_line(error)}") from error


def _below(path: str, root: str) -> str:
    """The path below `root`: of a store whose names may be anything."""
    name = path.removeprefix(root).lstrip("/") or PurePosixPath(path).name
    if ".." in PurePosixPath(name).parts:
        raise DownloadError(f"{path!r} leads out of the directory")
    return name


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # POSIX's: NFS has them too
        yield


def main() -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(prog="pagoda-download", description="Fetch a checkpoint into a directory.")
    parser.add_argument("source", help="hub id, or URL of a directory that fsspec can read, such as s3://bucket/model")
    parser.add_argument("target", type=Path, help="directory to put it into")
    parser.add_argument("--revision", help="of the hub (default: main)")
    parser.add_argument(
        "--without-weights", action="store_true", help="what a frontend needs: configuration, tokenizer"
    )
    parser.add_argument("--wait", action="store_true", help="fetch nothing: return when another one has")
    args = parser.parse_args()
    if args.wait:
        while not is_complete(args.source, args.target, revision=args.revision):
            time.sleep(POLL_S)
        return 0
    started = time.monotonic()
    try:
        is_new = download(args.source, args.target, revision=args.revision, with_weights=not args.without_weights)
    except (DownloadError, OSError) as error:
        print(f"pagoda-download: error: {error}", file=sys.stderr)
        return 1
    took = f"fetched in {time.monotonic() - started:.0f} s" if is_new else "is there already"
    print(f"{args.source} {took}: {os.fspath(args.target)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
