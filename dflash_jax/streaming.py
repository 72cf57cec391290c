"""An answer as it comes: token ids, or text, a round at a time.

for piece in generate_stream(target, draft, prompt, text=codec):
    print(piece, end="", flush=True)
"""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar, Unpack, overload

from dflash_jax.draft import DFlashDraft
from dflash_jax.options import rounds_of
from dflash_jax.results import Generation
from dflash_jax.session import SessionOptions, SpecSession
from dflash_jax.targets import AnyTarget
from dflash_jax.text import StreamDecoder, TextCodec

PieceT = TypeVar("PieceT", list[int], str)


class Stream(Generic[PieceT]):
    """An iterator over the pieces of one answer, made by `generate_stream`.

    Nothing is decoded ahead of the piece asked for. At the last piece, at `close` or where a `with`
    block ends, the caches are let go; what came until then stays in `result`.
    """

    def __init__(self, session: SpecSession, pieces: Iterator[PieceT]):
        self._session: SpecSession | None = session
        self._pieces = pieces
        self._result: Generation | None = None

    def __iter__(self) -> "Stream[PieceT]":
        return self

    def __next__(self) -> PieceT:
        if self._session is None:
            raise StopIteration
        try:
            return next(self._pieces)
        except StopIteration:
            self.close()
            raise
        except BaseException:
            # The round that failed may have taken the state's arrays with it.
            self._session = None
            raise

    def __enter__(self) -> "Stream[PieceT]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the stream; more calls do nothing."""
        if self._session is not None:
            self._result = self._session.results()[0]
            self._session = None
        self._pieces = iter(())

    @property
    def result(self) -> Generation:
        """What came so far, `finish_reason` "open" where more could come.

        ValueError after a round that failed.
        """
        if self._session is not None:
            return self._session.results()[0]
        if self._result is None:
            raise ValueError("stream: expected a result, found a round that failed")
        return self._result


@overload
def generate_stream(
    target: AnyTarget,
    draft: DFlashDraft | None,
    prompt: Sequence[int],
    max_new_tokens: int = 128,
    *,
    text: None = None,
    rounds: int = 1,
    **options: Unpack[SessionOptions],
) -> Stream[list[int]]: ...


@overload
def generate_stream(
    target: AnyTarget,
    draft: DFlashDraft | None,
    prompt: Sequence[int],
    max_new_tokens: int = 128,
    *,
    text: TextCodec,
    rounds: int = 1,
    **options: Unpack[SessionOptions],
) -> Stream[str]: ...


def generate_stream(
    target: AnyTarget,
    draft: DFlashDraft | None,
    prompt: Sequence[int],
    max_new_tokens: int = 128,
    *,
    text: TextCodec | None = None,
    rounds: int = 1,
    **options: Unpack[SessionOptions],
) -> Any:
    """As `generate` of one prompt, but its tokens come as they are accepted.

    The prompt is read before this returns, so what does not fit is raised here.

    Args:
      target, draft, prompt, max_new_tokens, **options: as in `generate`.
      text: a tokenizer, for pieces of text instead of token ids. Joined they are the decoded
        answer; characters spread over several tokens come whole, special tokens not at all.
      rounds: rounds a piece; fewer launches where pieces may be longer.

    >>> with generate_stream(target, draft, prompt, text=codec) as pieces:   # doctest: +SKIP
    ...     for piece in pieces: ...
    >>> pieces.result.mean_acceptance_length                                 # doctest: +SKIP
    """
    rounds = rounds_of(rounds, 1)
    if text is not None and not isinstance(text, TextCodec):
        raise ValueError(f"text: expected a TextCodec (load_target(...).text), found {text!r}")
    session = SpecSession(target, draft, **options)
    session.open([prompt], max_new_tokens)
    ids = (tokens[0] for tokens in session.stream(rounds))
    return Stream(session, ids) if text is None else Stream(session, _texts(ids, text))


def _texts(ids: Iterator[list[int]], codec: TextCodec) -> Iterator[str]:
    """The text of ids as it becomes certain; never an empty piece."""
    decoder = StreamDecoder(codec)
    for tokens in ids:
        if piece := decoder.push(tokens):
            yield piece
    if rest := decoder.flush():
        yield rest
