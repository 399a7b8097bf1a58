"""Remove secrets from text: known ones anywhere, and what looks like a secret."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from holdfast.security.redaction import CURRENT, HIDDEN, LAST, NAME, WORD, is_secret, passwords

MIN_SUBSTRING: Final = 5
"""Characters of a known secret that is replaced anywhere; shorter ones occur in harmless words, and are replaced only as words."""
MIN_WORD: Final = 3
"""Characters of a known secret that is replaced as a word."""
MAX_HARMLESS: Final = 8
"""Characters of a value that may be a harmless word or number, if its name does not make it a secret."""

_LITERAL: Final = re.compile(r"(?:none|null|nil|true|false|yes|no|on|off|undefined|\W{0,2}|\*{3}.*)", re.IGNORECASE | re.DOTALL)
"""Values that are no secrets, whatever their name."""
_NUMBER: Final = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?[a-z%]?", re.IGNORECASE)
_KNOWN_URLS: Final = (
    r"(?:(?:git\+)?https?|s?ftps?|(?:git\+)?ssh|git|tcp|udp|unix|file|gs|s3|sqlite(?:\+\w+)?|postgres(?:ql)?(?:\+\w+)?|wss?)"
)
_INNER: Final = r"""(?P<escape>\\+)(?P<quote>["']).*?(?:(?<!\\)(?P=escape)(?P=quote)|$)"""
_QUOTED: Final = r"""[bru]{0,2}(?:"(?:[^"\\\n]|\\.)*(?:"|$)|'(?:[^'\\\n]|\\.)*(?:'|$)|""" + _INNER + ")"
"""Up to the closing quote; in a nested string that is a quote with as many backslashes as the opening one."""
_BARE: Final = r"""(?:[^\s"'<>&;,}\]\\]|[;,](?!\s|$|[\w.-]+[=:])|&(?![\w.-]+=)|["'](?=\w)|\\(?![nrtu"'\\]))+"""
"""Up to the end of a word, or the next pair of name and value."""
_VALUE: Final = rf"(?:(?P<quoted>{_QUOTED})|(?P<bare>{_BARE}))"
_FLAGS: Final = re.IGNORECASE | re.MULTILINE
_GIVEN: Final = re.compile(rf"""(?<![\w.-])(?P<name>{NAME})(?P<between>\\*["']?[ \t]*(?:=>|[:=](?!=))[ \t]*){_VALUE}""", _FLAGS)
_OPTION: Final = re.compile(rf"""(?<![\w-])(?P<name>--?{NAME})(?P<between>[= ]|\\*["'],[ ]*){_VALUE}""", _FLAGS)

_PATTERNS: Final = tuple(
    (re.compile(pattern, flags), by)
    for pattern, flags, by in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL, HIDDEN),
        (
            r"\b(postgres(?:ql)?(?:\+\w+)?:/+)[^\s:/@\"'<>]{0,100}:[^\s\"'<>]{0,500}@",
            re.IGNORECASE,
            rf"\1{HIDDEN}@",
        ),  # with slashes, as SQLAlchemy
        (r"(?<![\w+.-])([a-z][a-z0-9+.-]{0,40}://)[^\s/@\"'<>]{0,500}:[^\s/\"'<>]{0,500}@", re.IGNORECASE, rf"\1{HIDDEN}@"),
        (r"\b((?:git\+)?(?:https?|wss?)://)[^\s/@\"'<>]+@", re.IGNORECASE, rf"\1{HIDDEN}@"),  # a token alone
        (r"\b(https?://[^\s\"'<>]{0,200}?/(?:services|webhooks?|hooks?|api/webhooks)/)[^\s\"'<>\\]+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (
            rf"(?<![\w+.-])(?!{_KNOWN_URLS}://)([a-z][a-z0-9+.-]{{0,40}}://)[^\s\"'<>]+",
            re.IGNORECASE,
            rf"\1{HIDDEN}",
        ),  # apprise's: the address is the secret
        (rf"([?&;][^\s=&;\"']{{0,60}}(?:{WORD}|{LAST}|sig|signature|code)=)[^\s&\"'<>]+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (r"\b((?:Bearer|Basic|Token)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE, rf"\1{HIDDEN}"),
        (r"\b((?:(?:set-)?cookie|(?:proxy-)?authorization):[ \t]*)[^\n\"'\\]+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (
            r"^([ \t]*(?:-[ \t]+){0,8}[\w.-]*(?:password|passwd|passphrase):[ \t]+)(?![\"'|>]|none\b|null\b|\*{3})[^\n]+",
            _FLAGS,
            rf"\1{HIDDEN}",
        ),  # YAML
        (r"(\b(?:machine|login|account)[ \t]+\S+\s+password[ \t]+)\S+", re.IGNORECASE, rf"\1{HIDDEN}"),  # netrc
        (r"^([ \t]*password[ \t]+)\S+[ \t]*$", _FLAGS, rf"\1{HIDDEN}"),
        (r"(\b(?:mysql|mariadb)[\w-]*[ \t][^\n;|]{0,200}?(?<=[ \t])-p)[^\s\"']+", 0, rf"\1{HIDDEN}"),
        (r"(\bsshpass[ \t]+-p[ \t]*)\S+", 0, rf"\1{HIDDEN}"),
        (r"(\bcurl[ \t][^\n;|]{0,200}?(?<=[ \t])(?:-u|--user|--proxy-user)[= ]?[\"']?[^\s:\"']+:)[^\s\"']+", 0, rf"\1{HIDDEN}"),
        (r"\b(?:gh[opsru]_\w{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{16,}|sk-[\w-]{16,}|xox[abeprs]-[\w-]{8,})", 0, HIDDEN),
        (r"\b(?:pn[ub]_\w{16,}|AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)", 0, HIDDEN),
        (r"\b(?:[sr]k_(?:live|test)_\w{8,}|whsec_\w{16,}|AIza[\w-]{30,}|SG\.[\w-]{16,}\.[\w-]{16,}|npm_\w{30,})", 0, HIDDEN),
    )
)


def _hidden(found: re.Match[str]) -> str:
    """Return a match of name and value, with the value hidden if it may be a secret."""
    quoted, bare = found["quoted"], found["bare"]
    value = bare if quoted is None else quoted.strip("bruBRU\\\"'")
    if _LITERAL.fullmatch(value) or _is_harmless(found["name"].lstrip("-"), value):
        return found[0]
    mark = "" if quoted is None else (found["escape"] or "") + (found["quote"] or quoted.lstrip("bruBRU")[0])
    return f"{found['name']}{found['between']}{mark}{HIDDEN}{mark}"


def _is_harmless(name: str, value: str) -> bool:
    """Return whether *value* is no secret although *name* suggests one: a folder, a count, the number of a token, a key of a table."""
    if name == CURRENT or (name.lower().endswith("key") and value.startswith("/")):
        return value.startswith("/")
    if "token" in name.lower() and _NUMBER.fullmatch(value):
        return "tokens" in name.lower() or len(value) <= MAX_HARMLESS
    if name.lower() in {"key", "pat", "auth"}:
        return len(value) < MIN_SUBSTRING or value.isidentifier() or all(part.isidentifier() or part.isdigit() for part in value.split("."))
    return name.lower() == "pass" and bool(_NUMBER.fullmatch(value)) and len(value) < MIN_SUBSTRING


def is_distinct(value: str) -> bool:
    """Return whether *value*, which may be a secret or a setting, can be hidden everywhere.

    A short word or number (`false`, `disabled`, `12355`) and an existing path occur in many unrelated lines.
    """
    return not (len(value) <= MAX_HARMLESS and (value.isalpha() or value.isdigit())) and not (
        value.startswith("/") and Path(value).exists()
    )


class Redactor:
    """Hides secrets, and learns more of them on the way."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._words: set[str] = set()
        """Short known secrets, which are hidden only as words."""

    def learn(self, *secrets: str | None) -> None:
        """Hide these from now on."""
        for one in secrets:
            if one and not _LITERAL.fullmatch(one):
                for form in {one, unquote(one), quote(one, safe=""), json.dumps(one)[1:-1], json.dumps(json.dumps(one)[1:-1])[1:-1]}:
                    (self._known if len(form) >= MIN_SUBSTRING else self._words if len(form) >= MIN_WORD else set()).add(form)

    def learn_environment(self, environment: Mapping[str, str]) -> None:
        """Learn the values of variables with secret names, and the passwords in addresses."""
        for name, value in environment.items():
            if is_secret(name):
                self.learn(value)
            self.learn(*passwords(value))

    def text(self, text: str) -> str:
        """Return *text* without secrets."""
        for one in sorted(self._known, key=len, reverse=True):
            text = text.replace(one, HIDDEN)
        if self._words:
            text = re.sub(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(self._words)))})(?!\w)", HIDDEN, text)
        for pattern, by in _PATTERNS:
            text = pattern.sub(by, text)
        return _OPTION.sub(_hidden, _GIVEN.sub(_hidden, text))

    def value(self, value: Any, name: str = "") -> Any:  # noqa: ANN401 (any JSON)
        """Return *value*, whose key is *name*, without secrets; learn the values of secret keys."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return self._listed(value, name)
        if isinstance(value, str) and name and is_secret(name):
            if is_distinct(value) or name.lower() not in {"key", "pat", "auth"}:
                self.learn(value)
            return HIDDEN
        return self.text(value) if isinstance(value, str) else value

    def _listed(self, values: Iterable[Any], name: str) -> list[Any]:
        """Return a list without secrets; what follows an option with a secret name is a secret."""
        found: list[Any] = []
        option = ""
        for one in values:
            found.append(self.value(one, option or name))
            option = (
                one.lstrip("-") if isinstance(one, str) and one.startswith("-") and "=" not in one and is_secret(one.lstrip("-")) else ""
            )
        return found

    def environment(self, environment: Mapping[str, str], shown: tuple[str, ...]) -> dict[str, str]:
        """Return the variables of a job, with values only if their names begin with one of *shown* and are not secret."""
        self.learn_environment(environment)
        return {
            name: self.text(value) if name.startswith(shown) and not is_secret(name) else HIDDEN
            for name, value in sorted(environment.items())
        }
