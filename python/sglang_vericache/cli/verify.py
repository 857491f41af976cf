"""``vericache verify``: compare a live server's output with VeriCache on and off, bit for bit.

Every prompt is decoded greedily and with a seed, first plainly (``{"enabled": false}``), then with
VeriCache as the server was started, with other draft lengths, with half the ratio and with random
views. Token ids and logprobs must agree: with plain decoding (level X1) and with each other (X0).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from sglang_vericache.cli.prompts import Prompt, built_in, from_file

TIMEOUT = 600.0
PLAIN, DEFAULT = "off", "on"
DRAFT_LENGTHS = (1, 2, 4)
GARBAGE = "random-kv"  # a view of random tokens: accepts little and must still agree
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "sampling_seed": 1234},
}


@dataclass(frozen=True)
class Decoded:
    """Output of one request.

    Attributes:
        ids, logprobs: of the output tokens.
        margins: logprob of the likeliest token minus that of the second, at each position.
        drafted, accepted: counts from ``meta_info["vericache"]``.
    """

    ids: list[int]
    logprobs: list[float]
    margins: list[float]
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Mismatch:
    """Where two outputs of one prompt part; ``margin`` is the reference's, None past its end."""

    level: str
    prompt: str
    sampling: str
    settings: str
    position: int
    expected: tuple[int, float] | None
    got: tuple[int, float] | None
    margin: float | None

    def __str__(self) -> str:
        margin = "" if self.margin is None else f", top-1/top-2 margin {self.margin:.4g}"
        return (
            f"{self.level} {self.prompt}, {self.sampling}, {self.settings}: at token "
            f"{self.position} expected {self.expected}, got {self.got}{margin}"
        )


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare a live server's output with VeriCache on and off",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:30000", help="server (default: %(default)s)")
    add("--api-key", help="of the server, if it has one")
    add("--prompts", type=Path, metavar="FILE", help="one JSON string a line instead of ours")
    add("--n", type=int, default=8, help="number of built-in prompts (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="tokens to decode (default: %(default)s)")
    add("--concurrency", type=int, default=4, help="requests at once (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what differs and one line of JSON; 1 if anything does or nothing was drafted."""
    server = Server(options.base_url, options.api_key)
    try:
        status = server.get("/vericache")
        context = server.context_length() - options.max_tokens
        prompts = from_file(options.prompts) if options.prompts else built_in(options.n, context)
        if not prompts:
            raise ValueError("no prompts: --prompts needs a file with some, or --n at least 1")
        settings = variants(status["config"])
        outputs = decode_all(server, prompts, settings, options)
    except (OSError, ValueError) as error:  # those of requests are OSError
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = mismatches(outputs)
    for mismatch in found:
        print(mismatch)
    report = summary(outputs, found, status)
    if not report["drafted"]:
        print(
            "Nothing was drafted, so equal outputs prove nothing: use longer prompts, or start the "
            "server with a fixed --vericache-draft-len."
        )
    print(json.dumps(report))
    return int(bool(found) or not report["drafted"])


class Server:
    """Requests to one server.

    Raises:
        ValueError: it refuses a request; the message is its own.
    """

    def __init__(self, base_url: str, api_key: str | None = None):
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Any:
        url = self._base_url + path
        return self._json(requests.get(url, headers=self._headers, timeout=TIMEOUT))

    def context_length(self) -> int:
        return int(self.get("/v1/models")["data"][0]["max_model_len"])

    def decode(
        self, prompt: Prompt, sampling: dict[str, Any], vericache: dict[str, Any]
    ) -> Decoded:
        body: dict[str, Any] = {
            "text": prompt.text,
            "sampling_params": {
                **sampling,
                **prompt.sampling,
                "custom_params": {"vericache": vericache},
            },
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        url = self._base_url + "/generate"
        response = requests.post(url, json=body, headers=self._headers, timeout=TIMEOUT)
        meta = self._json(response)["meta_info"]
        counts = meta.get("vericache", {})
        return Decoded(
            ids=[token for _, token, *_ in meta["output_token_logprobs"]],
            logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
            margins=[top[0][0] - top[1][0] for top in meta["output_top_logprobs"]],
            drafted=counts.get("drafted", 0),
            accepted=counts.get("accepted", 0),
        )

    @staticmethod
    def _json(response: requests.Response) -> Any:
        try:
            body = response.json()
        except requests.JSONDecodeError:
            body = response.text
        if not response.ok:
            error = body.get("error", body) if isinstance(body, dict) else body
            message = error.get("message", error) if isinstance(error, dict) else error
            raise ValueError(f"{response.url} answered {response.status_code}: {message}")
        return body


def variants(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Request settings to compare, by name; ``PLAIN`` and ``DEFAULT`` first.

    Raises:
        ValueError: the server does not draft.
    """
    if config["mode"] != "on":
        raise ValueError("the server was started with --vericache off: it never drafts")
    limit = config["draft_len"] or config["max_draft_len"]
    settings: dict[str, dict[str, Any]] = {PLAIN: {"enabled": False}, DEFAULT: {}}
    settings |= {f"draft_len {k}": {"draft_len": k} for k in DRAFT_LENGTHS if k <= limit}
    ratio = config["ratio"] / 2
    return settings | {f"ratio {ratio:g}": {"ratio": ratio}, GARBAGE: {"compressor": GARBAGE}}


Outputs = dict[tuple[str, str], dict[str, Decoded]]


def decode_all(
    server: Server,
    prompts: Sequence[Prompt],
    settings: dict[str, dict[str, Any]],
    options: argparse.Namespace,
    report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Outputs:
    """Outputs by (prompt, sampling) and settings; requests of one settings run together."""
    outputs: Outputs = {(p.name, how): {} for p in prompts for how in SAMPLING}
    keys = [(prompt, how) for prompt in prompts for how in SAMPLING]
    with ThreadPoolExecutor(options.concurrency) as pool:
        for name, vericache in settings.items():
            report(f"{len(keys)} requests with VeriCache {name}")

            def one(key: tuple[Prompt, str], vericache: dict[str, Any] = vericache) -> Decoded:
                sampling = SAMPLING[key[1]] | {"max_new_tokens": options.max_tokens}
                return server.decode(key[0], sampling, vericache)

            for (prompt, how), decoded in zip(keys, pool.map(one, keys), strict=True):
                outputs[prompt.name, how][name] = decoded
    return outputs


def mismatches(outputs: Outputs) -> list[Mismatch]:
    """First difference of each pair: VeriCache with plain decoding, other settings with it."""
    found = []
    for (prompt, sampling), by_settings in outputs.items():
        for settings, got in by_settings.items():
            if settings == PLAIN:
                continue
            level, reference = ("X1", PLAIN) if settings == DEFAULT else ("X0", DEFAULT)
            expected = by_settings[reference]
            at = first_difference(expected, got)
            if at is None:
                continue
            margin = expected.margins[at] if at < len(expected.margins) else None
            found.append(
                Mismatch(
                    level=level,
                    prompt=prompt,
                    sampling=sampling,
                    settings=settings,
                    position=at,
                    expected=token_at(expected, at),
                    got=token_at(got, at),
                    margin=margin,
                )
            )
    return found


def first_difference(a: Decoded, b: Decoded) -> int | None:
    """Position of the first token or logprob that is not bit for bit the same."""
    for i in range(max(len(a.ids), len(b.ids))):
        if token_at(a, i) != token_at(b, i):
            return i
    return None


def token_at(decoded: Decoded, i: int) -> tuple[int, float] | None:
    return (decoded.ids[i], decoded.logprobs[i]) if i < len(decoded.ids) else None


def summary(outputs: Outputs, found: Sequence[Mismatch], status: dict[str, Any]) -> dict[str, Any]:
    """Figures of the whole run; drafted, accepted and acceptance of the server's own settings."""
    by_settings: dict[str, list[Decoded]] = {}
    for of_prompt in outputs.values():
        for settings, decoded in of_prompt.items():
            by_settings.setdefault(settings, []).append(decoded)
    acceptance = {
        settings: sum(d.accepted for d in decoded) / max(sum(d.drafted for d in decoded), 1)
        for settings, decoded in by_settings.items()
    }
    margins = sorted(margin for d in by_settings[PLAIN] for margin in d.margins)
    return {
        "identical": not found,
        "x0_mismatches": sum(m.level == "X0" for m in found),
        "x1_mismatches": sum(m.level == "X1" for m in found),
        "requests": sum(map(len, by_settings.values())),
        "tokens": sum(len(d.ids) for decoded in by_settings.values() for d in decoded),
        "drafted": sum(d.drafted for d in by_settings[DEFAULT]),
        "accepted": sum(d.accepted for d in by_settings[DEFAULT]),
        "acceptance": acceptance[DEFAULT],
        "acceptance_by_settings": acceptance,
        "smallest_margin": margins[0] if margins else None,
        "median_margin": margins[len(margins) // 2] if margins else None,
        "compressor": status["config"]["compressor"],
        "ratio": status["config"]["ratio"],
    }
