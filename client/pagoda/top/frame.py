"""One frame: lines of text from the last samples. Pure; knows neither terminal nor network."""

from collections.abc import Sequence
from itertools import pairwise

from pagoda.top.sample import Sample, growth, quantile, rate
from pagoda.top.text import Paint, bar, chart, count, curve, percent, seconds

STAGES = ("schedule", "encode", "wire", "queue", "prepare", "forward", "sample", "decode", "deliver")
"""The stages of a step, in their order."""
SAMPLED = "pagoda:sampled_tokens_total"
"""By whichever frontend; a frontend's own counter stands in where the engine's is not shown."""
GENERATED = "vllm:generation_tokens_total"
MIN_WIDTH = 60
MAX_WIDTH = 120
MIN_CHART_ROWS, MAX_CHART_ROWS = 5, 16
"""Height of the chart in a tall terminal, including its title."""
LATENCY_S = 60.0
"""Latencies are of the last minute."""


def speeds(samples: Sequence[Sample]) -> list[float]:
    """Tokens a second between each sample and the one before."""
    pairs = list(pairwise(samples))
    return [rate(*pair, SAMPLED) or rate(*pair, GENERATED) or 0.0 for pair in pairs]


def draw(samples: Sequence[Sample], *, name: str, reason: str, width: int, paint: Paint, height: int = 0) -> list[str]:
    """The lines of a frame.

    Args:
        samples: oldest first; rates need two.
        name: of the server.
        reason: why it does not serve; empty when it does.
        width: columns; no line is longer.
        height: rows of the terminal: what the figures leave shows tokens a second as a chart.
    """
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    now = samples[-1] if samples else None
    lines = [_title(now, name, width, paint)]
    lines.append(paint.soft("─" * width))
    if reason:
        lines.append(paint.bad(reason[:width]))
    if now is None:
        return lines
    before = samples[-2] if len(samples) > 1 else now
    minute = next((sample for sample in samples if sample.at_s >= now.at_s - LATENCY_S), now)
    lines += _load(now, width, paint)
    lines += _speed(samples, before, now, width, paint)
    lines += _latency(minute, now, width, paint)
    lines += _counters(before, now, width, paint)
    lines += ["", *_groups(now, width, paint)]
    lines += ["", *_step(before, now, width, paint)]
    spare = min(height - len(lines) - 2, MAX_CHART_ROWS)
    if spare >= MIN_CHART_ROWS:
        known = speeds(samples)
        top = f"tokens a second, at most {count(max(known, default=None))}"
        lines += ["", paint.soft(top), *(paint.hot(row) for row in chart(known, width, spare - 1))]
    return lines


def _title(now: Sample | None, name: str, width: int, paint: Paint) -> str:
    models = now.labels("vllm:num_requests_running", "model_name") if now is not None else []
    head = f"pagoda top  {', '.join(models)}"[: width - 2]
    shown = name[: max(0, width - len(head) - 2)]
    return paint.bold(head) + " " * (width - len(head) - len(shown)) + paint.soft(shown)


def _load(now: Sample, width: int, paint: Paint) -> list[str]:
    usage, is_alone = now.most("vllm:kv_cache_usage_perc"), len(now.series.get("vllm:cache_config_info", ())) == 1
    blocks = now.label("vllm:cache_config_info", "num_gpu_blocks")
    size = now.label("vllm:cache_config_info", "block_size")
    tokens = f"of {int(blocks) * int(size):,} tokens" if is_alone and blocks.isdecimal() and size.isdecimal() else ""
    running, waiting = now.total("vllm:num_requests_running"), now.total("vllm:num_requests_waiting")
    left = f"{_cell('running', count(running), paint)}{_cell('waiting', count(waiting), paint)}"
    room = width - 2 * 20 - len("KV ") - 7
    if room - len(tokens) > 5:
        room -= len(tokens) + 1
        tokens = f" {tokens}"
    else:
        tokens = ""
    full = bar(usage or 0.0, room).rstrip()
    meter = paint.hot(full) + paint.soft("░" * (room - len(full)))
    return [f"{left}{paint.soft('KV ')}{meter}{paint.bold(percent(usage).rjust(7))}{paint.soft(tokens)}"]


def _speed(samples: Sequence[Sample], before: Sample, now: Sample, width: int, paint: Paint) -> list[str]:
    known = speeds(samples)
    prompts = rate(before, now, "vllm:prompt_tokens_total")
    if prompts is None:  # a scheduler knows what its steps compute
        computed = rate(before, now, "vllm:iteration_tokens_total_sum")
        prompts = None if computed is None or not known else max(0.0, computed - known[-1])
    left = _cell("tokens/s", count(known[-1] if known else None), paint) + _cell("prompt tok/s", count(prompts), paint)
    return [left + paint.hot(curve(known, width - 40))]


def _latency(before: Sample, now: Sample, width: int, paint: Paint) -> list[str]:
    if "vllm:time_to_first_token_seconds_bucket" not in now.series:
        return []  # of a scheduler, which sees no client
    parts = []
    for title, name in (("first token", "time_to_first_token"), ("between tokens", "inter_token_latency")):
        half = quantile(before, now, f"vllm:{name}_seconds", 0.5)
        most = quantile(before, now, f"vllm:{name}_seconds", 0.95)
        shown = f"{paint.soft(title)} {seconds(half)} " + paint.soft(f"p95 {seconds(most)}")
        parts.append((shown, len(f"{title} {seconds(half)} p95 {seconds(most)}")))
    return _flowing(parts, width, column=34)


def _counters(before: Sample, now: Sample, width: int, paint: Paint) -> list[str]:
    queries, hits = now.total("vllm:prefix_cache_queries_total"), now.total("vllm:prefix_cache_hits_total")
    workers, schedulers = now.total("pagoda:worker_losses_total"), now.total("pagoda:scheduler_losses_total")
    lost = f"{count(workers or 0)} worker"
    lost += f", {count(schedulers)} scheduler" if schedulers is not None else ""
    parts = (
        ("prefix hits", percent((hits or 0.0) / queries if queries else None)),
        ("preempted", count(now.total("vllm:num_preemptions_total"))),
        ("steps/s", count(rate(before, now, "pagoda:engine_steps_total"))),
        ("recoveries", lost),
    )
    return _flowing([(f"{paint.soft(title)} {value}", len(f"{title} {value}")) for title, value in parts], width)


def _groups(now: Sample, width: int, paint: Paint) -> list[str]:
    models = now.labels("pagoda:group_info", "model_name")
    room = width - 6 - 12 - 9 - 9 - 9
    # Groups of one model need no name.
    model_room = min(max(map(len, models)) + 1, room - len("device ")) if len(models) > 1 else 0
    room -= model_room
    model_head = "model".ljust(model_room) if model_room else ""
    head = f"{model_head}{'group':<6}{'state':<12}{'device':<{room}}{'running':>9}{'waiting':>9}{'KV':>9}"
    lines = [paint.soft(head)]
    for labels, _ in now.series.get("pagoda:group_info", ()):
        group, model = labels["group"], labels.get("model_name", "")
        own = {"group": group, "model_name": model} if model_room else {"group": group}
        running = count(now.total("pagoda:group_requests_running", **own))
        waiting = count(now.total("pagoda:group_requests_waiting", **own))
        usage = percent(now.total("pagoda:group_kv_cache_usage_perc", **own))
        state = labels["state"]
        shown = (paint.good if state == "serving" else paint.bad if state == "lost" else paint.soft)(state.ljust(12))
        device = labels["device"][: room - 1].ljust(room)
        name = model[: model_room - 1].ljust(model_room) if model_room else ""
        lines.append(f"{name}{group:<6}{shown}{device}{running:>9}{waiting:>9}{usage:>9}")
    if len(lines) == 1:
        lines.append("no worker has registered")
    return lines


def _step(before: Sample, now: Sample, width: int, paint: Paint) -> list[str]:
    means = {}
    for stage in STAGES:
        num_steps = growth(before, now, "pagoda:step_seconds_count", stage=stage)
        spent_s = growth(before, now, "pagoda:step_seconds_sum", stage=stage)
        means[stage] = spent_s / num_steps if num_steps and spent_s is not None else 0.0
    whole = sum(means.values())
    if not whole:
        return [paint.soft("step      none since the last frame")]
    room = width - 10 - 9 - 2
    lines = [f"{paint.soft('step'.ljust(10))}{seconds(whole):>9}"]
    start = 0.0
    for stage, mean in means.items():
        # Each bar begins where the stage before it ended: a timeline from the schedule to the tokens.
        offset = int(start / whole * room)
        mark = bar(mean / whole, room).rstrip() or ("▏" if mean else "")
        lines.append(
            f"{paint.soft(stage.ljust(10))}{seconds(mean):>9}  {' ' * offset}{paint.hot(mark[: room - offset])}"
        )
        start += mean
    return lines


def _flowing(parts: Sequence[tuple[str, int]], width: int, *, column: int = 0) -> list[str]:
    """Parts side by side, on further lines where they do not fit.

    Args:
        parts: each with the columns that it takes, which colours are not counted in.
        column: columns of a part that another one follows, at least.
    """
    lines, used, gap = [""], 0, 0
    for text, size in parts:
        if used and used + gap + size > width:
            lines.append("")
            used = gap = 0
        lines[-1] += " " * gap + text
        used += gap + size
        gap = max(2, column - size)
    return lines


def _cell(title: str, value: str, paint: Paint) -> str:
    """Twenty columns."""
    return f"{paint.soft(title)} {paint.bold(value)}" + " " * max(1, 19 - len(title) - len(value))
