"""Prompts of a command: the user's, snippets of Python, or random tokens."""

import json

import torch

SNIPPETS = [
    "class Config:\n    def __init__(self, name):\n",
    'def copy_file(source, target):\n    """Copy a file."""\n',
    'def merge(left, right):\n    """Merge two sorted lists."""\n',
    "for i in range(10):\n",
    "if __name__ == ",
    'async def connect(host, port):\n    """Open a connection."""\n',
    'class Timer:\n    """Measure time."""\n\n    def start(self):\n',
    'def is_valid(name):\n    """Return True if the name is valid."""\n',
]


def read_objects(path) -> list[dict]:
    """
    Reads a JSON list of objects, or an object a line. pyarrow is not used, because a line such as `null{` crashes it.

    Raises:
        `ValueError`: the file does not hold objects.
    """
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it holds no objects")
    return rows


def prompts_from(path, field: str = "prompt") -> list[str]:
    """
    Returns the prompts of a file of JSON objects.

    Args:
        path (`str` or `os.PathLike`): The file.
        field (`str`, *optional*, defaults to `"prompt"`): The key of the prompt in each object.

    Raises:
        `ValueError`: the file cannot be read, or has no prompts.
    """
    try:
        rows = read_objects(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON objects, one a line: {error}.") from error
    prompts = [row[field] for row in rows if isinstance(row.get(field), str) and row[field]]
    if not prompts:
        raise ValueError(f"{path} has no prompts in a field {field!r}; its first object has {', '.join(rows[0])}.")
    return prompts


def as_messages(prompts: list[str], tokenizer) -> list[str]:
    """Returns prompts as a user's messages to a model with a chat template; those of other models stay as they are."""
    if tokenizer.chat_template is None:
        return prompts
    options = {"add_generation_prompt": True, "tokenize": False}
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}], **options) for text in prompts]


def batches(
    prompts: list[str], tokenizer, size: int, device: torch.device, add_special_tokens: bool = True
) -> list[dict]:
    """
    Returns prompts as inputs of generate(). The last batch is filled up with the first prompts.

    Args:
        prompts (`list[str]`): The texts.
        tokenizer (`PreTrainedTokenizerBase`): A tokenizer that pads on the left.
        size (`int`): Prompts in each batch.
        device (`torch.device`): The target's device.
        add_special_tokens (`bool`, *optional*, defaults to `True`): Whether the tokenizer adds special tokens. A chat
            template has added them already.
    """
    options = {"return_tensors": "pt", "return_token_type_ids": False, "add_special_tokens": add_special_tokens}
    found = []
    for start in range(0, len(prompts), size):
        batch = [prompts[i % len(prompts)] for i in range(start, start + size)]
        found.append(tokenizer(batch, padding=size > 1, **options).to(device))
    return found


def random_batches(model, size: int, length: int) -> list[dict]:
    """Returns random tokens in the place of prompts, for a model that has no tokenizer."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(1, vocab_size, (4, size, length), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(model.device)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]
