"""Frames between processes: whatever goes in comes out, bit for bit, and what is no frame is refused."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from trimtab.engines.remote import wire
from trimtab.types import Completion, Problem, Prompt, Sampling

patient = settings(deadline=None)  # a socket and a thread for each example
INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=True)
TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)  # lone halves of surrogate pairs included
ROUTES = st.none() | arrays_of.arrays(
    np.int16, st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(1, 3)), fill=st.nothing()
)
JSON = st.recursive(st.none() | st.booleans() | INTS | st.floats(allow_nan=False) | TEXT, st.lists, max_leaves=8)


def through(head: Any, arrays: wire.Arrays) -> wire.Frame:
    """Over a real socket, from a thread: frames are larger than its buffer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=wire.send, args=(ours, head, arrays))
        sender.start()
        frame = wire.receive(theirs)
        sender.join()
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)  # nothing of the frame is left
    return frame


def identical(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@patient
@given(
    st.dictionaries(TEXT, JSON, max_size=3),
    st.dictionaries(
        TEXT,
        arrays_of.arrays(
            st.sampled_from([np.int64, np.int16, np.float32]), arrays_of.array_shapes(min_side=0), fill=st.nothing()
        ),
        max_size=3,
    ),
)
def test_a_frame_arrives_as_it_was_sent(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    frame = through(head, arrays)
    assert frame.head == head
    assert list(frame.arrays) == list(arrays)
    for name, array in arrays.items():
        assert identical(frame.arrays[name], array)
        assert frame.arrays[name].flags.writeable
        assert frame.arrays[name].flags.aligned


def test_large_and_strided_arrays() -> None:
    big = np.arange(3_000_001, dtype=np.int64)[::-1]
    square = np.arange(12, dtype=np.float32).reshape(3, 4).T
    frame = through({}, {"big": big, "square": square})
    assert identical(frame.arrays["big"], np.ascontiguousarray(big))
    assert identical(frame.arrays["square"], np.ascontiguousarray(square))


def test_frames_arrive_in_order_and_an_open_file_with_its_own() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    with ours, theirs:
        wire.send(ours, {"n": 1})
        wire.send(ours, {"n": 2}, {"x": np.ones(3, np.float32)}, [reader])
        wire.send(ours, {"n": 3})
        os.close(reader)
        frames = [wire.receive(theirs) for _ in range(3)]
    assert [frame.head["n"] for frame in frames] == [1, 2, 3]
    assert [len(frame.files) for frame in frames] == [0, 1, 0]
    [copy] = frames[1].files
    os.write(writer, b"through")
    assert os.read(copy, 7) == b"through"
    assert not os.get_inheritable(copy)
    os.close(copy)
    os.close(writer)


@pytest.mark.parametrize("cut", [0, 7, wire.START.size, wire.START.size + 3, -1])
def test_a_connection_that_ends_early_is_an_error(cut: int) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        wire.send(ours, {"n": 1}, {"x": np.ones(3, np.float32)})
        whole = theirs.recv(10_000)
        ours.close()
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(whole[:cut])
        ours.close()
        with pytest.raises(ConnectionError):
            wire.receive(theirs)


def test_what_is_no_frame_is_refused() -> None:
    for noise in (b"HTTP/1.1 200 OK\r\n\r\n" * 4, wire.START.pack(wire.MAGIC, 2, 0)[::-1]):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(noise)
            with pytest.raises(ConnectionError, match="not a frame"):
                wire.receive(theirs)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(ours, {}, {"x": np.array(["pickled"], dtype=object)[:0].astype("U1")})
        with pytest.raises(ConnectionError, match="'x'"):
            wire.receive(theirs)


@patient
@given(st.lists(st.tuples(TEXT, TEXT, st.lists(INTS, max_size=5)), max_size=4))
def test_prompts_arrive_without_their_answers(drawn: list[tuple[str, str, list[int]]]) -> None:
    prompts = [
        Prompt(Problem(name, "question", "answer", {"any": object()}), text, np.array(ids, dtype=np.int64))
        for name, text, ids in drawn
    ]
    names, arrays = wire.pack_prompts(prompts)
    frame = through({"prompts": names}, arrays)
    found = wire.unpack_prompts(frame.head["prompts"], frame.arrays)
    assert [(one.problem, one.text) for one in found] == [(Problem(name, "", ""), text) for name, text, _ in drawn]
    assert all(identical(one.ids, asked.ids) for one, asked in zip(found, prompts, strict=True))


@patient
@given(
    st.builds(
        Sampling,
        temperature=st.floats(0, 5),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 100),
        max_tokens=st.integers(1, 10_000),
        stop=st.lists(TEXT, max_size=3).map(tuple),
        stop_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
        ignore_stop=st.booleans(),
        logprobs=st.sampled_from(["processed", "raw"]),
    )
)
def test_the_sampling_contract_arrives_to_the_last_bit(sampling: Sampling) -> None:
    frame = through(wire.pack_sampling(sampling), {})
    assert wire.unpack_sampling(frame.head) == sampling


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    n = draw(st.integers(0, 5))

    def numbers(dtype: Any, elements: st.SearchStrategy[Any]) -> np.ndarray:
        return np.array(draw(st.lists(elements, min_size=n, max_size=n)), dtype=dtype)

    return Completion(
        response_ids=numbers(np.int64, INTS),
        logp_behavior=numbers(np.float32, FLOATS),
        policy_version=numbers(np.int64, INTS),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(TEXT),
        entropy=numbers(np.float32, FLOATS) if draw(st.booleans()) else None,
        kept=tuple(np.array(draw(st.lists(INTS, max_size=4)), np.int64) for _ in range(n))
        if draw(st.booleans())
        else None,
        routes=draw(ROUTES),
    )


@patient
@given(st.lists(st.lists(completions(), max_size=3), max_size=3))
def test_completions_arrive_bit_for_bit(groups: list[list[Completion]]) -> None:
    head, arrays = wire.pack_completions(groups)
    frame = through({"groups": head}, arrays)
    found = wire.unpack_completions(frame.head["groups"], frame.arrays)
    assert [len(group) for group in found] == [len(group) for group in groups]
    for group, expected in zip(found, groups, strict=True):
        for one, sent in zip(group, expected, strict=True):
            same_completion(one, sent)


def same_completion(one: Completion, sent: Completion) -> None:
    for field in fields(Completion):
        value, expected = getattr(one, field.name), getattr(sent, field.name)
        if isinstance(expected, np.ndarray):
            assert identical(value, expected), field.name
        elif isinstance(expected, tuple):
            assert len(value) == len(expected)
            assert all(identical(a, b) for a, b in zip(value, expected, strict=True))
        else:
            assert value == expected
