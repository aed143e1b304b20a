"""A manifest that says something impossible is a CheckpointError, whatever it says; never another error."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise._layout import Box
from shardwise.checkpoint import load, read_manifest
from shardwise.checkpoint.manifest import Chunk, Manifest, StoredTensor, as_bytes, parse, sealed
from shardwise.errors import CheckpointError
from tests.strategies import laws

SOUND = Manifest(
    step=3,
    world_size=2,
    tensors={
        "w": StoredTensor(
            torch.float32,
            (5, 3),
            (
                Chunk("rank-0000.safetensors", "w[0:3, 0:3]", Box((0, 0), (3, 3)), (1,)),
                Chunk("rank-0001.safetensors", "w[3:5, 0:3]", Box((3, 0), (2, 3)), (0xFFFFFFFF,)),
            ),
        ),
        "scalar": StoredTensor(torch.bool, (), (Chunk("rank-0000.safetensors", "scalar", Box((), ()), (0,)),)),
        "nothing": StoredTensor(torch.int64, (0, 4), ()),
    },
    values={"epoch": 3, "nested": [None, {"a": [1.5]}]},
    metadata={"é": "\x00 <script>"},
    versions={"shardwise": "0.1.0", "torch": "2.13.0"},
    not_finite=("w",),
)


def content() -> Any:
    """The parsed JSON of a sound manifest, to be changed."""
    return {key: value for key, value in json.loads(as_bytes(SOUND)).items() if key != "sha256"}


def resealed(said: Any) -> bytes:
    return sealed(json.dumps(said).encode()[1:])


def test_what_is_written_is_read_back() -> None:
    assert parse(as_bytes(SOUND)) == SOUND
    assert parse(resealed(content())) == SOUND


def test_a_manifest_of_the_first_version_is_read() -> None:
    said = content() | {"version": 1}
    del said["not_finite"]
    assert parse(resealed(said)) == replace(SOUND, not_finite=())


def change(*path: Any, to: Any) -> Callable[[Any], None]:
    """Put `to` where `path` leads."""

    def apply(said: Any) -> None:
        for step in path[:-1]:
            said = said[step]
        if to is KeyError:
            del said[path[-1]]
        elif isinstance(said, list) and path[-1] == "+":
            said.append(to)
        else:
            said[path[-1]] = to

    return apply


W = ("tensors", "w")
CHUNK = (*W, "chunks", 0)
PIECE = {"file": "rank-0000.safetensors", "key": "x", "offsets": [0, 0], "sizes": [1, 1], "crc32": 0}

HOSTILE = {
    "not finite, but not there": (change("not_finite", to=["v"]), "not_finite: expected names of tensors, got 'v'"),
    "a number that is not finite": (change("not_finite", to=[[1]]), "not_finite: expected names of tensors, got [1]"),
    "the first version with a field of the second": (change("version", to=1), "has an unknown field 'not_finite'"),
    "a future version": (change("version", to=3), "is version 3 of the format, and this shardwise reads"),
    "the version zero": (change("version", to=0), "is 'shardwise checkpoint' version 0, expected"),
    "a version that is true": (change("version", to=True), "is 'shardwise checkpoint' version True, expected"),
    "a version that is a string": (change("version", to="1"), "version '1', expected"),
    "another format": (change("format", to="other"), "is 'other' version 2, expected"),
    "a field missing": (change("step", to=KeyError), "lacks field 'step'"),
    "a field unknown": (change("extra", to=1), "has an unknown field 'extra'"),
    "a negative step": (change("step", to=-1), "step: expected an integer from 0 to"),
    "a step that is true": (change("step", to=True), "step must be of type int, got True"),
    "a step that is a fraction": (change("step", to=1.5), "step must be of type int, got 1.5"),
    "a step too large": (change("step", to=2**63), "step: expected an integer from 0 to"),
    "no ranks": (change("world_size", to=0), "world_size: expected an integer from 1 to"),
    "tensors that are a list": (change("tensors", to=[]), "tensors must be of type dict, got []"),
    "a tensor that is a list": (change(*W, to=[]), "tensor 'w': expected an object, got []"),
    "a name that is not Unicode": (change("tensors", "\ud800", to={}), "a name must be valid Unicode"),
    "a name of two kinds": (change("values", "w", to=1), "'w' is both a tensor and a value"),
    "an unknown dtype": (change(*W, "dtype", to="float31"), "tensor 'w': unknown dtype 'float31'"),
    "a dtype that is a number": (change(*W, "dtype", to=3), "dtype must be of type str"),
    "a negative size": (change(*W, "shape", to=[-5, 3]), "tensor 'w': shape: expected an integer from 0"),
    "a size of 2^63": (change(*W, "shape", to=[2**63, 3]), "tensor 'w': shape: expected an integer from 0"),
    "sizes that overflow": (change(*W, "shape", to=[2**40, 2**40]), "is too large to exist"),
    "sizes that overflow beside 0": (change(*W, "shape", to=[2**40, 2**40, 0]), "is too large to exist"),
    "too many dims": (change(*W, "shape", to=[1] * 65), "65 dims are too many"),
    "a larger shape": (change(*W, "shape", to=[6, 3]), "tensor 'w': its chunks hold 15 of 18 elements"),
    "a smaller shape": (change(*W, "shape", to=[4, 3]), "(rank-0001.safetensors, 'w[3:5, 0:3]') is out of range"),
    "another number of dims": (change(*W, "shape", to=[15]), "tensor 'w': Box"),
    "no chunks": (change(*W, "chunks", to=[]), "tensor 'w': its chunks hold 0 of 15 elements"),
    "a gap beside an overlap": (change(*CHUNK, "offsets", to=[1, 0]), "tensor 'w': Boxes leave a gap: "),
    "an element twice": (change(*W, "chunks", "+", to=PIECE), "tensor 'w': Boxes overlap: "),
    "a negative offset": (change(*CHUNK, "offsets", to=[-1, 0]), "chunk: offsets: expected an integer from 0"),
    "an empty chunk": (change(*CHUNK, "sizes", to=[0, 3]), "'w[0:3, 0:3]' is empty"),
    "boxes of one dim": (change(*CHUNK, "sizes", to=[9]), "tensor 'w': Box offsets (0, 0), sizes (9,)"),
    "a crc32 of 33 bits": (change(*CHUNK, "crc32", to=2**32), "crc32 has more than 32 bits"),
    "a list of one crc32": (change(*CHUNK, "crc32", to=[1]), "chunk: crc32: 1 numbers do not fit 36 bytes"),
    "no crc32": (change(*CHUNK, "crc32", to=[]), "chunk: crc32: 0 numbers do not fit 36 bytes"),
    "a crc32 too many": (change(*CHUNK, "crc32", to=[1, 2]), "chunk: crc32: 2 numbers do not fit 36 bytes"),
    "a negative crc32": (change(*CHUNK, "crc32", to=-1), "crc32: expected an integer from 0"),
    "one key twice": (change("tensors", "scalar", "chunks", 0, "key", to="w[0:3, 0:3]"), "2 chunks have the key"),
    "a reserved key": (change(*CHUNK, "key", to="__metadata__"), "__metadata__ cannot be the key"),
    "a key that is not Unicode": (change(*CHUNK, "key", to="\udc00"), "a key must be valid Unicode"),
    "a rank that was not there": (change(*CHUNK, "file", to="rank-0002.safetensors"), "is of no rank of the 2"),
} | {
    f"the file {file!r}": (change(*CHUNK, "file", to=file), f"{file!r} is not the name of a file of a checkpoint")
    for file in (
        *("../step-00000002/rank-0000.safetensors", "/etc/passwd", "./rank-0000.safetensors", "", "."),
        *("rank-0000.safetensors\n", "rank-0000.safetensors\0", "rank-00000.safetensors", "rank-٠٠٠٠.safetensors"),
        *("RANK-0000.safetensors", "manifest.json", "rank-9999999999.safetensors"),
    )
}


@pytest.mark.parametrize(("apply", "text"), HOSTILE.values(), ids=list(HOSTILE))
def test_a_manifest_that_says_what_cannot_be_is_refused(
    tmp_path: Path, apply: Callable[[Any], None], text: str
) -> None:
    said = content()
    apply(said)
    (tmp_path / "manifest.json").write_bytes(resealed(said))
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/manifest.json: ")
    assert text in str(caught.value)


NOT_JSON = {
    b'"step":1,"step":2}': "the key 'step' is there twice",
    b'"sha256":"0"}': "the key 'sha256' is there twice",
    b'"step":NaN}': "NaN is not JSON",
    b'"step":-Infinity}': "-Infinity is not JSON",
    b'"values":{"lr":1e999}}': "the number 1e999 is out of range",
} | dict.fromkeys(
    [
        *(b'"step":1' + b"0" * 5000 + b"}", b'"step":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        *(b'"step":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", b'"step":"\xff\xfe"}'),
        *(b'"step":1}{}', b'"step":1', b""),
    ],
    "is not valid JSON",
)


def test_what_is_not_json_is_refused() -> None:
    for rest, text in NOT_JSON.items():
        with pytest.raises(CheckpointError, match=text):
            parse(sealed(rest))


def test_what_does_not_begin_with_its_checksum_is_refused() -> None:
    sound = as_bytes(SOUND)
    for data in (b"", b"{}", b"\x80\x04K\x01.", sound[1:], b" " + sound, sound[80:]):
        with pytest.raises(CheckpointError, match="does not begin with its checksum"):
            parse(data)


def test_a_manifest_of_a_terabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="has 1,099,511,627,776 bytes, more than the 268,435,456 allowed"):
        read_manifest(tmp_path)


def test_a_tensor_that_its_file_cannot_hold_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    said = content()
    huge = {"offsets": [0, 0], "sizes": [2**30, 2**20]}
    said["tensors"] = {"w": {"dtype": "int8", "shape": [2**30, 2**20], "chunks": [PIECE | huge]}}
    (tmp_path / "manifest.json").write_bytes(resealed(said))
    (tmp_path / "rank-0000.safetensors").write_bytes(b"small")
    with pytest.raises(CheckpointError, match=r"has 5 bytes, the manifest says 1,125,899,906,842,"):
        load(tmp_path, {"w": torch.zeros(1, dtype=torch.int8).expand(2**30, 2**20)})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["w", "float32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(said: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with every key in it."""
    keys = list(said) if isinstance(said, dict) else range(len(said)) if isinstance(said, list) else []
    return [(said, key) for key in keys] + [place for key in keys for place in places(said[key])]


def test_what_could_not_be_read_back_is_not_written() -> None:
    full = (Chunk("rank-0000.safetensors", "x", Box((), ()), (0,)),)
    scalar = StoredTensor(torch.bool, (), full)
    with pytest.raises(CheckpointError, match="2 chunks have the key 'x'"):
        as_bytes(replace(SOUND, tensors={"a": scalar, "b": scalar}, not_finite=()))


@laws
@given(st.binary(max_size=200))
def test_any_bytes_give_a_valid_manifest_or_a_checkpoint_error(rest: bytes) -> None:
    for data in (rest, sealed(rest)):
        with pytest.raises(CheckpointError):
            parse(data)
