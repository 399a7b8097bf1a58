"""Take secrets out of text: those that are known, wherever they stand, and what looks like one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

HIDDEN: Final = "***"
SHORTEST: Final = 5
"""Characters of a known secret that is looked for anywhere; what is shorter stands in many a harmless word."""

WORD: Final = 8
"""Characters of what may be a harmless word or number, where no name says that it is a secret."""
CURRENT: Final = "PWD"
"""What shells call the folder that one is in: no password, although others call theirs so."""

_WORD: Final = (
    r"(?:token|secret|passw(?:or)?d|passphrase|credential|webhook|cookie|dsn"
    r"|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?key|auth[_-]?string)"
)
_NAMED: Final = re.compile(_WORD + r"|(?:^|[_-])(?:key|pass|pwd|pat|auth)$", re.IGNORECASE)
_KNOWN_URLS: Final = r"(?:https?|ftp|s?ftps?|ssh|git|tcp|udp|unix|file|gs|s3|sqlite(?:\+\w+)?|postgres(?:ql)?(?:\+\w+)?|wss?)"

_PATTERNS: Final = tuple(
    (re.compile(pattern, flags), by)
    for pattern, flags, by in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL, HIDDEN),
        (r"\b([a-z][a-z0-9+.-]*://)[^\s/@\"'<>]*:[^\s/\"'<>]*@", re.IGNORECASE, rf"\1{HIDDEN}@"),
        (r"\b(https?://[^\s\"'<>]*?/(?:services|webhooks?|hooks?|api/webhooks)/)[^\s\"'<>]+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (
            rf"\b(?!{_KNOWN_URLS}://)([a-z][a-z0-9+.-]*://)[^\s\"'<>]+",
            re.IGNORECASE,
            rf"\1{HIDDEN}",
        ),  # apprise's: the address is the secret
        (rf"([?&;][^\s=&\"']*(?:{_WORD}|key|sig|signature|auth|code)=)[^\s&\"'<>]+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (r"\b((?:Bearer|Basic|Token)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE, rf"\1{HIDDEN}"),
        (rf"(--?[\w-]*{_WORD}[\w-]*[= ])\S+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (rf"(\b[\w.-]*{_WORD}[\w.-]*\\?[\"']?\s*[:=]\s*\\?[\"']?)(?!\*\*\*)[^\s\"',;}}\\]{{4,}}", re.IGNORECASE, rf"\1{HIDDEN}"),
        (r"\b(?:gh[opsru]_\w{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{16,}|sk-[\w-]{16,}|xox[abeprs]-[\w-]{8,})", 0, HIDDEN),
        (r"\b(?:pn[ub]_\w{16,}|AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)", 0, HIDDEN),
    )
)


def is_secret(name: str) -> bool:
    """Tell whether what has this *name* is a secret."""
    return name != CURRENT and bool(_NAMED.search(name))


def is_distinct(value: str) -> bool:
    """Tell whether *value*, which may be a secret or a setting, is to be hidden wherever it stands.

    A short word or number (`false`, `disabled`, `12355`) stands in many a line that has nothing to do with it, and a path that is there
    is in half of them.
    """
    return not (len(value) <= WORD and (value.isalpha() or value.isdigit())) and not (value.startswith("/") and Path(value).exists())


class Redactor:
    """Hides secrets; learns of more while it goes."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def learn(self, *secrets: str | None) -> None:
        """Hide these from now on, wherever they stand."""
        for one in secrets:
            if one and len(one) >= SHORTEST:
                self._known |= {one, unquote(one)}

    def learn_environment(self, environment: Mapping[str, str]) -> None:
        """Learn what variables hold whose names say that it is secret, and the passwords in addresses."""
        for name, value in environment.items():
            if is_secret(name):
                self.learn(value)
            self.learn_address(value)

    def learn_address(self, value: str) -> None:
        """Learn the password in an address, if *value* is one that has it."""
        try:
            self.learn(urlsplit(value).password)
        except ValueError:  # no address
            return

    def text(self, text: str) -> str:
        """Return *text* without secrets."""
        for one in sorted(self._known, key=len, reverse=True):
            text = text.replace(one, HIDDEN)
        for pattern, by in _PATTERNS:
            text = pattern.sub(by, text)
        return text

    def value(self, value: Any, name: str = "") -> Any:  # noqa: ANN401 (any JSON)
        """Return *value*, which stands under *name*, without secrets; what stands under a secret's name is learnt."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return self._listed(value, name)
        if isinstance(value, str) and name and is_secret(name):
            self.learn(value)
            return HIDDEN
        return self.text(value) if isinstance(value, str) else value

    def _listed(self, values: Iterable[Any], name: str) -> list[Any]:
        """Return a list; what follows an option that is called like a secret is one."""
        found: list[Any] = []
        option = ""
        for one in values:
            found.append(self.value(one, option or name))
            option = (
                one.lstrip("-") if isinstance(one, str) and one.startswith("-") and "=" not in one and is_secret(one.lstrip("-")) else ""
            )
        return found

    def environment(self, environment: Mapping[str, str], shown: tuple[str, ...]) -> dict[str, str]:
        """Return the variables of a job: values of those alone whose names begin with one of *shown* and are no secret's."""
        self.learn_environment(environment)
        return {
            name: self.text(value) if name.startswith(shown) and not is_secret(name) else HIDDEN
            for name, value in sorted(environment.items())
        }
