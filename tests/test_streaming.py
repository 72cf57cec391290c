"""An answer as it comes: the pieces are the whole, and a stream that ends lets go."""

import inspect
import itertools

import pytest
from targets import mistaken_draft, table_target

from dflash_jax import SessionOptions, SpecSession, generate, generate_stream
from dflash_jax.text import TextCodec

CYCLE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]
PROMPT = [7, 3, 3, 0, 1]
TARGET = table_target(CYCLE)
DRAFT = mistaken_draft(TARGET, [2, 5, 6])
WORDS = ["the ", "end ", *"abcdefghij"]


class Tokenizer:
    """Tokens 9 and 10 are the halves of one character; token 0 is special."""

    def decode(self, ids, skip_special_tokens):
        whole = [WORDS[i].encode() for i in range(12)]
        whole[9], whole[10] = "é".encode()[:1], "é".encode()[1:]
        whole[0] = b"" if skip_special_tokens else b"<s>"
        return b"".join(whole[i] for i in ids).decode(errors="replace")


CODEC = TextCodec(Tokenizer())


def test_pieces_are_rounds():
    out = generate(TARGET, DRAFT, PROMPT, 14)
    stream = generate_stream(TARGET, DRAFT, PROMPT, 14)
    pieces = list(stream)
    assert [len(piece) for piece in pieces] == [1, *out.acceptance_lengths]
    assert [*itertools.chain(*pieces)] == out.token_ids == stream.result.token_ids
    assert stream.result.finish_reason == "length"
    assert list(stream) == []
    pairs = list(generate_stream(TARGET, DRAFT, PROMPT, 14, rounds=2))
    assert [len(piece) for piece in pairs[1:]] == [
        sum(out.acceptance_lengths[i : i + 2]) for i in range(0, out.rounds, 2)
    ]


@pytest.mark.parametrize("count", range(1, 13))
def test_text_joins_to_the_decoded_whole(count):
    stream = generate_stream(TARGET, DRAFT, PROMPT, count, text=CODEC)
    pieces = list(stream)
    assert "".join(pieces) == CODEC.decode(stream.result.token_ids)
    assert all(pieces)
    # Only what the answer itself leaves unfinished may come out as a replacement.
    assert "\ufffd" not in "".join(pieces[:-1])


def test_a_closed_stream_has_what_came_and_decodes_no_more():
    with generate_stream(TARGET, DRAFT, PROMPT, 14) as stream:
        came = [*next(stream), *next(stream)]
        assert stream.result.token_ids == came
    assert stream.result.token_ids == came
    assert stream.result.finish_reason == "open"
    assert next(stream, None) is None
    stream.close()
    assert stream._session is None


def test_a_round_that_fails_ends_the_stream(monkeypatch):
    stream = generate_stream(TARGET, DRAFT, PROMPT, 14)
    next(stream)

    def fail(*_):
        raise RuntimeError("lost the device")

    monkeypatch.setattr(SpecSession, "burst", fail)
    with pytest.raises(RuntimeError, match="lost the device"):
        next(stream)
    assert next(stream, None) is None
    with pytest.raises(ValueError, match="found a round that failed"):
        _ = stream.result


def test_what_does_not_fit_is_raised_at_once():
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        generate_stream(TARGET, DRAFT, [], 4)
    with pytest.raises(ValueError, match="rounds: expected an integer from 1"):
        generate_stream(TARGET, DRAFT, PROMPT, 4, rounds=0)
    with pytest.raises(ValueError, match="text: expected a TextCodec"):
        generate_stream(TARGET, DRAFT, PROMPT, 4, text="gpt2")


def test_the_typed_options_are_the_sessions():
    parameters = inspect.signature(SpecSession).parameters
    named = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert named == list(SessionOptions.__annotations__)
