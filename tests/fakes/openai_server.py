"""An OpenAI server on a thread of its own, with answers known beforehand, for clients that bring their own loop.

The text of an answer is "w0 w1 …", one word a token; its length is max_tokens. Prompts that begin with "status=N" are
answered with that HTTP status, and with "retry=N" the first N times with 503.
"""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

MODEL = "pagoda-tiny"


class FakeOpenAIServer:
    """Serves until it is closed."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        """Of all POST requests."""
        self.headers: list[dict[str, str]] = []
        """Of all requests."""
        self.model = MODEL
        """The name under which the model is served."""
        self.num_not_ready = 0
        """GET requests that are answered with 503."""
        self.reasoning = ""
        """Stands before the answers to conversations."""
        self.is_cut = False
        """Streams end without [DONE]."""
        self.num_tries: Counter[str] = Counter()
        """POST requests by prompt."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.headers.append(dict(self.headers))
                if fake.num_not_ready:
                    fake.num_not_ready -= 1
                    self.reply(503, {"error": {"message": "no worker has registered yet"}})
                    return
                self.reply(200, {"object": "list", "data": [{"id": fake.model, "object": "model", "root": MODEL}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.bodies.append(body)
                fake.headers.append(dict(self.headers))
                prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
                fake.num_tries[prompt] += 1
                command, _, value = prompt.partition(" ")[0].partition("=")
                if command == "status" or (command == "retry" and fake.num_tries[prompt] <= int(value)):
                    status = int(value) if command == "status" else 503
                    self.reply(status, {"error": {"message": f"told to fail with {status}", "code": status}})
                elif body.get("stream"):
                    self.stream(body, "messages" in body)
                else:
                    text = " ".join(f"w{place}" for place in range(fake.length(body)))
                    choice = {"message": {"content": text}} if "messages" in body else {"text": text}
                    self.reply(200, {"choices": [{"index": 0, **choice}]})

            def stream(self, body: dict[str, Any], is_chat: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                if is_chat:
                    self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
                    if fake.reasoning:
                        self.event({"choices": [{"delta": {"reasoning": fake.reasoning}}]})
                for place in range(fake.length(body)):
                    text = f"w{place} "
                    self.event({"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
                if fake.is_cut:
                    return
                usage = {"prompt_tokens": 11, "completion_tokens": fake.length(body)}
                self.event({"choices": [], "usage": usage})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, event: dict[str, Any]) -> None:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

            def reply(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @staticmethod
    def length(body: dict[str, Any]) -> int:
        """Tokens of the answer to `body`."""
        return int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
