"""Prompts: questions of a chat, functions to write, code of this repository to change, texts of it to shorten."""

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HELD_OUT_EVERY = 10  # prompts of a kind
QUESTIONS = [
    "What is {}?",
    "Explain {} to a child.",
    "Why does {} matter?",
    "How does {} work? Answer in a few sentences.",
    "What should a beginner know about {}?",
    "Give me three tips about {}.",
    "Write a short paragraph about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a friendly e-mail to a colleague about {}.",
    "What is a common mistake with {}, and how can I avoid it?",
]
SUBJECTS = """
the water cycle; a balanced diet; learning a language; the solar system; photosynthesis; a good night's sleep; baking
bread; public transport; the stock market; climate change; playing the piano; time management; a healthy back; the human
heart; electric cars; writing a novel; team work; volcanoes; the internet; vaccination; growing tomatoes; planning a
holiday; chess; the French Revolution; renewable energy; job interviews; saving money; gravity; the moon; a neural
network; Python; a hash table; sorting a list; unit tests; version control; a web server; a database index; recursion;
encryption; the ocean; bees; coffee; running a marathon; yoga; photography; a museum visit; friendship; reading books;
board games; the weather; rainbows; earthquakes; dinosaurs; the Roman Empire; jazz; cooking pasta; a bicycle; trains;
the brain; memory; mathematics; prime numbers; probability; a contract; democracy; recycling; forests; rivers; elephants
""".replace("\n", " ").split(";")
FUNCTIONS = """
counts how often each word occurs in a text; merges two sorted lists; checks whether a string is a palindrome; reads a
CSV file into a list of dictionaries; computes the moving average of a list; finds the longest common prefix of some
strings; flattens a nested list; converts a number to a Roman numeral; groups words that are anagrams of each other;
multiplies two matrices; validates an e-mail address; removes duplicates from a list and keeps the order; finds all
prime numbers below n; parses a date like 2024-03-01; reverses the words of a sentence; computes the greatest common
divisor; retries a call up to three times; searches a sorted list by bisection; formats a number of bytes for people;
splits a list into chunks
""".replace("\n", " ").split(";")
CHANGES = [
    "Add a docstring to this function",
    "Add type hints to this function",
    "Rename the variables of this function, so that they are easier to read",
    "Add a comment to each step of this function",
    "Make this function check its arguments",
    "Make this function shorter",
]
SUMMARIES = [
    "Summarize the following text in one sentence.",
    "Summarize this text in your own words.",
    "What are the main points of this text?",
    "Explain this text in simpler words.",
]


def functions(lines: int = 14) -> list[str]:
    """Returns the functions of hf_ssd, without their docstrings, of up to so many lines each."""
    found = []
    for path in sorted((ROOT / "hf_ssd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                node.body = node.body[ast.get_docstring(node) is not None :]
                text = ast.unparse(node) if node.body else ""
                if 3 <= text.count("\n") < lines and max(map(len, text.split("\n"))) <= 120:
                    found.append(text)
    return found


def paragraphs(least: int = 250, most: int = 1000) -> list[str]:
    """Returns the paragraphs of the documents that have a length in this range, in letters, without links."""
    texts = [path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"```.*?```", "", text, flags=re.DOTALL)) for text in texts]
    found = [part.replace("\n", " ") for text in plain for part in text.split("\n\n")]
    return [part for part in found if least <= len(part) <= most and part[0].isalpha()]


def all_prompts() -> dict[str, list[list[str]]]:
    """Returns the prompts of each kind: a list for each subject, function, code or text."""
    codes, texts = functions(), paragraphs()
    return {
        "chat": [[question.format(subject.strip()) for question in QUESTIONS] for subject in SUBJECTS],
        "code": [[f"Write a Python function that {what.strip()}."] for what in FUNCTIONS],
        "edit": [[f"{CHANGES[i % len(CHANGES)]}:\n\n```python\n{code}\n```"] for i, code in enumerate(codes)],
        "summary": [[f"{how}\n\n{text}" for how in SUMMARIES] for text in texts],
    }


def to_learn_from() -> list[str]:
    """Returns the prompts that a draft learns from."""
    return [
        prompt
        for sources in all_prompts().values()
        for i, prompts in enumerate(sources)
        if i % HELD_OUT_EVERY
        for prompt in prompts
    ]


def held_out(count: int) -> dict[str, list[str]]:
    """Returns so many prompts of each kind, about subjects, codes and texts that no draft learns from."""
    found = {}
    for kind, sources in all_prompts().items():
        left = sources[::HELD_OUT_EVERY]
        found[kind] = [left[i % len(left)][(i + i // len(left)) % len(left[0])] for i in range(count)]
    return found


def main() -> None:
    """Writes prompts that are held out as JSON lines, which `hf-ssd check --prompts` reads."""
    for kind, prompts in held_out(8).items():
        for prompt in prompts:
            print(json.dumps({"kind": kind, "prompt": prompt}))


if __name__ == "__main__":
    main()
