"""Options, commands and choices that do not exist: the error names the one that was meant."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches

from shardwise.errors import did_you_mean

VALUES = "value_names"  # default of a parser with `--set`: a function that lists the names which that takes


class Parser(argparse.ArgumentParser):
    """Names the choice that was meant; so do the parsers of its sub-commands."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}.{meant}" if meant else error.message) from None


def check_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Leave with a message if an option is none of the sub-command's.

    This comes before parsing, which would first ask for a required option that is there but misspelt.

    Args:
        argv: without the name of the program.
    """
    for i, word in enumerate(argv):
        if word == "--":
            return
        commands = subcommands(parser)
        if word in commands:
            parser = commands[word]
        elif word.startswith("--") or (word.startswith("-") and word[1:2].isalpha()):
            name, equals, value = word.partition("=")
            known = parser._option_string_actions
            if name not in known and not (name.startswith("--") and any(option.startswith(name) for option in known)):
                if not equals and i + 1 < len(argv) and not argv[i + 1].startswith("-"):
                    value = argv[i + 1]
                parser.error(f"there is no option {name}.{_meant(parser, name, value)}")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of its sub-commands by name; none if it has none."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _meant(parser: argparse.ArgumentParser, name: str, value: str) -> str:
    texts = dict(_texts(parser, value))
    close = get_close_matches(name.lstrip("-").replace("_", "-"), texts, n=1)
    if close:
        return f" Did you mean {texts[close[0]]}?"
    return f" Fix: use one of {', '.join(option for option in parser._option_string_actions if option[1] == '-')}."


def _texts(parser: argparse.ArgumentParser, value: str) -> Iterator[tuple[str, str]]:
    """What is compared with the mistake, and what to write instead. An option comes after a value of its name."""
    names: Callable[[], Sequence[str]] = parser.get_default(VALUES) or list
    for name in names():
        yield name.replace("_", "-"), f"--set {name}={value or '…'}"
    for option, action in parser._option_string_actions.items():
        if option.startswith("--"):
            takes_value = action.nargs != 0
            yield option[2:], f"{option} {value}".rstrip() if takes_value else option
