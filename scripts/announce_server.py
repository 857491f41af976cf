"""Waits until a server that starts beside it is healthy, then prints a curl line to try.

Ends by itself when the process that started it ends, so a server that fails leaves no waiter.
"""

import http.client
import os
import sys
import time
import urllib.error
import urllib.request

CURL = """
The server is healthy. Try:

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "default", "max_tokens": 64, "messages": [{{"role": "user", "content": \
"What is the capital of France?"}}]}}'
"""


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False


def main(url: str) -> None:
    parent = os.getppid()
    start = report = time.monotonic()
    while not healthy(url):
        time.sleep(0.5)
        if os.getppid() != parent:
            return
        if time.monotonic() - report > 15:
            report = time.monotonic()
            print(f"[serve] {report - start:.0f} s: waiting for {url}/health", file=sys.stderr)
    print(CURL.format(url=url), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
