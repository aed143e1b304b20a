"""PydocTopics: what `help("TOPIC")` shows, the text of a part of the Python manual, for a language model.

It comes from the standard library of the running interpreter (`pydoc_data.topics`), so nothing is bundled or
downloaded, and another version of Python is another data set: `fingerprint` distinguishes them. Of CPython 3.11 it
is 375 KB of English with some code.

Topics repeat each other: the manual's page on compound statements is one topic, and each statement is another.
Topics that share a paragraph of `MIN_SHARED` characters or more are one family, and a family is in one split: the
MD5 of the name of its longest topic decides which. If topics were split one by one, one in six of the held-out runs
of 20 words would be in the training text. Within a family, a paragraph that a longer topic has already is left out.
"""

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from shardwise.demos.data.errors import DataError

MIN_SHARED = 100  # characters of a paragraph, without repeated spaces; "See also:" says nothing about its topic
ONE_IN = 8  # families that are for testing; as many are for choosing hyperparameters


@dataclass(frozen=True, eq=False)
class PydocTopics:
    """Three texts as UTF-8: for training, validation and test.

    Each is topics one after the other, an empty line between paragraphs, families in the order of their names.
    """

    train: bytes
    validation: bytes
    test: bytes
    num_topics: int
    num_families: int
    python: str
    """The version of the interpreter whose library it is."""
    fingerprint: str
    """SHA-256 of the three texts, in hex."""

    def __repr__(self) -> str:
        return (
            f"PydocTopics({len(self.train):,} bytes to learn from, {len(self.validation):,} to choose with, "
            f"{len(self.test):,} held out, of {self.num_topics} topics in {self.num_families} families, "
            f"Python {self.python}, {self.fingerprint[:12]})"
        )


def load_pydoc_topics(topics: Mapping[str, str] | None = None) -> PydocTopics:
    """The text of the running interpreter, or of other `topics`.

    Raises:
        DataError: this interpreter comes without its documentation.
    """
    topics = _of_this_interpreter() if topics is None else topics
    found = families(topics)
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for family in sorted(found, key=lambda family: family[0]):
        parts[part_of(family[0])] += _documents(topics, family)
    texts = {part: "\n\n".join(documents).encode() for part, documents in parts.items()}
    return PydocTopics(
        **texts,
        num_topics=len(topics),
        num_families=len(found),
        python=platform.python_version(),
        fingerprint=hashlib.sha256(b"\0".join(texts.values())).hexdigest(),
    )


def part_of(name: str) -> str:
    """The split of the family whose longest topic is `name`: "train", "validation" or "test"."""
    number = int(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest(), 16) % ONE_IN
    return ("test", "validation")[number] if number < 2 else "train"


def families(topics: Mapping[str, str]) -> list[list[str]]:
    """The names of topics that share text, directly or through others; the longest first, then by name."""
    family_of = {name: [name] for name in topics}
    first: dict[str, str] = {}
    for name, text in topics.items():
        for paragraph in map(_words, _paragraphs(text)):
            mine, other = family_of[name], family_of[first.setdefault(paragraph, name)]
            if len(paragraph) >= MIN_SHARED and mine is not other:
                mine += other
                family_of.update(dict.fromkeys(other, mine))
    different = {id(family): family for family in family_of.values()}
    return [sorted(family, key=lambda name: (-len(topics[name]), name)) for family in different.values()]


def _documents(topics: Mapping[str, str], family: Sequence[str]) -> Iterator[str]:
    """The text of each topic, less the paragraphs of those before it."""
    seen: set[str] = set()
    for name in family:
        paragraphs = [paragraph for paragraph in _paragraphs(topics[name]) if _words(paragraph) not in seen]
        seen.update(map(_words, paragraphs))
        if paragraphs:
            yield "\n\n".join(paragraphs)


def _paragraphs(text: str) -> list[str]:
    """What empty lines separate."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", text.strip("\n")) if paragraph.strip()]


def _words(paragraph: str) -> str:
    """Without what depends on how far it is indented: the same text has other lines in another topic."""
    return " ".join(paragraph.split())


def _of_this_interpreter() -> Mapping[str, str]:
    try:
        topics: Mapping[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError(
            f"this Python {platform.python_version()} comes without pydoc_data, the text of its help pages. "
            f"Fix: install the full standard library; some distributions have it in a package of its own."
        ) from error
    return topics
