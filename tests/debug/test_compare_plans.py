"""`explain_redistribute` shows the plan and its alternatives."""

from shardwise import Mesh, Partial, Replicate, Shard
from shardwise._layout import Layout
from shardwise.debug import explain_redistribute


def test_sequences_are_lines_of_the_text() -> None:
    mesh = Mesh((2, 4), names=("dp", "tp"))
    src, dst = (Layout(mesh, p, (4096, 1024)) for p in ([Shard(0), Partial()], [Replicate(), Shard(0)]))
    found = explain_redistribute(src, dst, itemsize=2)
    assert len(found.sequences) > 1
    assert found == explain_redistribute(src, dst, itemsize=2) != explain_redistribute(src, dst)
    _, _, *lines = str(found).splitlines()
    for (cost, busiest, total, steps), line in zip(found.sequences, lines, strict=True):
        assert line.split(maxsplit=3) == [f"{cost:.2f}x", f"{busiest:,}", f"{total:,}", ", ".join(steps)]


def test_a_comparison_of_nothing_says_so() -> None:
    layout = Layout(Mesh((2,)), [Shard(0)], (5, 2))
    found = explain_redistribute(layout, layout)
    assert found.sequences == ((1.0, 0, 0, ()),)
    assert "nothing is sent" in str(found)


def test_of_many_sequences_twelve_are_shown_and_all_are_there() -> None:
    mesh = Mesh((2, 2, 2), names=("a", "b", "c"))
    partial = Layout(mesh, [Partial(), Partial(), Shard(2)], (256, 256, 256))
    found = explain_redistribute(partial, partial.replace([Replicate(), Replicate(), Shard(1)]))
    more = len(found.sequences) - 12
    assert more > 0
    assert str(found).endswith(f"\nand {more} that cost more")
    assert len(str(found).splitlines()) == 2 + 12 + 1
