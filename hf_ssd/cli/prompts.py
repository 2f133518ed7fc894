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
    """Reads a JSON list of objects, or an object a line. On a line such as `null{` pyarrow would crash."""
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
    """Returns the prompts of a file of JSON objects, or raises `ValueError` if it cannot be read or has no prompts."""
    try:
        rows = read_objects(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON objects, one a line: {error}.") from error
    prompts = [row[field] for row in rows if isinstance(row.get(field), str) and row[field]]
    if not prompts:
        raise ValueError(f"{path} has no prompts in a field {field!r}; its first object has {', '.join(rows[0])}.")
    return prompts


def batches_for(model, tokenizer, prompts: list[str], size: int = 1, length: int = 16) -> list[dict]:
    """Returns prompts as inputs of generate(), `size` in each batch, for a model with a chat template as messages."""
    if tokenizer is None:  # `length` random tokens take the place of each prompt
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        tokens = torch.randint(1, vocab_size, (4, size, length), generator=torch.Generator().manual_seed(1))
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens.to(model.device)]
    is_chat = tokenizer.chat_template is not None  # the template adds special tokens already
    if is_chat:
        messages = [[{"role": "user", "content": text}] for text in prompts]
        prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    options = {"return_tensors": "pt", "return_token_type_ids": False, "add_special_tokens": not is_chat}
    batches = [[prompts[i % len(prompts)] for i in range(at, at + size)] for at in range(0, len(prompts), size)]
    return [tokenizer(batch, padding=size > 1, **options).to(model.device) for batch in batches]
