"""Exit code 0 when Triton is ready and a token comes out of it, 1 with one line of reason otherwise.

Only the standard library. Asks for one token on the endpoint that the repository has, so that an engine
that hangs, or whose tokenizer fails, is found; a server that only says it is ready would not do.

    healthcheck.py [URL]        default http://127.0.0.1:8000
"""

# ruff: noqa: INP001 - images get this file alone
from __future__ import annotations

import json
import sys
from http import HTTPStatus
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

READY_TIMEOUT_S = 5
TOKEN_TIMEOUT_S = 20
PROMPT: dict[str, object] = {"text_input": "Hello", "stream": True, "max_tokens": 1}
# Models that take text, the first that is there is asked; the LLM API model has names of its own (and is called like
# the engine of the other repositories, which has no text_input: hence the order).
REQUESTS: dict[str, dict[str, object]] = {
    "tensorrt_llm_bls": PROMPT,
    "ensemble": PROMPT,
    "tensorrt_llm": {"text_input": "Hello", "streaming": True, "sampling_param_max_tokens": 1},
}


def is_ready(url: str) -> bool:
    """Tell whether a GET answers 200."""
    try:
        with urlopen(url, timeout=READY_TIMEOUT_S) as answer:  # noqa: S310 - http on this machine
            return bool(answer.status == HTTPStatus.OK)
    except HTTPError:
        return False


def first_text(url: str, request: dict[str, object]) -> str | None:
    """Return the first text of a stream; None when the stream ends without one."""
    body = json.dumps(request).encode()
    post = Request(url, data=body, headers={"Content-Type": "application/json"})  # noqa: S310 - http on this machine
    with urlopen(post, timeout=TOKEN_TIMEOUT_S) as stream:  # noqa: S310
        for line in stream:
            if line.startswith(b"data:"):
                document = json.loads(line[len(b"data:") :])
                if "error" in document:
                    raise OSError(document["error"])
                if "text_output" in document:
                    return str(document["text_output"])
    return None


def check(url: str) -> str:
    """Return what is wrong with the server, '' when nothing is."""
    if not is_ready(f"{url}/v2/health/ready"):
        return "the server is not ready"
    model = next((name for name in REQUESTS if is_ready(f"{url}/v2/models/{name}/ready")), None)
    if model is None:
        return f"none of {', '.join(REQUESTS)} is ready"
    if first_text(f"{url}/v2/models/{model}/generate_stream", REQUESTS[model]) is None:
        return f"{model} ended without an answer"
    return ""


def main() -> int:
    """Check the server once."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    try:
        problem = check(url.rstrip("/"))
    except (OSError, HTTPException, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        sys.stderr.write(f"{url}: {problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
