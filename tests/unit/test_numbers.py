"""Bounds, time limits and sizes that modules of frontend, client and common give a name.

What users and peers may do, and how long someone waits for them, hangs on each: a change here is meant, and goes with
the page that tells it.
"""

from importlib import import_module

import pytest

NUMBERS: dict[str, dict[str, float]] = {
    "pagoda_common.config.engine_config": {
        "FIT_MEMORY": -1,
    },
    "pagoda_common.config.flags.settings": {
        "MISSPELLED": 0.85,
    },
    "pagoda_common.config.speculative_config": {
        "MAX_DRAFT_TOKENS": 64,
        "MAX_NGRAM": 32,
    },
    "pagoda_common.config.checkpoint.translated_files": {
        "VERSION": 1,
    },
    "pagoda_common.engine.client": {
        "MIN_BACKOFF_S": 0.05,
        "MAX_BACKOFF_S": 0.3,
        "STABLE_S": 1.0,
        "METRICS_TIMEOUT_S": 2.0,
        "ADOPT_TIMEOUT_S": 10.0,
        "MAX_OUTGOING": 64 * 1024,
    },
    "pagoda_common.engine.control": {
        "STATE_TIMEOUT_S": 10.0,
        "LORA_TIMEOUT_S": 600.0,
        "MOVE_TIMEOUT_S": 3600.0,
    },
    "pagoda_common.engine.session": {
        "HELLO_TIMEOUT_S": 10.0,
        "ACK_EVERY": 16,
        "ACK_BYTES": 1024**2,
        "ACK_DELAY_S": 1.0,
        "MAX_BATCH_BYTES": 256 * 1024,
    },
    "pagoda_common.engine.stream": {
        "MAX_RESUBMITS_WITHOUT_PROGRESS": 8,
        "PATIENCE_S": 30.0,
    },
    "pagoda_common.gguf.directory": {
        "MAX_ROPE_FACTORS": 4 * 1024,
    },
    "pagoda_common.gguf.file": {
        "MAX_HEADER_BYTES": 256 * 1024**2,
        "MAX_TENSORS": 1024**2,
        "MAX_KEYS": 64 * 1024,
        "MAX_KEY_BYTES": 65535,
        "MAX_DIMS": 4,
        "MAX_NESTED": 2,
    },
    "pagoda_common.grammar.bounded_grammar": {
        "SMALL_BYTES": 16 * 1024,
        "START_S": 60.0,
        "COMPILE_S": 5.0,
    },
    "pagoda_common.grammar.grammar_process": {
        "MAX_MEMORY_BYTES": 1024**3,
        "MAX_CPU_S": 1.0,
        "STACK_BYTES": 4 * 1024**2,
        "NUM_TRIED_TOKENS": 4,
    },
    "pagoda_common.grammar.json_schema": {
        "MAX_BRANCHES": 64,
        "MAX_HOPS": 16,
        "MAX_SET_VALUES": 7,
        "MAX_LISTS": 128,
        "DECIMAL": 1e-10,
        "LEAST_BOUND": 0.001,
    },
    "pagoda_common.grammar.matcher": {
        "MAX_TOKEN_BYTES": 64,
    },
    "pagoda_common.grammar.schema_endless": {
        "MAX_PARTS": 20000,
    },
    "pagoda_common.grammar.schema_integers": {
        "MAX_INTEGER": 2**63 - 1,
        "MAX_BOUND": 9007199254740991 * 1024,
    },
    "pagoda_common.grammar.schema_logic": {
        "MAX_PLACEMENTS": 64,
        "MAX_COUNT": 64,
    },
    "pagoda_common.grammar.schema_names": {
        "MAX_WORD_CHARACTERS": 4000,
    },
    "pagoda_common.grammar.schema_opposites": {
        "MAX_PARTS": 20000,
        "MAX_NESTED": 24,
        "MAX_WINDOW": 8,
    },
    "pagoda_common.grammar.structural_tag": {
        "MAX_FORMATS": 4 * 1024,
    },
    "pagoda_common.metrics.tracing": {
        "CLOSE_S": 3.0,
    },
    "pagoda_common.params.beam_search": {
        "MAX_LENGTH_PENALTY": 10.0,
    },
    "pagoda_common.params.fields": {
        "MAX_INT32": 2**31 - 1,
    },
    "pagoda_common.params.logprobs_bound": {
        "ALL": -1,
    },
    "pagoda_common.params.lora_adapter": {
        "MAX_NAME_CHARS": 512,
        "MAX_PATH_CHARS": 4 * 1024,
    },
    "pagoda_common.params.pooling_params": {
        "MAX_DIMENSIONS": 1024**2,
    },
    "pagoda_common.params.sampling_params": {
        "MAX_N": 16 * 1024,
        "MAX_STOP_STRINGS": 128,
        "MAX_LOGPROB_TOKEN_IDS": 128,
        "MAX_STOP_TOKEN_IDS": 1024,
        "MAX_ALLOWED_TOKEN_IDS": 16 * 1024,
        "MAX_BAD_WORDS": 128,
        "MAX_BAD_WORD_TOKENS": 256,
        "MAX_JSON_DEPTH": 64,
        "MAX_EXTRA_ARGS_BYTES": 32 * 1024,
        "MAX_EXTRA_ARGS_VALUES": 4 * 1024,
        "MAX_LOGIT_BIASES": 1024,
        "MAX_STOP_BYTES": 4 * 1024,
        "MAX_BAD_WORD_BYTES": 4 * 1024,
        "MIN_TEMPERATURE": 0.01,
        "GREEDY_TEMPERATURE": 1e-05,
    },
    "pagoda_common.params.structured_outputs": {
        "MAX_CONSTRAINT_BYTES": 256 * 1024,
        "MAX_JSON_DEPTH": 64,
        "MAX_CHOICES": 10000,
        "MAX_START_TOKENS": 64,
    },
    "pagoda_common.process.children": {
        "PARENT_POLL_S": 0.5,
        "LOWEST_PORT": 16 * 1024,
        "PORT_DRAWS": 32,
        "MAX_RESERVED_PORTS": 128,
    },
    "pagoda_common.process.heartbeat": {
        "PERIOD_S": 0.5,
        "MAX_TICK_S": 1.0,
    },
    "pagoda_common.process.idle_memory": {
        "PERIOD_S": 0.5,
        "YOUNG_OBJECTS": 20000,
        "MIN_EVENTS": 1000,
        "FORGET_AFTER": 20,
    },
    "pagoda_common.process.logging": {
        "MAX_MESSAGE_CHARS": 8 * 1024,
        "MAX_TRACEBACK_CHARS": 64 * 1024,
    },
    "pagoda_common.rpc.arrival": {
        "LATE_S": 0.25,
        "LIMIT_S": 30.0,
        "MAX_LATE": 64,
        "MAX_LATE_EACH": 32,
    },
    "pagoda_common.rpc.bearer": {
        "MAX_SHOWN_KEYS": 8,
        "ID_CHARS": 16,
    },
    "pagoda_common.rpc.channels": {
        "MAX_MESSAGE_BYTES": 64 * 1024**2,
        "MAX_ANSWER_BYTES": 1024**3,
        "RETIRE_S": 10.0,
    },
    "pagoda_common.rpc.credentials": {
        "MIN_TOKEN_CHARS": 16,
    },
    "pagoda_common.rpc.health_probe": {
        "DEFAULT_TIMEOUT_S": 3.0,
    },
    "pagoda_common.rpc.local_token": {
        "TOKEN_BYTES": 32,
    },
    "pagoda_common.rpc.service": {
        "MAX_METADATA_BYTES": 32 * 1024,
        "MAX_CONCURRENT_STREAMS": 4 * 1024,
        "HANDSHAKE_TIMEOUT_MS": 10000,
        "MAX_ERROR_BYTES": 1300,
    },
    "pagoda_common.text.detokenizer": {
        "NUM_CONTEXT_TOKENS": 8,
        "MAX_HELD_TOKENS": 16,
    },
    "pagoda_common.text.pooling_prompts": {
        "UNIT_TOLERANCE": 0.001,
    },
    "pagoda_common.text.template_process": {
        "MAX_CPU_S": 2.0,
        "MAX_TEXT_CHARS": 16 * 1024**2,
        "MAX_MEMORY_BYTES": 512 * 1024**2,
    },
    "pagoda_common.text.tokenizer": {
        "LONG_TEXT_CHARS": 512,
        "LONG_NUM_IDS": 256,
    },
    "pagoda_frontend.budget.fields": {
        "MAX_PARTS": 8 * 1024,
        "MAX_VALUE_BYTES": 64 * 1024,
    },
    "pagoda_frontend.budget.held_memory": {
        "MAX_SHARE": 0.5,
        "VALUE_BYTES": 40,
    },
    "pagoda_frontend.budget.helpers": {
        "START_S": 120.0,
        "NUM_PROCESSES": 2,
        "MAX_WAITING": 256,
    },
    "pagoda_frontend.budget.json_scan": {
        "MAX_VALUES": 512 * 1024,
        "MAX_TEXTS": 64 * 1024,
        "SLICE_BYTES": 64 * 1024,
    },
    "pagoda_frontend.budget.work_pool": {
        "NUM_THREADS": 2,
        "MAX_WAITING": 1024,
        "MAX_SHARE": 0.5,
        "SMALL_BYTES": 16 * 1024,
        "LIGHT_BYTES": 64 * 1024,
    },
    "pagoda_frontend.conversation.thinking_budget": {
        "UNLIMITED": -1,
    },
    "pagoda_frontend.grpc.bounds": {
        "MAX_MESSAGE_BYTES": 4 * 1024**2,
    },
    "pagoda_frontend.grpc.servicer": {
        "MESSAGE_FACTOR": 4,
        "TOKEN_BYTES": 16,
    },
    "pagoda_frontend.http.body": {
        "DISCARD_FACTOR": 8,
        "DISCARD_S": 10.0,
        "MAX_NESTING": 200,
    },
    "pagoda_frontend.http.connection.body_watch": {
        "GRACE_S": 5.0,
        "MIN_BYTES_PER_S": 50000,
        "FRAMING_BYTES": 64 * 1024,
        "CHUNK_BYTES": 32,
        "MAX_TINY_CHUNKS": 16 * 1024,
        "CHUNK_CONTENT_BYTES": 64,
    },
    "pagoda_frontend.http.errors": {
        "MAX_MESSAGE_CHARS": 2000,
    },
    "pagoda_frontend.http.connection.http_protocol": {
        "LARGE_HEAD_BYTES": 64 * 1024,
        "MAX_PIPELINED": 64,
    },
    "pagoda_frontend.http.connection.https": {
        "POLL_S": 1.0,
    },
    "pagoda_frontend.http.connection.lingering": {
        "LINGER_S": 10.0,
        "LINGER_BYTES": 32 * 1024**2,
    },
    "pagoda_frontend.http.answers.opening": {
        "PATIENCE_S": 1.0,
        "MAX_TIMEOUT_PATIENCE_S": 10.0,
    },
    "pagoda_frontend.http.operators.operations": {
        "TOKEN_BYTES": 16,
    },
    "pagoda_frontend.http.server": {
        "BACKLOG": 2 * 1024,
        "CLOSE_S": 2.0,
        "POLL_S": 0.02,
        "EVENT_BYTES": 16 * 1024,
    },
    "pagoda_frontend.http.operators.sleep_mode": {
        "NEWS_TIMEOUT_S": 2.0,
        "NEWS_POLL_S": 0.01,
    },
    "pagoda_frontend.observability.history": {
        "PERIOD_S": 5.0,
        "NUM_POINTS": 180,
    },
    "pagoda_frontend.observability.request_log": {
        "MAX_ENDED": 50,
        "MAX_SHOWN": 200,
        "MAX_REASON_CHARS": 200,
    },
    "pagoda_frontend.observability.statistics": {
        "PERIOD_S": 10.0,
    },
    "pagoda_frontend.openai.chat": {
        "MAX_STOP_STRINGS": 4,
        "MAX_CONVERSATIONS": 1024,
    },
    "pagoda_frontend.openai.completions": {
        "MAX_PROMPTS": 1024,
    },
    "pagoda_frontend.openai.logprobs": {
        "LEAST_LOGPROB": -9999.0,
    },
    "pagoda_frontend.requests.call_context": {
        "MAX_REQUEST_ID_CHARS": 128,
        "MAX_TENANT_CHARS": 128,
    },
    "pagoda_frontend.requests.choices": {
        "MAX_BEST_OF": 20,
    },
    "pagoda_frontend.requests.embeddings": {
        "MAX_INPUTS": 2 * 1024,
    },
    "pagoda_frontend.requests.encoding": {
        "LONG_TEXT_CHARS": 64 * 1024,
        "LEAST_TOKEN_CHARS": 128,
        "USUAL_TOKEN_CHARS": 8,
        "NUM_CUT_TOKENS": 64,
        "MAX_COUNTED_CHARS": 1024**2,
    },
    "pagoda_frontend.requests.errors": {
        "MAX_REPORTED_ERRORS": 10,
    },
    "pagoda_frontend.requests.event_ids": {
        "MAX_LENGTH": 16 * 1024,
        "MAX_SEQUENCES": 64,
    },
    "pagoda_frontend.requests.grammar_checks": {
        "COMPILE_S": 20.0,
        "MAX_KNOWN": 4 * 1024,
    },
    "pagoda_frontend.requests.params": {
        "COMPLETION_MAX_TOKENS": 16,
        "MAX_PROMPT_LOGPROBS": 1024**2,
        "MAX_OUTPUT_LOGPROBS": 4 * 1024**2,
        "MAX_CACHE_SALT_CHARS": 128,
    },
    "pagoda_frontend.requests.run": {
        "ENTRY_BYTES": 32,
        "STARTED_IN_A_TURN": 16,
        "MAX_ARRIVED": 64,
    },
    "pagoda_frontend.serving.serving": {
        "RETRY_AFTER_S": 1.0,
        "LOAD_RETRY_S": 5.0,
    },
    "pagoda_frontend.requests.template_helpers": {
        "RENDER_S": 10.0,
    },
    "pagoda_frontend.responses.handlers": {
        "MAX_METADATA": 16,
        "MAX_METADATA_KEY_CHARS": 64,
        "MAX_METADATA_VALUE_CHARS": 512,
    },
    "pagoda_frontend.responses.items": {
        "MAX_PAGE": 100,
        "DEFAULT_PAGE": 20,
    },
    "pagoda_frontend.responses.store": {
        "MAX_STORED_BYTES": 32 * 1024**2,
    },
    "pagoda_frontend.tool_parsers.framed": {
        "MAX_HEADER_CHARS": 1024,
    },
    "pagoda_frontend.tool_parsers.gemma": {
        "MAX_DEPTH": 200,
    },
    "pagoda_frontend.tool_parsers.harmony": {
        "MAX_HEADER_CHARS": 1024,
    },
    "pagoda_frontend.tool_parsers.json_text": {
        "MAX_HELD_CHARS": 256,
    },
    "pagoda_frontend.tool_parsers.mistral": {
        "ID_CHARS": 9,
    },
    "pagoda_frontend.tool_parsers.python_text": {
        "MAX_DEPTH": 200,
    },
    "pagoda_frontend.tool_parsers.pythonic": {
        "MAX_CALL_CHARS": 256 * 1024,
    },
    "pagoda_frontend.tool_parsers.values": {
        "MAX_DEPTH": 200,
        "MAX_WHOLE_DIGITS": 400,
    },
    "pagoda_frontend.tool_parsers.xml": {
        "MAX_NAME_CHARS": 1024,
        "LOOKAHEAD_CHARS": 64,
    },
    "pagoda.bench.datasets": {
        "NUM_ROUNDS": 16,
        "TOKENIZER_MARGIN": 8,
        "SHAREGPT_MIN_TOKENS": 4,
        "SHAREGPT_MAX_PROMPT_TOKENS": 1024,
        "SHAREGPT_MAX_TOKENS": 2 * 1024,
    },
    "pagoda.bench.figures": {
        "WIDTH": 50,
    },
    "pagoda.cli": {
        "EXIT_INTERRUPTED": 130,
        "EXIT_BROKEN_PIPE": 141,
    },
    "pagoda.commands.arguments": {
        "MAX_USAGE_FLAGS": 8,
    },
    "pagoda.commands.bench_serve": {
        "READY_POLL_S": 0.5,
    },
    "pagoda.commands.demo": {
        "LOG_LINES_SHOWN": 40,
        "START_TIMEOUT_S": 600.0,
    },
    "pagoda.commands.top": {
        "KEPT_SAMPLES": 120,
    },
    "pagoda.http.batch": {
        "NUM_TRIES": 6,
        "FIRST_RETRY_S": 0.5,
    },
    "pagoda.http.openai_http": {
        "TIMEOUT_S": 600.0,
    },
    "pagoda.llm.async_llm": {
        "COLLECTED_TOKENS": 64,
    },
    "pagoda.llm.async_memory_calls": {
        "CONNECT_TIMEOUT_S": 60.0,
        "RPC_TIMEOUT_S": 10.0,
        "SETTLE_TIMEOUT_S": 2.0,
    },
    "pagoda.llm.embed_calls": {
        "MAX_OPEN_REQUESTS": 2 * 1024,
    },
    "pagoda.llm.llm": {
        "MAX_OPEN_REQUESTS": 2 * 1024,
    },
    "pagoda.llm.loop_thread": {
        "CANCEL_TIMEOUT_S": 5.0,
    },
    "pagoda.server.early_checks": {
        "MAX_TOKENIZER_BYTES": 16 * 1024**2,
    },
    "pagoda.server.engine_process": {
        "STOP_TIMEOUT_S": 5.0,
        "NUM_TAIL_LINES": 30,
    },
    "pagoda.server.load_fault": {
        "POLL_S": 0.25,
        "RPC_TIMEOUT_S": 5.0,
    },
    "pagoda.server.local_server": {
        "NUM_TAIL_LINES": 30,
    },
    "pagoda.server.local_stack": {
        "READY_POLL_S": 0.1,
        "DRAIN_MARGIN_S": 5.0,
    },
    "pagoda_common.process.supervisor": {
        "EXIT_CONFIG": 2,
        "OUTPUT_GRACE_S": 1.0,
        "LINE_BYTES": 1024**2,
    },
    "pagoda.top.frame": {
        "MIN_WIDTH": 60,
        "MAX_WIDTH": 120,
        "MIN_CHART_ROWS": 5,
        "MAX_CHART_ROWS": 16,
        "LATENCY_S": 60.0,
    },
    "pagoda.top.source": {
        "TIMEOUT_S": 5.0,
    },
    "pagoda.utils.print_utils": {
        "NUM_SHOWN": 4,
    },
}


@pytest.mark.parametrize("module", NUMBERS)
def test_a_number_is_the_one_that_was_chosen(module: str) -> None:
    numbers = NUMBERS[module]
    found = import_module(module)
    assert {name: getattr(found, name) for name in numbers} == numbers
