"""`hf-ssd`: its commands, and how they end."""

import argparse
import sys

import hf_ssd

from . import bench, chat, check, serve

COMMANDS = {"check": check, "chat": chat, "bench": bench, "serve": serve}
REFUSED = 2  # the exit code of what cannot work, as argparse's


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-ssd", description=hf_ssd.__doc__)
    parser.add_argument("--version", action="version", version=f"hf-ssd {hf_ssd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        head, _, more = module.__doc__.partition("\n\n")
        form = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=head, description=head, epilog=more.strip(), formatter_class=form)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """
    Runs one command.

    Args:
        arguments (`list[str]`, *optional*): Words of the command line, by default this program's.

    Returns:
        `int`: The exit code: 2 if the models or arguments cannot work, otherwise the command's.
    """
    args = build_parser().parse_args(arguments)
    from transformers.utils import logging  # after the help and mistakes in words, which it would delay by seconds

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return args.run(args)
    except (ValueError, hf_ssd.DraftError) as error:
        print(f"hf-ssd {args.command}: {error}", file=sys.stderr)
        return REFUSED
