"""Prompts and reference answers, from the hub or from a file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_ssd.cli.prompts import read_objects


@dataclass(frozen=True)
class Source:
    """
    Where the prompts of a dataset are.

    Args:
        prompt_fields (`tuple[str, ...]`): Columns that make up the prompt, with an empty line between them.
        hub_id, config, split (`str`, *optional*): On the hub.
        reference_fields (`tuple[str, ...]`): Columns that the metric compares an answer with.
        metric (`str`, *optional*): A folder of `examples/metrics`.
    """

    prompt_fields: tuple[str, ...]
    hub_id: str | None = None
    config: str | None = None
    split: str = "test"
    reference_fields: tuple[str, ...] = ()
    metric: str | None = None


@dataclass(frozen=True)
class Sample:
    """
    Args:
        prompt (`str`): Without the chat template.
        reference (`str` or `dict[str, str]`, *optional*): What the metric compares the answer with.
    """

    prompt: str
    reference: str | dict[str, str] | None


@dataclass
class Batch:
    """
    The prompts of one generate() call.

    Args:
        dataset (`str`): Name of the dataset.
        index (`int`): Which batch of the dataset.
        prompts (`list[str]`): One for each row.
        methods (`list[str]`): Which methods have yet to answer them.
    """

    dataset: str
    index: int
    prompts: list[str]
    methods: list[str]


# The four sets of the paper
SOURCES = {
    "humaneval": Source(
        ("prompt",), "openai/openai_humaneval", None, "test", ("prompt", "test", "entry_point"), "pass_at_1"
    ),
    "gsm8k": Source(("question",), "openai/gsm8k", "main", "test", ("answer",), "gsm8k_exact_match"),
    "alpaca": Source(("instruction", "input"), "tatsu-lab/alpaca", None, "train"),
    "ultrafeedback": Source(("prompt",), "HuggingFaceH4/ultrafeedback_binarized", None, "test_prefs"),
}
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def check_file(given: str) -> bool:
    """
    Returns whether this is a file of prompts. What ends as one or exists is never looked for on the hub.

    Raises:
        `ValueError`: there is no such file, or it cannot be read.
    """
    path = Path(given)
    if path.suffix not in READERS and not path.exists():
        return False
    if not path.is_file():
        raise ValueError(f"There is no file {given!r}.")
    if path.suffix not in READERS:
        raise ValueError(f"{given!r} does not end in {', '.join(READERS)}.")
    return True


def find_source(given: str, prompt_field: str) -> tuple[str, Source, str | None]:
    """
    Args:
        given (`str`): A name, a file, or `name=file` for a copy of a named dataset.
        prompt_field (`str`): Column of the prompts in a file.

    Returns:
        `tuple`: The name of the dataset, where its prompts are, and the file, if it is one.

    Raises:
        `ValueError`: it is neither.
    """
    name, is_copy, path = given.partition("=")
    if name in SOURCES:
        source, path = SOURCES[name], path if is_copy else None
    else:
        name, source, path = Path(given).stem, Source((prompt_field,)), given
    if path is not None and not check_file(path):
        raise ValueError(f"{path!r} is none of {', '.join(SOURCES)}, and no file that ends in {', '.join(READERS)}.")
    return name, source, path


def load_samples(given: str, prompt_field: str, num_samples: int, fits: Callable[[str], bool]) -> list[Sample]:
    """
    Returns the first prompts of a dataset that fit.

    Args:
        given, prompt_field (`str`): See [`find_source`].
        num_samples (`int`): How many, at most.
        fits (`Callable`): Tells whether the target has room for a prompt and the answer.

    Raises:
        `ValueError`: the dataset cannot be read, or has no such prompts.
    """
    name, source, path = find_source(given, prompt_field)
    rows = _load_rows(name, source, path)
    missing = [field for field in source.prompt_fields if field not in rows.column_names]
    if missing:
        hint = " Choose with --prompt-field." if source.hub_id is None else ""
        raise ValueError(f"{given} has no column {missing[0]!r}, but {', '.join(rows.column_names)}.{hint}")
    has_references = source.reference_fields and set(source.reference_fields) <= set(rows.column_names)
    samples = []
    for row in rows:
        if any(isinstance(row[field], (list, dict)) for field in source.prompt_fields):
            raise ValueError(f"{given} has prompts that are no text; choose another column with --prompt-field.")
        prompt = "\n\n".join(str(row[field]) for field in source.prompt_fields if row[field])
        if prompt and fits(prompt):
            references = {field: row[field] for field in source.reference_fields} if has_references else {}
            samples.append(Sample(prompt, references if len(references) > 1 else next(iter(references.values()), None)))
        if len(samples) == num_samples:
            break
    if not samples:
        raise ValueError(f"{given} has no prompt that leaves room for the answer; lower --max-new-tokens.")
    return samples


def _load_rows(name: str, source: Source, path: str | None):
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetsError

    if path is not None:
        try:
            if READERS[Path(path).suffix] == "json":
                return Dataset.from_list(read_objects(path))
            return load_dataset(READERS[Path(path).suffix], data_files=path, split="train")
        except Exception as error:  # whatever the reader of this format raises
            raise ValueError(f"{path} cannot be read as {Path(path).suffix[1:]}: {_sentence(error)}.") from error
    try:
        return load_dataset(source.hub_id, source.config, split=source.split)
    except (OSError, DatasetsError) as error:
        raise ValueError(
            f"{source.hub_id} could not be loaded from the hub ({_sentence(error)}); where there is no network, pass a "
            f"copy of it as a local file: --dataset {name}=FILE."
        ) from error


def _sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
