"""The rows of all data sets: their definition, a reader and a writer.

data_source: str                      which reward scores the row (rewards.SOURCES)
prompt: list of {role, content}       chat messages; role is one of ROLES
ability: str                          kind of task, for people
reward_model: {style, ground_truth}   style "rule..." or "model"; a rule needs the ground truth
extra_info: dict                      split, index, question, answer (the full response), ...
"""

import jinja2
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.atomic import replacing

ROLES = ("system", "user", "assistant", "tool")
FIELDS = {"data_source": str, "prompt": list, "ability": str, "reward_model": dict, "extra_info": dict}


def load_rows(paths, columns):
    """Read parquet files (a path or a list) into a list of dicts with the keys `columns`, in file order.

    A dotted column such as "extra_info.answer" is read from inside a struct and keeps its dotted name.
    Columns that the schema defines are validated; others must be there and not null.  Raises ValueError, in
    one line with file, row and field, for a file that is missing, empty or not parquet, and for a bad row.
    """
    rows = []
    for path in [paths] if isinstance(paths, str) or hasattr(paths, "__fspath__") else paths:
        try:
            names = pq.read_schema(path).names
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file; write it with a script of data_prep/") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from None
        wanted = list(dict.fromkeys(column.split(".")[0] for column in columns))
        for name in wanted:
            if name not in names:
                raise ValueError(f"{path}: no column {name!r}; it has {', '.join(names)}")
        records = pq.read_table(path, columns=wanted).to_pylist()
        if not records:
            raise ValueError(f"{path}: no rows; write it again with at least one")
        for i, record in enumerate(records):
            _check(record, f"{path}: row {i}")
            rows.append({column: _get(record, column, f"{path}: row {i}") for column in columns})
    return rows


def load_prompts(paths, tokenizer, max_length, drop_overlong):
    """Rows of a list of RL data files, with `prompt_ids` (chat template, generation prompt) and `index`.

    Prompts of more than max_length tokens are dropped, or a ValueError.  Returns rows, number dropped.
    """
    rows, kept = load_rows(paths, ["data_source", "prompt", "reward_model", "extra_info"]), []
    for index, row in enumerate(rows):
        try:
            ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        except jinja2.TemplateError as error:
            raise ValueError(f"row {index} does not fit the tokenizer's chat template: {error}") from None
        if len(ids) <= max_length:
            kept.append(dict(row, prompt_ids=ids, index=index, group=index))
        elif not drop_overlong:
            raise ValueError(
                f"{', '.join(map(str, paths))}: the prompt of row {index} has {len(ids)} tokens, over"
                f" --max_prompt_length {max_length}; raise it or drop the row by --filter_overlong_prompts"
            )
    if rows and not kept:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no prompt within --max_prompt_length {max_length}; raise it"
        )
    return kept, len(rows) - len(kept)


def write_parquet(rows, path):
    """Write a list of dicts to `path`, all or nothing; the same rows give the same bytes.

    Raises ValueError, in one line with file, row and field, for a row that `load_rows` would refuse.
    """
    if not rows:
        raise ValueError(f"{path}: no rows to write")
    for i, row in enumerate(rows):
        _check(row, f"{path}: row {i}")
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"{path}: row {i}: columns {list(row)} differ from those of row 0, {list(rows[0])}"
            )
    with replacing(path) as new:
        pq.write_table(pa.Table.from_pylist(rows), new)


def _get(record, column, where):
    """The value of a possibly dotted column; ValueError if it is not there or null."""
    value = record
    for key in column.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        raise ValueError(f"{where}: {column!r} is missing or null; fill it in or drop the row")
    return value


def _check(record, where):
    """Raise ValueError if one of the schema's fields that are in `record` is not as defined above."""
    for name, kind in FIELDS.items():
        if name in record and not isinstance(record[name], kind):
            raise ValueError(f"{where}: {name!r} must be a {kind.__name__}, not {record[name]!r:.60}")
    if "prompt" in record and not record["prompt"]:
        raise ValueError(f"{where}: 'prompt' is empty; it needs at least one {{role, content}} message")
    for i, message in enumerate(record.get("prompt", ())):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: 'prompt[{i}]' must be {{role, content}} with a string content")
        if message.get("role") not in ROLES:
            raise ValueError(
                f"{where}: 'prompt[{i}].role' is {message.get('role')!r}; use {', '.join(ROLES)}"
            )
    if "reward_model" in record:
        style, truth = (record["reward_model"].get(key) for key in ("style", "ground_truth"))
        # published data sets name a kind of rule too, such as rule-lighteval/MATH_v2
        if not isinstance(style, str) or not (style == "model" or style.startswith("rule")):
            raise ValueError(f"{where}: 'reward_model.style' is {style!r}; use 'rule' or 'model'")
        if style != "model" and truth is None:
            raise ValueError(f"{where}: 'reward_model.ground_truth' is missing; a rule compares with it")
