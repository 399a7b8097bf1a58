"""What is taken out of text, whatever shape it has, and what stays."""

from __future__ import annotations

import json

import pytest

from holdfast.cluster.slurm.commands import environment
from holdfast.security.redaction import is_secret
from holdfast.support.redactor import Redactor
from tests.costs import MOST, RUNS, growth

SHAPES = r"""
cloning https://qqTOKENqq@git.example.org/x.git
pip install git+https://qq@git.example.org/x.git
{"password": "pl\"ainqq"}
{"password": "two words qq"}
{"event": "{\"password\": \"in qq \\\"ner qq\"}", "step": 7}
password='it\'s qq' step=7
password="never closed qq
db_pass=hunter2qq step=7
DB_PASS=qq
MYSQL_PWD=huqq
Server=db;Uid=me;Pwd=a;bqq;Database=d
pass: hunterqq
key: hunter2/qq
export SSH_KEY=abcdqq
machine db.example.org login me password qqq
password qqqq
mysql -u root -phunterqq -h db
sk_live_0123456789abqq
AIzaSyA0123456789012345678901234567890qq
secret=qq
password: correct horse qq
token=b'qq top' step=7
started with --db-pass qq --pass 'a qq' --lr 0.1
["train.py", "--api-token", "qq yy", "--lr", "0.1"]
postgresql://hf:aB3/xYqq+q9=@h/db
postgresql:/hf:qq@h
sshpass -p qq ssh h
curl -u me:qq https://example.org
Cookie: a=qq; b=qq
auth=qq12-qq
PREFECT_API_AUTH_STRING=admin:qq
password=ab,qq;qq, step=7
{'api_key': 'qq'}
password => 'qq'
"""


@pytest.mark.parametrize("line", SHAPES.strip().splitlines())
def test_a_secret_is_hidden_whatever_shape_it_has(line: str) -> None:
    """All of it; the next value in the line stays, and a second pass changes nothing."""
    redacted = Redactor().text(line)
    assert "qq" not in redacted
    assert "***" in redacted
    assert [one in redacted for one in ("step=7", '"step": 7', "--lr")] == [one in line for one in ("step=7", '"step": 7', "--lr")]
    assert Redactor().text(redacted) == redacted
    if line.startswith(('{"', "[")):
        assert json.loads(redacted), "what was JSON still is"


@pytest.mark.parametrize(
    "harmless",
    [
        "step 100 loss 2.5 at https://prefect.example.org/runs/flow-run/abc?page=2",
        "keys: generation-2/groups/group-0, 12 tokens a second",
        "the monkey passed the key signature",
        "sqlite:////root/.holdfast/history.db",
        'File "/a/tokenizer.py", line 7, in tokenize',
        "ssh://train@gpu1.example.org:2222/home git@github.com:a/b.git",
        "postgresql://me@db.example.org:5432/holdfast?host=/tmp git+https://github.com/a/b@v1",
        "PWD=/home/me OLDPWD=/tmp",
        "tokens_per_second=12345.6 num_tokens: 409600 token: 50256 --max-tokens 4096 --tokenizer gpt2",
        "TOKENIZERS_PARALLELISM=false token=None password: null",
        "missing key: model.layers.0.weight, key=rank, KeyError: 'layers.0'",
        "pass: 3 of 4, compass=north bypass=1 primary_key=identifier",
        "train --key /home/me/.ssh/id_ed25519 && mysql -P3306 -h db",
        "if token == other: return",
    ],
)
def test_harmless_text_is_not_redacted(harmless: str) -> None:
    """A log full of stars is useless."""
    assert Redactor().text(harmless) == harmless


def test_a_known_secret_is_hidden_in_every_form() -> None:
    """Within JSON, within a URL; a short one only as a separate word, and a value of a setting never."""
    redactor = Redactor()
    redactor.learn_environment({"DB_PASS": 'a"b/c d', "PIN_PASSWORD": "abc", "WITH_TOKEN": "true", "A_KEY": "no"})
    redacted = redactor.text(json.dumps({"said": json.dumps('got a"b/c d')}) + " x=a%22b%2Fc%20d abc abcd true no")
    assert redacted == '{"said": "\\"got ***\\""} x=*** *** abcd true no'


def test_slurm_gets_no_variable_named_like_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm stores the environment of a job in files: the list of names is the one of bundles."""
    secret = ["MYSQL_PWD", "DB_PASS", "SITE_PRIVATE_KEY", "WANDB_API_KEY", "X_TOKEN", "SENTRY_DSN"]
    place = ["HOLDFAST_HISTORY", "SSH_AUTH_SOCK", "PREFECT_API_URL", "SLURM_JOB_ID"]
    kept = ["TOKENIZERS_PARALLELISM", "PWD", "NCCL_DEBUG", "HOLDFAST_HOME"]
    for name in [*secret, *place, *kept]:
        monkeypatch.setenv(name, "x")
    assert set(kept) <= environment().keys()
    assert environment().keys().isdisjoint([*secret, *place])
    assert [name for name in [*secret, *kept] if is_secret(name)] == secret


@pytest.mark.parametrize("run", [*RUNS, "key", "--token ", "- ", "token_", "password: ", "a://", "machine a ", "pass"])
def test_a_text_costs_in_proportion_to_its_length(run: str) -> None:
    """A log of a megabyte, or one line of it, may repeat the name of a secret without a value."""
    assert growth(Redactor().text, run) < MOST
