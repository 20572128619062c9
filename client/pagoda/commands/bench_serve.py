"""``pagoda bench serve``: load on a running OpenAI server, with the flags, table and JSON of vLLM's benchmark."""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pagoda.bench.datasets import add_dataset_arguments, fit_random_lengths, read_dataset
from pagoda.bench.figures import DETAILS, NAMES, report, table
from pagoda.bench.load import ENDPOINTS, Load, RequestResult, send_all, send_one
from pagoda.bench.requests import SampleRequest
from pagoda.commands.arguments import CommandParser
from pagoda.http.http_client import AsyncHttpClient
from pagoda_common.config.flags.flags import config_errors
from pagoda_common.errors import ConfigError, NotReady, PagodaError
from pagoda_common.text.tokenizer import Tokenizer

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
READY_POLL_S = 0.5
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Server, dataset, load, report."""
    _add_server_arguments(parser)
    add_dataset_arguments(parser)
    _add_load_arguments(parser)
    _add_report_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=ENDPOINTS, default="openai", help="API to use (default: %(default)s)")
    group.add_argument("--base-url", metavar="URL", help="URL of the server, instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="host of the server (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port of the server (default: %(default)s)")
    group.add_argument("--endpoint", metavar="PATH", help="path of the endpoint; the backend's if not given")
    group.add_argument("--model", metavar="NAME", help="model; the server's first one if not given")
    group.add_argument("--served-model-name", metavar="NAME", help="name in requests, when --model is a directory")
    group.add_argument("--tokenizer", metavar="MODEL", help="directory or hub id; the model's if not given")
    group.add_argument("--trust-remote-code", action="store_true", help="no effect: tokenizers need no code")
    group.add_argument("--tokenizer-mode", choices=("auto", "hf"), default="auto", help="no effect")
    group.add_argument("--api-key", metavar="KEY", help="bearer token; OPENAI_API_KEY if not given")
    group.add_argument("--header", nargs="+", default=[], metavar="NAME=VALUE", help="more HTTP headers")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time to wait for the server; 0: do not wait (default: %(default)s)",
    )


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--num-prompts", type=int, default=1000, metavar="N", help="number of requests (default: %(default)s)"
    )
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="number of requests before the measurement"
    )
    group.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="requests per second; inf sends all at once",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1 is a Poisson process; smaller values are burstier (default: %(default)s)",
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="maximum number of open requests")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and send times")
    group.add_argument("--ignore-eos", action="store_true", help="generate every answer to its full length")
    for name in SAMPLING:
        shown = "0, greedy, if not given" if name == "temperature" else "the server's default if not given"
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=shown)
    group.add_argument("--extra-body", type=json.loads, metavar="JSON", help="more fields of the requests")


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help="metrics with percentiles, of ttft,tpot,itl,e2el (default: %(default)s)",
    )
    group.add_argument("--metric-percentiles", default="99", metavar="P,…", help="percentiles (default: %(default)s)")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits of a good request in ms: ttft:200"
    )
    group.add_argument("--label", help="prefix of the result's file name; the backend if not given")
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="also write the figures of each request")
    group.add_argument("--append-result", action="store_true", help="append to the file")
    group.add_argument("--result-dir", metavar="DIR", help="directory of the result; the current one if not given")
    group.add_argument(
        "--result-filename", metavar="FILE", help="name of the result; from label, rate, model and time if not given"
    )
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="more keys of the result")
    group.add_argument("--disable-tqdm", action="store_true", help="do not show progress")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0 when a request succeeded."""
    args.is_input_len_given = not isinstance(parser, CommandParser) or parser.is_given("random_input_len")
    with config_errors(parser):
        check(args)
        metrics = _names(args.percentile_metrics, "percentile_metrics", tuple(NAMES))
        percentiles = [float(text) for text in args.metric_percentiles.split(",")]
        goodput_ms = _goodput(args.goodput)
        figures = asyncio.run(measure(args, percentiles, goodput_ms))
    shown = {"max_concurrency": args.max_concurrency, "request_rate": args.request_rate}
    print(table(figures, metrics=metrics, percentiles=percentiles, **shown))
    if args.save_result or args.append_result:
        save(args, figures)
    if error := next((error for error in figures["errors"] if error), None):
        print(f"{figures['failed']} requests failed, the first one with: {error}", file=sys.stderr)
    return 0 if figures["completed"] else 1


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError when a number is out of its bounds."""
    for name, is_right, bound in (
        ("num_prompts", args.num_prompts >= 1, "at least 1"),
        ("num_warmups", args.num_warmups >= 0, "at least 0"),
        ("request_rate", args.request_rate > 0, "more than 0"),
        ("burstiness", args.burstiness > 0, "more than 0"),
        ("max_concurrency", args.max_concurrency is None or args.max_concurrency >= 1, "at least 1"),
    ):
        if not is_right:
            raise ConfigError(f"{name} is {getattr(args, name)}, must be {bound}", field=name)
    for text in args.metric_percentiles.split(","):
        try:
            is_right = 0 <= float(text) <= 100
        except ValueError:
            is_right = False
        if not is_right:
            raise ConfigError(f"metric_percentiles has {text!r}, must be in [0, 100]", field="metric_percentiles")
    for name in ("header", "metadata"):
        for text in getattr(args, name):
            if "=" not in text:
                raise ConfigError(f"{name} has {text!r}, must be NAME=VALUE", field=name)


def _names(text: str, field: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"{field} has {name!r}, must be of {', '.join(known)}", field=field)
    return names


def _goodput(texts: list[str]) -> dict[str, float]:
    bounds = {}
    for text in texts:
        name, _, value = text.partition(":")
        _names(name, "goodput", GOODPUT_METRICS)
        try:
            bounds[name] = float(value)
        except ValueError:
            raise ConfigError(f"goodput has {text!r}, must be NAME:MILLISECONDS", field="goodput") from None
    return bounds


async def measure(args: argparse.Namespace, percentiles: list[float], goodput_ms: dict[str, float]) -> dict[str, Any]:
    """Load the server and report.

    Raises:
        PagodaError: no server, or it cannot answer the first request.
    """
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    headers = dict(text.split("=", 1) for text in args.header)
    api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    async with AsyncHttpClient(base_url=base_url, api_key=api_key, headers=headers) as client:
        models = await wait_for_models(client, timeout_s=args.ready_check_timeout_sec)
        args.model = args.model or str(models[0]["id"])
        # A served name need not be that of a checkpoint; where that lies, vLLM and Pagoda tell as root.
        roots = {str(model["id"]): model.get("root") for model in models}
        args.tokenizer = args.tokenizer or roots.get(args.model) or args.model
        tokenizer = await asyncio.to_thread(Tokenizer.load, args.tokenizer)
        lengths = {str(model["id"]): model.get("max_model_len") for model in models}
        if not args.is_input_len_given and (told := fit_random_lengths(args, lengths.get(args.model))):
            print(told, file=sys.stderr)
        requests = await asyncio.to_thread(read_dataset, args, tokenizer, num_prompts=args.num_prompts)
        load = make_load(args)
        first = await send_one(client, requests[0], load)
        if not first.is_success:
            raise PagodaError(f"the first request failed: {first.error}")
        if args.num_warmups:
            await send_all(client, (requests * args.num_warmups)[: args.num_warmups], load, seed=args.seed)
        results, duration_s = await _send_with_bar(client, requests, load, args)
    return report(results, duration_s=duration_s, percentiles=percentiles, goodput_ms=goodput_ms)


async def _send_with_bar(
    client: AsyncHttpClient, requests: list[SampleRequest], load: Load, args: argparse.Namespace
) -> tuple[list[RequestResult], float]:
    with tqdm(total=len(requests), disable=args.disable_tqdm) as bar:

        def on_done(result: RequestResult) -> None:
            bar.update()

        return await send_all(client, requests, load, seed=args.seed, on_done=on_done)


def make_load(args: argparse.Namespace) -> Load:
    """The load that the flags ask for."""
    parameters: dict[str, Any] = {"temperature": 0.0}
    parameters |= {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if args.ignore_eos:
        parameters["ignore_eos"] = True
    return Load(
        backend=args.backend,
        model=args.served_model_name or args.model,
        endpoint=args.endpoint,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        parameters=parameters | (args.extra_body or {}),
    )


async def wait_for_models(client: AsyncHttpClient, *, timeout_s: float) -> list[dict[str, Any]]:
    """The server's models, once it answers.

    Raises:
        NotReady: it does not within `timeout_s`.
        PagodaError: it refuses, or serves none.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            models: list[dict[str, Any]] = (await client.get("/v1/models"))["data"]
            if not models:
                raise PagodaError(f"{client.base_url} serves no model")
            return models
        except NotReady:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(READY_POLL_S)


def save(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write what was asked for, what came out and when."""
    rate = args.request_rate if args.request_rate != float("inf") else "inf"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    label = args.label or args.backend
    result: dict[str, Any] = {
        "date": stamp,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": args.model,
        "tokenizer_id": args.tokenizer,
        "num_prompts": args.num_prompts,
        **dict(text.split("=", 1) for text in args.metadata),
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **{key: value for key, value in figures.items() if args.save_detailed or key not in DETAILS},
    }
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    name = args.result_filename or f"{label}-{rate}qps{concurrency}-{Path(args.model).name}-{stamp}.json"
    path = Path(args.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        raise PagodaError(f"cannot write the result: {error}") from None
    print(f"Written to {path}")
