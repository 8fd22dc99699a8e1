"""Keeps tokens and keys out of logs, plans and error messages."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"

# Tokens that can be told by their look: Hugging Face, OpenAI style, GitHub, AWS, JSON web tokens.
_TOKENS = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_[A-Za-z0-9_]{16,}|AKIA[0-9A-Z]{12,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"
)
# `--api-key VALUE`, `HF_TOKEN=VALUE`, `"api_key": "VALUE"`, `password: VALUE`.
_NAMED = re.compile(
    r"(?i)((?:[A-Z0-9_-]*(?:token|secrets?|passw(?:or)?d|api[_-]?key|credentials?))"
    r"[\"']?(?:\s*[=:]\s*|\s+))([\"']?)(?![\s\"'{\[])([^\s\"',;}\]]+)"
)
_BEARER = re.compile(
    r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?)?(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"
)
_URL_LOGIN = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s:@]+:[^/\s@]+@")
_SECRET_NAME = re.compile(
    r"(?i)(^|[_.-])(token|secret|passw(or)?d|passwd|credentials?|api[_-]?key|private[_-]?key|key)$"
)
# Names that end like a secret and hold none.
_HARMLESS = re.compile(r"(?i)^(max|min|num|eos|bos|pad|stop|kv|cache)[_-].*|.*_(file|path|name)$")


def looks_secret(text: str) -> bool:
    """Whether a value is a token by its look alone."""
    return _TOKENS.search(text) is not None


def redact_text(text: str, secrets: tuple[str, ...] = ()) -> str:
    """`text` with tokens, keys and passwords masked.

    `secrets` are values known to the caller (an API key read from a file); they are masked
    wherever they stand, if they are at least four characters long.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= 4:
            text = text.replace(secret, MASK)
    text = _URL_LOGIN.sub(rf"\1{MASK}@", text)
    text = _BEARER.sub(lambda m: f"{m.group(1) or ''}{m.group(2)} {MASK}", text)
    text = _TOKENS.sub(MASK, text)
    return _NAMED.sub(_mask_named, text)


def _mask_named(match: re.Match[str]) -> str:
    name, quote, value = match.groups()
    bare = re.split(r"[\s=:\"']", name.strip("\"' "))[0].lstrip("-")
    if value == MASK or not _is_assignment(name, value) or _HARMLESS.match(bare):
        return match.group(0)
    return f"{name}{quote}{MASK}"


def _is_assignment(name: str, value: str) -> bool:
    """`--api-key VALUE` hides a value; the words `token count` do not."""
    if re.search(r"[=:]\s*$", name):
        return value.lower() not in ("true", "false", "null", "none")
    return name.startswith("--")


def redact(value: Any, secrets: tuple[str, ...] = ()) -> Any:
    """A copy of nested dicts, lists and strings without secrets.

    A string, or a list of strings, under a key that names a secret is masked whole; booleans and
    numbers stay, since `api_key: true` only says that there is one.
    """
    if isinstance(value, str):
        return redact_text(value, secrets)
    if isinstance(value, (list, tuple)):
        return _redact_argv(list(value), secrets)
    if isinstance(value, dict):
        return {k: _redact_entry(k, v, secrets) for k, v in value.items()}
    return value


def _redact_entry(key: Any, value: Any, secrets: tuple[str, ...]) -> Any:
    secret = isinstance(key, str) and _SECRET_NAME.search(key) and not _HARMLESS.match(key)
    if secret and isinstance(value, str) and value:
        return MASK
    if secret and isinstance(value, (list, tuple)):
        return [MASK if isinstance(v, str) and v else redact(v, secrets) for v in value]
    return redact(value, secrets)


def _redact_argv(items: list, secrets: tuple[str, ...]) -> list:
    """Like `redact`, and `["--api-key", "VALUE"]` loses its value."""
    out: list = []
    hide_next = False
    for item in items:
        if hide_next and isinstance(item, str) and not item.startswith("--"):
            out.append(MASK)
            hide_next = False
            continue
        hide_next = False
        if isinstance(item, str) and item.startswith("--") and "=" not in item:
            name = item.lstrip("-")
            hide_next = bool(_SECRET_NAME.search(name)) and not _HARMLESS.match(name)
        out.append(redact(item, secrets))
    return out
