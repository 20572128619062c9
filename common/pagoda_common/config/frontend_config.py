"""The frontend's configuration: addresses, served models, limits, client keys. The engine's is in engine_config.py."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from pagoda_common.config.checkpoint.generation_config import parse_object
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.config.frontend_models import parse_models
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import SecurityConfig, ServerSecurity
from pagoda_common.config.structured_outputs_config import structured_outputs_defaults
from pagoda_common.errors import ConfigError

DEFAULT_SCHEDULER_ADDRESS = "127.0.0.1:50052"
"""Default address of the scheduler for frontends and workers."""
API_KEY_VARIABLE = "PAGODA_API_KEY"
"""Environment variable of the keys that clients must show, for a frontend that is given none as flags."""
OPERATOR_KEY_VARIABLE = "PAGODA_OPERATOR_KEY"
"""Environment variable of the operator's keys."""
OF_ONE_MODEL = frozenset({"scheduler", "model", "revision", "tokenizer", "served_model_name"})
"""Fields that say which model a frontend serves."""
PLAINTEXT_ADVICE = (
    "give --ssl-certfile and --ssl-keyfile, or --grpc-host=127.0.0.1, or --insecure where the network itself is trusted"
)


def _check(condition: bool, name: str, value: object, bound: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}, must be {bound}", field=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontendConfig:
    """Everything that decides how a frontend runs."""

    scheduler: str = DEFAULT_SCHEDULER_ADDRESS
    """host:port of the scheduler."""
    models: tuple[str, ...] = ()
    """Several models instead of one: NAME=HOST:PORT of its scheduler, or a JSON object with name, scheduler, aliases,
    and flags of its own, such as tool_call_parser. A request names the one it is for."""
    host: str = "127.0.0.1"
    """Interface to listen on, for HTTP and gRPC; 0.0.0.0 is all of them."""
    port: int = 8000
    """HTTP port; 0 takes a free one."""
    grpc_port: int = 50051
    """Port of the public gRPC service; 0 takes a free one."""
    grpc_host: str | None = None
    """Interface of the public gRPC service; None takes host."""
    model: str = EMBEDDED_MODEL
    """Directory or hub id of the checkpoint, whose tokenizer and chat template are taken."""
    revision: str | None = None
    """Hub revision."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; None takes the model's."""
    served_model_name: tuple[str, ...] = ()
    """Names clients use; empty takes the model's."""
    chat_template: str | None = None
    """Jinja file, or the template itself; None takes the tokenizer's."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own (it runs in a sandbox, in a process with bounds)."""
    enable_auto_tool_choice: bool = False
    """Let the model decide whether to call tools; needs tool_call_parser. The embedded model always may."""
    tool_call_parser: str | None = None
    """How the model writes tool calls; None is hermes for the embedded model and unknown for others."""
    tool_parser_plugin: str | None = None
    """Python file that registers further tool call parsers; it runs in the frontend."""
    reasoning_parser: str | None = None
    """How the model marks its reasoning; None takes all text as the answer."""
    reasoning_parser_plugin: str | None = None
    """Python file that registers further reasoning parsers; it runs in the frontend."""
    max_logprobs: int = 20
    """Bound on logprobs per token; -1 allows the vocabulary."""
    generation_config: str = "auto"
    """Where defaults of sampling come from: auto is the checkpoint, vllm is nowhere, else a directory."""
    override_generation_config: str = ""
    """JSON object that goes before generation_config; empty overrides nothing."""
    structured_outputs_config: str = ""
    """JSON object of options that hold for all structured outputs; empty has none."""
    enable_long_inputs: bool = False
    """Embed texts that are longer than the model takes in pieces: the mean of their vectors, by their tokens."""
    enable_prompt_tokens_details: bool = False
    """Put cached_tokens into usage."""
    enable_force_include_usage: bool = False
    """Put the usage so far into every chunk of a stream, whatever its stream_options."""
    enable_request_id_headers: bool = False
    """Send X-Request-Id with the answers to probes too; with those of calls it is always sent."""
    return_tokens_as_token_ids: bool = False
    """Write tokens of log probabilities as token_id:N, also where the request does not ask for it."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys that clients must show as bearer token; empty asks for none."""
    api_key_file: str | None = None
    """File with more of them, one a line."""
    operator_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys for calls that affect all clients (sleep, other weights). With API keys and without these, no one may."""
    operator_key_file: str | None = None
    """File with more of them, one a line."""
    prefix_cache_isolation: Literal["auto", "tenant", "none"] = "auto"
    """Whether a request finds cached prefixes of its own tenant alone (tenant); auto does where there are several API
    keys. Otherwise response times and usage tell what others have asked."""
    allowed_weights: tuple[str, ...] = ()
    """Directories, with all below them, and hub ids that /reload_weights takes besides the model's own; `*` is any."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides localhost under which a frontend on loopback without keys may be called; `*` is any."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Addresses and networks of proxies whose X-Forwarded-For tells from where a call comes; `*` is any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins that browsers may call from (CORS); empty allows none."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods that they may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that they may send."""
    allow_credentials: bool = False
    """Whether they may send cookies and authorization."""
    root_path: str = ""
    """Path prefix under which a proxy serves the frontend."""
    drain_timeout_s: float = 30.0
    """Seconds that open streams get to finish after SIGTERM."""
    recovery_timeout_s: float = 30.0
    """Seconds that a request which arrives while a lost scheduler or worker comes back waits before it is refused.

    A frontend whose scheduler is lost stays ready as long: all frontends lose it at once, and where none is ready,
    clients get errors and a disruption budget is void."""
    max_request_body_bytes: int = 16 * 1024**2
    """Largest HTTP request body in bytes."""
    max_request_values: int = 512 * 1024
    """Most values in the JSON of a request body: numbers, texts, lists and objects."""
    max_unadmitted_bytes: int = 512 * 1024**2
    """Memory of all requests that are being read or prepared and that the engine has not got yet, in bytes; half of it
    for one caller. More are refused (503). Four of the largest bodies are always held."""
    sse_keep_alive_interval_s: float = 15.0
    """Seconds without a token until a stream gets a comment line that keeps proxies awake; 0 sends none."""
    keep_alive_timeout_s: int = 75
    """Seconds for which a connection stays open after an answer. More than clients and proxies keep theirs (httpx and
    openai 5, aiohttp 15, nginx and AWS 60): else one sends a request while it is being closed, and gets a reset."""
    enable_log_requests: bool = False
    """Log each request: its parameters; at level debug its prompt as well."""
    max_log_len: int | None = None
    """Most characters of a prompt in the log; None is all."""
    send_timeout_s: float = 300.0
    """Seconds in which a client must take what waits for it (48 KiB, as soon as 64 KiB wait), or it is cut off and its
    request aborted; 0 waits forever."""
    disable_uvicorn_access_log: bool = False
    """Log no line per HTTP request."""
    uvicorn_log_level: Literal["debug", "info", "warning", "error", "critical", "trace"] = "info"
    """Least level of what the HTTP server itself logs."""
    enable_tokenizer_info_endpoint: bool = False
    """Serve /tokenizer_info: the tokenizer's configuration, chat template included."""
    enable_sleep_mode: bool = False
    """Serve /sleep, /wake_up, /is_sleeping and /reload_weights."""
    enable_runtime_lora_updating: bool = False
    """Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, for what --allowed-weights names."""
    disable_fastapi_docs: bool = False
    """Serve neither /docs nor /redoc nor /openapi.json."""
    disable_status_page: bool = False
    """Serve no status page at /."""
    h11_max_incomplete_event_size: int = 4 * 1024**2
    """Request line and headers of an HTTP request together, in bytes (the name is vLLM's)."""
    h11_max_header_count: int = 256
    """Headers of an HTTP request."""
    ssl_keyfile: str | None = None
    """PEM file of the private key; None looks for it in ssl_certfile."""
    ssl_certfile: str | None = None
    """PEM file of the certificate chain; with it, HTTP and public gRPC are served over TLS."""
    ssl_ca_certs: str | None = None
    """PEM file of the authorities that must have signed certificates of clients; None asks clients for none."""
    max_stored_responses: int = 1024
    """Answers of /v1/responses that are kept for later calls; the oldest go first. 0 keeps none."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    """Security of the connection to the scheduler."""
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    """Logs and traces."""

    @property
    def public_grpc(self) -> ServerSecurity:
        """Security of the public gRPC port: the certificate of HTTPS, or else the service's. Clients use API keys."""
        is_own = self.ssl_certfile is not None
        return ServerSecurity(
            cert_file=self.ssl_certfile if is_own else self.security.tls_cert,
            key_file=(self.ssl_keyfile or self.ssl_certfile) if is_own else self.security.tls_key,
            client_ca_file=self.ssl_ca_certs,
            insecure=self.security.insecure,
            advice=PLAINTEXT_ADVICE,
        )

    @property
    def of_models(self) -> tuple["FrontendConfig", ...]:
        """The config of each model; this one if there is one model."""
        if not self.models:
            return (self,)
        return tuple(self._of_model(**own) for own in parse_models(self.models))

    def _of_model(self, **own: Any) -> "FrontendConfig":
        try:
            return replace(self, models=(), **own)
        except ConfigError as error:
            raise ConfigError(f"models: {own['served_model_name'][0]}: {error.message}", field="models") from None

    def _check_models(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in OF_ONE_MODEL:
                _check(value == one.default, one.name, value, "left out: each of models has its own")
        list(self.of_models)  # each is checked as it is made

    def __post_init__(self) -> None:
        _check(bool(self.model), "model", self.model, "a directory or hub id")
        auto = self.enable_auto_tool_choice
        has_parser = self.tool_call_parser is not None or bool(self.models)
        _check(not auto or has_parser, "enable_auto_tool_choice", auto, "with tool_call_parser")
        host, _, port = self.scheduler.rpartition(":")
        _check(bool(host) and port.isdecimal(), "scheduler", self.scheduler, "host:port")
        self.security.check_dial(self.scheduler, name="scheduler")
        _check(0 <= self.port <= 65535, "port", self.port, "between 0 and 65535")
        _check(0 <= self.grpc_port <= 65535, "grpc_port", self.grpc_port, "between 0 and 65535")
        same = self.port == self.grpc_port != 0
        _check(not same, "grpc_port", self.grpc_port, "another one than port")
        _check(self.max_logprobs >= -1, "max_logprobs", self.max_logprobs, "at least -1")
        parse_object(self.override_generation_config, field="override_generation_config")
        structured_outputs_defaults(self.structured_outputs_config)
        _check(self.drain_timeout_s >= 0, "drain_timeout", self.drain_timeout_s, "at least 0 seconds")
        _check(self.recovery_timeout_s >= 0, "recovery_timeout", self.recovery_timeout_s, "at least 0 seconds")
        body = self.max_request_body_bytes
        _check(body >= 1, "max_request_body_bytes", body, "at least 1 byte")
        values, held = self.max_request_values, self.max_unadmitted_bytes
        _check(values >= 1, "max_request_values", values, "at least 1")
        _check(held >= 1, "max_unadmitted_bytes", held, "at least 1 byte")
        _check(self.send_timeout_s >= 0, "send_timeout", self.send_timeout_s, "at least 0 seconds")
        _check(self.keep_alive_timeout_s >= 1, "keep_alive_timeout", self.keep_alive_timeout_s, "at least 1 second")
        interval = self.sse_keep_alive_interval_s
        _check(interval >= 0, "sse_keep_alive_interval", interval, "at least 0 seconds")
        head, count = self.h11_max_incomplete_event_size, self.h11_max_header_count
        _check(head >= 1024, "h11_max_incomplete_event_size", head, "at least 1024 bytes")
        _check(count >= 1, "h11_max_header_count", count, "at least 1")
        has_certificate = self.ssl_certfile is not None
        _check(has_certificate or self.ssl_keyfile is None, "ssl_keyfile", self.ssl_keyfile, "given with ssl_certfile")
        authorities, has_any = self.ssl_ca_certs, has_certificate or self.security.tls_cert is not None
        _check(has_any or authorities is None, "ssl_ca_certs", authorities, "given with ssl_certfile or tls_cert")
        _check(self.max_log_len is None or self.max_log_len >= 0, "max_log_len", self.max_log_len, "at least 0")
        _check(self.max_stored_responses >= 0, "max_stored_responses", self.max_stored_responses, "at least 0")
        if self.models:
            self._check_models()
