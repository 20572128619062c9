"""Read a streamed answer to its end, even if its frontend dies.

    python examples/resume_stream.py http://127.0.0.1:8000 [http://127.0.0.1:8001 ...]

Every event has an id. If the connection breaks, the program sends the request to the same path again, at the next
frontend, with the header Last-Event-ID. The stream continues with the event after that one.
"""

import json
import sys
import time
from collections.abc import Iterator
from itertools import cycle

import httpx

BODY = {
    "messages": [{"role": "user", "content": "Tell me a story about a dog."}],
    "max_tokens": 300,
    "temperature": 0,
    "stream": True,
}
GIVE_UP_S = 25.0
"""The scheduler keeps a stream without a frontend for 30 seconds (--orphan-lease)."""


def chunks(urls: list[str]) -> Iterator[dict[str, object]]:
    """The chunks of one answer, each once."""
    last_id = ""
    deadline = time.monotonic() + GIVE_UP_S
    for url in cycle(urls):
        headers = {"Last-Event-ID": last_id} if last_id else {}
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY, headers=headers, timeout=60) as response:
                if response.status_code < 500:
                    response.raise_for_status()
                event_id = ""
                for line in response.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        event_id = value
                    elif value == "[DONE]":
                        return
                    elif name == "data":
                        yield json.loads(value)
                        last_id = event_id or last_id
                        deadline = time.monotonic() + GIVE_UP_S
        except httpx.TransportError as error:
            print(f"[{url}: {error}]", file=sys.stderr)
        if time.monotonic() > deadline:
            raise TimeoutError("no frontend resumed the stream")
        time.sleep(0.2)


def main() -> None:
    """Print the answer as it comes."""
    for chunk in chunks(sys.argv[1:] or ["http://127.0.0.1:8000"]):
        for choice in chunk["choices"]:  # type: ignore[attr-defined]  # JSON
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
