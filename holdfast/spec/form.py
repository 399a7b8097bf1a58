"""The run form: the parameters of a flow run that trains a job, in the Prefect UI or with `prefect deployment run`.

A few fields for every job, and one object, *advanced*, for all others, which the form shows on request. The server validates the
parameters with the JSON schemas here, so that most mistakes are refused before a run starts; `job_of` finds the rest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from holdfast.errors import BadParameters, Problem
from holdfast.spec.files.problems import problems_in
from holdfast.spec.job import MODULE, NAME, TrainingJob, is_policy_file

Schema = dict[str, Any]

SCRIPT: Final = r"^(?![^/~\s]\S*\.py(\s|$))\s*\S"
"""A relative path would be one in the folder that Prefect makes for the run, where no script is."""


def text_like(pattern: str, expected: str) -> Schema:
    """Return the schema of a text that matches *pattern*; for another the server says that *expected*, in words, was expected.

    When a `pattern` does not match, the server shows nothing but the pattern.
    """
    return {"if": {"pattern": pattern}, "else": {"const": expected}}


NAME_TEXT: Final = text_like(NAME, "lowercase letters, digits and dashes, at most 63")
SCRIPT_TEXT: Final = text_like(SCRIPT, "an absolute path, such as /data/train.py, or a command, such as python -m gpt")
WORKDIR_TEXT: Final = text_like(r"^$|^[/~]", "an absolute path, such as /data/gpt, or nothing")

FORM_NAMES: Final = {"command": "script", "module": "script"}
"""Fields of a job that have another name in the form; those neither here nor in `SAME_NAME` are in `advanced`."""
SAME_NAME: Final = frozenset({"name", "script", "args", "nnodes", "nproc_per_node", "workdir", "cluster"})
HOME: Final = "~"
MIN_NODES: Final = "min_nodes"
"""The field of *advanced* that is the minimum in `nnodes` of a job file: the form has a number for the nodes."""
FEWEST_NODES: Final[Schema] = {
    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}],
    "default": None,
    "title": "Min Nodes",
    "description": "Minimum number of nodes that the job may shrink to when nodes are lost; empty: it never shrinks.",
}
AS_COMMAND: Final = "as_command"
"""The field of *advanced* by which a line is a `command` although it begins as a script or module does."""
KEEP_COMMAND: Final[Schema] = {
    "type": "boolean",
    "default": False,
    "title": "As Command",
    "description": "Start the line as it is, as `command` of a job file. Otherwise a script, and what `python -m` names, is started in a "
    "process that has imported torch already.",
}
AS_JSON: Final = {"env": '{"NCCL_DEBUG": "INFO"}', "node_labels": '{"gpu": "h200"}; empty: any node.'}
"""Fields that the UI edits as JSON, with an example: a job file has YAML."""
COUNTED_RANKS: Final[Schema] = {
    "anyOf": [{"enum": ["auto", "gpu", "cpu"], "type": "string"}, {"type": "null"}],
    "default": None,
    "title": "Nproc Per Node",
    "description": "Count the ranks on each node, in place of the number above: `gpu` (one for each GPU), `cpu` (one for each CPU), or "
    "`auto` (`gpu` if the node has GPUs, else `cpu`); empty: the number above.",
}


def job_of(fields: Mapping[str, Any], advanced: Mapping[str, Any]) -> TrainingJob:
    """Return the job that the parameters describe; raise `BadParameters` with all problems."""
    try:
        program = _program(fields["script"], fields["args"], fields["workdir"], as_command=advanced.get(AS_COMMAND, False))
        own = (MIN_NODES, AS_COMMAND)
        given = {name: value for name, value in advanced.items() if name not in own and (name, value) != ("nproc_per_node", None)}
        nnodes = _nnodes(fields["nnodes"], advanced.get(MIN_NODES))
        job = TrainingJob.model_validate(
            {"nproc_per_node": fields["nproc_per_node"], **given, "nnodes": nnodes, "name": fields["name"], **program}
        )
    except ValidationError as error:
        raise BadParameters(tuple(as_form_problems(problems_in(error, TrainingJob)))) from None
    return job.model_copy(update={"policy": str(job.inside(job.policy))}) if is_policy_file(job.policy) else job


def _nnodes(most: Any, least: Any) -> Any:  # noqa: ANN401 (values of the form, not validated yet)
    """Return the field `nnodes` of the job; raise `BadParameters` if there are fewer nodes than their minimum."""
    if least is None:
        return most
    if isinstance(least, int) and isinstance(most, int) and least > most:
        reason = f"{least} is more than `nnodes`, {most}"
        raise BadParameters((Problem(field=f"advanced.{MIN_NODES}", reason=reason, cure="Lower it, or raise `nnodes`"),))
    return f"{least}:{most}"


def parameters_of(job: TrainingJob, cluster: Any = None, *, standby: bool = False) -> Schema:  # noqa: ANN401 (a cluster, its fields, its name)
    """Return the parameters with which the deployment `training-job/train` runs *job*: what `run_deployment` and the API take.

    *cluster* is a cluster, its fields, or a name for it; None: this machine.
    """
    fields = job.model_dump(mode="json", exclude_defaults=True)
    own = {name: fields.pop(name, None) for name in ("name", "script", "module", "command", "args", "workdir", "nnodes")}
    if isinstance(job.nproc_per_node, int):
        fields.pop("nproc_per_node", None)
    if job.script is not None and not job.script.endswith(".py"):
        cure = "Rename it, or make it a command"
        raise BadParameters((Problem(field="script", reason=f"{job.script!r:.80} does not end in .py", cure=cure),))
    fewest = {MIN_NODES: job.min_nodes} if job.min_nodes < job.max_nodes else {}
    program = ["python", "-m", job.module] if job.module is not None else [str(job.inside(job.script or ""))]
    as_command = {AS_COMMAND: True} if job.command is not None and _starts_warm(job.command) else {}
    advanced = {**fields, **fewest, **as_command, **({"standby": True} if standby else {})}
    return {
        "name": job.name,
        "script": _line(job.command or program),
        "args": shlex.join(own["args"] or []),
        "nnodes": job.max_nodes,
        "nproc_per_node": job.nproc_per_node if isinstance(job.nproc_per_node, int) else 1,
        "workdir": str(job.inside(".")),
        "cluster": "local" if cluster is None else getattr(cluster, "model_dump", lambda **_: cluster)(mode="json"),
        "advanced": advanced,
    }


def as_form_problems(problems: list[Problem]) -> Iterator[Problem]:
    """Yield the *problems* of a job with the names that its fields have in the form."""
    for problem in problems:
        reason, cure = problem.reason, problem.cure
        for field, name in FORM_NAMES.items():
            reason, cure = reason.replace(f"`{field}`", f"`{name}`"), cure.replace(f"`{field}`", f"`{name}`")
        yield Problem(field=_name_of(problem.field), reason=reason, cure=cure)


def _name_of(field: str) -> str:
    first = field.partition(".")[0].partition("[")[0]
    if first in FORM_NAMES or field in FORM_NAMES:
        return FORM_NAMES.get(field, FORM_NAMES.get(first, field))
    return field if first in SAME_NAME else f"advanced.{field}"


def _line(words: Sequence[str]) -> str:
    """Return the line of *words*; a relative path of a program in Python is in quotes, as the pattern takes it for a script's otherwise."""
    line = shlex.join(words)
    return line if re.search(SCRIPT, line) else f"'{words[0]}'{line.removeprefix(words[0])}"


def _starts_warm(words: Sequence[str]) -> bool:
    """Return whether a line of these words is a module or a script unless it is marked as a command."""
    return _names_module(words) or words[0].endswith(".py")


def _names_module(words: Sequence[str]) -> bool:
    return list(words[:2]) == ["python", "-m"] and len(words) > 2 and re.fullmatch(MODULE, words[2]) is not None  # noqa: PLR2004


def _program(line: str, args: str, workdir: str, *, as_command: object = False) -> Schema:
    """Return the fields of a job for its program: a script or module where *line* begins with one, else a command."""
    words, more = _words(line, "script"), _words(args, "args")
    if not words:
        raise BadParameters((Problem(field="script", reason="is empty", cure="Write the path of a script, or a command"),))
    relative = [word for word in words if word.endswith(".py") and not word.startswith(("/", "~", "-"))]
    if relative and not workdir:
        cure = "Write its absolute path, or set `workdir` to its folder"
        raise BadParameters((Problem(field="script", reason=f"{relative[0]} is a relative path, and there is no workdir", cure=cure),))
    if as_command:
        return {"command": [*words, *more], "workdir": workdir or HOME}
    if _names_module(words):
        return {"module": words[2], "args": [*words[3:], *more], "workdir": workdir or HOME}
    if words[0].endswith(".py"):
        folder = workdir or str(Path(words[0]).parent)
        return {"script": words[0], "args": [*words[1:], *more], "workdir": folder}
    return {"command": [*words, *more], "workdir": workdir or HOME}


def _words(line: str, field: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        reason, cure = f"{line!r:.80} cannot be split into words: {str(error).lower()}", "Close the quotes, or put a backslash before each"
        raise BadParameters((Problem(field=field, reason=reason, cure=cure),)) from None


# -- schemas ----------------------------------------------------------------------------------------------------------


def advanced_schema() -> Schema:
    """Return the schema of *advanced*: all fields of a job that the form has no field of its own for, and `standby`."""
    whole = TrainingJob.model_json_schema()
    strict = _without_references(whole, whole.pop("$defs"))
    for name in ("name", "script", "module", "command", "args", "workdir", "nnodes"):
        del strict["properties"][name]
    strict["properties"] = {MIN_NODES: FEWEST_NODES, AS_COMMAND: KEEP_COMMAND, **strict["properties"]}
    strict["properties"]["nproc_per_node"] = COUNTED_RANKS
    strict["properties"]["standby"] = {
        "type": "boolean",
        "title": "Standby",
        "default": False,
        "description": "Wait while another flow run controls a job of this name, and take over when it dies.",
    }
    strict.pop("required", None)
    return _collapsed(_in_words(strict))


def _in_words(schema: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return *schema* with each `pattern` of a text replaced by what the server says in words, with the examples of the field."""
    if isinstance(schema, list):
        return [_in_words(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    own = {name: _in_words(value) for name, value in schema.items() if name != "pattern"}
    if not isinstance(pattern := schema.get("pattern"), str):  # else it is the name of a property
        return own if pattern is None else {**own, "pattern": _in_words(pattern)}
    return {**own, **text_like(pattern, f"a text such as {' or '.join(schema['examples'])}")}


def _without_references(schema: Any, known: Mapping[str, Schema]) -> Any:  # noqa: ANN401 (JSON)
    """Return *schema* with its references replaced by what they refer to."""
    if isinstance(schema, list):
        return [_without_references(one, known) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        own = {name: value for name, value in schema.items() if name != "$ref"}
        return _without_references({**known[schema["$ref"].rpartition("/")[2]], **own}, known)
    return {name: _without_references(value, known) for name, value in schema.items()}


def _collapsed(strict: Schema) -> Schema:
    """Return a schema that validates with *strict*, and that Prefect's UI shows as a choice between the defaults and all fields.

    The UI cannot collapse sections. It shows the alternatives of `anyOf` as buttons and ignores `then`: so the first alternative,
    which shows nothing, admits every object, and `then` reports the errors, field by field.
    """
    shown = {name: _shown(name, field) for name, field in strict["properties"].items()}
    choices = [{"title": "Defaults", "type": "object", "properties": {}}, {"title": "Customize", "type": "object", "properties": shown}]
    return {"anyOf": choices, "if": {}, "then": strict}


def _shown(name: str, field: Schema) -> Schema:
    """Return how the field *name* is shown: an optional one by its other type, a group of fields as a choice."""
    text = field["description"].replace("`", "").replace(", relative to the job file", "")  # the UI shows it verbatim
    if field.get("type") == "object" and "properties" in field:  # its own title is the name of a class
        return {"title": name.replace("_", " ").title(), "description": text, "anyOf": _collapsed(field)["anyOf"]}
    own = {key: value for key, value in field.items() if key != "anyOf" and (key, value) != ("default", None)}
    own["description"] = text if name not in AS_JSON else f"{text.partition(', e.g. ')[0].rstrip('.')}, e.g. {AS_JSON[name]}"
    choices = [one for one in field.get("anyOf", []) if one != {"type": "null"}]
    if len(choices) == 1:
        return {**choices[0], **own}
    # the UI labels the buttons with the titles
    named = [one | ({"title": "Automatic", "default": one["const"]} if "const" in one else {"title": "Number"}) for one in choices]
    return {**own, "anyOf": named} if named else own
