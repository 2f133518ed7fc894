"""The program `hf-ssd`: its commands, scripts of the folder examples among them, and their exit codes."""

import argparse
import importlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path

import hf_ssd

from .options import shared
from .pair import PACKAGE

COMMANDS = {  # copies of the first lines of their modules, whose import takes seconds
    "check": "Does this draft pay for this target? Looks at both, measures them, and says why.",
    "chat": "A chat in the terminal, answered by speculative speculative decoding as it is generated.",
    "bench": "How fast is it? Plain and assisted generation, speculative decoding in turn and SSD, side by side.",
    "serve": "An OpenAI endpoint whose model speculates, with figures at /metrics and a page at /.",
}
SCRIPTS = {  # file, and what it does
    "evaluate": ("evaluate_datasets.py", "How fast are the methods on real prompts, and are the answers as good?"),
    "train-draft": ("train_draft.py", "Make a draft for any causal model, which learns from the model's own text."),
    "gpu-report": ("gpu_report.py", "Everything about this machine's GPUs in one report."),
}
PLACES = (PACKAGE / "scripts", PACKAGE.parent / "examples")  # of scripts, installed and in a clone
REFUSED = 2  # the exit code for models or arguments that cannot work, as argparse's
INTERRUPTED = 130  # the exit code after Ctrl-C, as a shell's


def build_parser(loaded: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Returns the parser of the command line, in which only commands that are `loaded` have arguments and can run."""
    parser = argparse.ArgumentParser(prog="hf-ssd", description=hf_ssd.__doc__)
    parser.add_argument("--version", action="version", version=f"hf-ssd {hf_ssd.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, head in COMMANDS.items():
        form = argparse.RawDescriptionHelpFormatter
        parents = [shared()] if name in loaded else []
        command = commands.add_parser(name, help=head, description=head, formatter_class=form, parents=parents)
        if name in loaded:
            module = importlib.import_module(f".{name}", __package__)
            command.epilog = module.__doc__.partition("\n\n")[2].strip()
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    for name, (_, head) in SCRIPTS.items():  # their arguments are those of the scripts
        commands.add_parser(name, help=head, add_help=False)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command in these words, by default this program's, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may have characters that the terminal cannot show
    try:
        if arguments and arguments[0] in SCRIPTS:
            return run_script(arguments[0], arguments[1:])
        parser = build_parser(loaded=[word for word in arguments if word in COMMANDS][:1])
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help()
            return 0
        return run(args)
    except KeyboardInterrupt:
        return INTERRUPTED


def run(args: argparse.Namespace) -> int:
    """Runs a command with its arguments, and returns the exit code. Needs torch, which takes seconds to import."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():  # bars of loading and of downloads would be lines of a log there
        logging.disable_progress_bar()
    try:
        return args.run(args)
    except (ValueError, hf_ssd.DraftError) as error:
        print(f"hf-ssd {args.command}: {error}", file=sys.stderr)
        return REFUSED


def run_script(command: str, arguments: list[str]) -> int:
    """Runs a script with the words of a command line, as `python examples/SCRIPT` would, and returns the exit code."""
    file, _ = SCRIPTS[command]
    folder = next((place for place in PLACES if (place / file).is_file()), None)
    if folder is None:
        raise SystemExit(f"hf-ssd {command}: hf_ssd was installed without its scripts; install it from a clone.")
    words, paths = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [f"hf-ssd {command}", *arguments], [str(folder)]
    try:
        return importlib.import_module(Path(file).stem).main() or 0
    finally:
        sys.argv, sys.path[:] = words, paths
