"""Help topics fall into three texts, and none of the held-out one is in the others."""

import hashlib
import sys
from collections.abc import Mapping

import pytest

from shardwise.demos.data import DataError, PydocTopics, load_pydoc_topics
from shardwise.demos.data.pydoc_topics import families, part_of

LONG = (
    "This paragraph is long enough to tell that two topics which both have it are about the same thing, more or less."
)
OTHER = (
    "That paragraph is long enough to tell that two topics which both have it are about the other thing, by and large."
)


@pytest.fixture(scope="module")
def topics() -> PydocTopics:
    return load_pydoc_topics()


def runs(text: bytes, length: int) -> set[tuple[str, ...]]:
    words = text.decode().split()
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_no_run_of_twenty_words_of_the_held_out_text_is_in_the_other_texts(topics: PydocTopics) -> None:
    """Split topic by topic, one in six would be."""
    held_out = runs(topics.test, 20)
    assert len(held_out) > 4000
    assert not held_out & (runs(topics.train, 20) | runs(topics.validation, 20))


def test_the_parts_have_their_sizes_and_every_word_of_the_topics(topics: PydocTopics) -> None:
    total = len(topics.train) + len(topics.validation) + len(topics.test)
    assert total > 300_000
    assert len(topics.train) > 0.7 * total
    assert min(len(topics.validation), len(topics.test)) > 0.05 * total
    source: Mapping[str, str] = __import__("pydoc_data.topics").topics.topics
    words = {word for text in source.values() for word in text.split()}
    assert words == set((topics.train + b"\n" + topics.validation + b"\n" + topics.test).decode().split())


def test_the_text_is_named_by_version_and_digest(topics: PydocTopics) -> None:
    assert topics.fingerprint == load_pydoc_topics().fingerprint
    assert topics.fingerprint != load_pydoc_topics({"a": LONG}).fingerprint
    assert hashlib.sha256(topics.train + b"\0" + topics.validation + b"\0" + topics.test).hexdigest() == (
        topics.fingerprint
    )
    assert repr(topics).endswith(f"Python {sys.version.split()[0]}, {topics.fingerprint[:12]})")


def test_topics_that_share_a_long_paragraph_are_one_family_also_through_others() -> None:
    wrapped = LONG.replace(" which ", "\n   which ")
    found = families(
        {
            "first": f"A.\n\n{LONG}",
            "longest": f"B.\n\n{OTHER}\n \n   {wrapped}\n\nAnd more of it.",
            "alone": "See also:\n\nC.",
            "last": f"{OTHER}\n\nSee also:",
        }
    )
    assert sorted(found) == [["alone"], ["longest", "last", "first"]]


def test_a_family_gives_each_paragraph_once_and_a_topic_keeps_its_own_repetitions() -> None:
    data = load_pydoc_topics(
        {"binary": f"Head\n\n{LONG}\n\n  * one\n\n  * one\n\n{OTHER}\n", "unary": f"Foot\n\n{LONG}\n\n  * one"}
    )
    assert part_of("binary") == "test"
    assert data.test.decode() == f"Head\n\n{LONG}\n\n  * one\n\n  * one\n\n{OTHER}\n\nFoot"
    assert (data.train, data.validation) == (b"", b"")
    assert (data.num_topics, data.num_families) == (2, 1)


def test_the_longest_topic_of_a_family_decides_for_all_of_it() -> None:
    short, long = "strings", "compound"
    assert (part_of(short), part_of(long)) == ("test", "train")
    data = load_pydoc_topics({short: f"s\n\n{LONG}", long: f"{LONG}\n\nc\n\n{OTHER}"})
    assert data.test == b""
    assert data.train.endswith(b"s")


def test_a_python_without_its_documentation_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"comes without pydoc_data, the text of its help pages. Fix: install"):
        load_pydoc_topics()
