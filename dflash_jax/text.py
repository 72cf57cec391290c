"""Text to token ids and back: tokenizers, chat templates, and pieces for a stream.

Tokenizers come from a Hugging Face `tokenizer.json` or from a GGUF file's metadata (byte-level
BPE). `tokenizers` and `jinja2` are optional and imported on first use.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.extras import require
from dflash_jax.keys import read_json, reason_of, token_id

CONTROL, USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type` of special tokens and of whole words added beside the merges."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _splits(digits: str) -> str:
    return "|".join((CONTRACTIONS, WORDS, digits, REST))


PRE_TOKENIZERS: dict[str, tuple[str, str | None]] = {
    "gpt-2": ("plain", None),
    # Every digit stands alone: the digits are cut out first, as this family's own tokenizer.json
    # does, so that a run of spaces before a number is one piece.
    "smollm": ("digits", None),
    "llama-bpe": ("split", _splits(r"\p{N}{1,3}")),
    "qwen2": ("split", _splits(r"\p{N}")),
}
"""`tokenizer.ggml.pre` -> how text is cut before merging, with the published pattern."""


@dataclasses.dataclass(frozen=True)
class TextCodec:
    """A target's tokenizer and chat template.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      template: the chat template (Jinja), None where the model has none.
      special: the template's names of special tokens: {"bos_token": "<s>", ...}.
      source, template_source: files of the tokenizer and the template, which error texts name.

    What a tokenizer or a template refuses is a ValueError of one line.
    """

    tokenizer: Any
    template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source: str = ""
    template_source: str = ""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special tokens spelled out in it become their ids.

        A beginning-of-sequence token is put in front where the model's tokenizer does so.
        """
        return self._ids(text, add_special_tokens=True)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
        """The chat template's text for `messages` ({"role": ..., "content": ...} each).

        The prompt ends where the assistant begins, unless `add_generation_prompt=False`; other
        keyword arguments (`enable_thinking=False`, `tools=[...]`) reach the template as they are.
        ValueError where there is no template, or where it refuses the messages.
        """
        if self.template is None:
            raise ValueError("chat template: this target has none, pass plain text or token ids")
        require("jinja2", "gguf")
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        context = defaults | dict(self.special) | template_kwargs
        with _one_line("chat template", self.template_source):
            template = _compile(self.template)
            return template.render(messages=[dict(m) for m in messages], **context)

    @property
    def template_arguments(self) -> frozenset[str]:
        """Names that the chat template reads and does not set: what `render_chat` can pass."""
        if self.template is None:
            return frozenset()
        require("jinja2", "gguf")
        with _one_line("chat template", self.template_source):
            return _unset_names(self.template)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any
    ) -> list[int]:
        """Token ids of `render_chat`: the template alone puts special tokens in."""
        text = self.render_chat(messages, **template_kwargs)
        return self._ids(text, add_special_tokens=False)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in the middle of another: nothing is put in front."""
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = _unicode(text)
        with _one_line("tokenizer", self.source):
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 come out as U+FFFD."""
        with _one_line("tokenizer", self.source):
            ids = [int(i) for i in ids]
            return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """The id of exactly this token, None where the vocabulary lacks it."""
        return self.tokenizer.token_to_id(token)


class StreamDecoder:
    """Decodes ids that arrive in pieces; the pieces of text, joined, are the decoded whole.

    A character whose bytes are spread over several tokens is held back until it is complete.

    >>> stream = StreamDecoder(codec)                        # doctest: +SKIP
    >>> text = "".join(map(stream.push, rounds)) + stream.flush()   # doctest: +SKIP
    """

    def __init__(self, codec: TextCodec, skip_special_tokens: bool = True):
        self._codec = codec
        self._skip = skip_special_tokens
        # The window: the last tokens that were sent whole, then what came since. The former
        # stay because some tokenizers write a text's first token differently (no leading space).
        self._ids: list[int] = []
        self._context = 0  # tokens of the window that were sent whole
        self._sent = 0  # characters of the window's text that were sent

    def push(self, ids: Iterable[int]) -> str:
        """Take new ids; the text that is certain now, perhaps none."""
        self._ids += [int(i) for i in ids]
        return self._take(final=False)

    def flush(self) -> str:
        """The end of the stream: whatever was held back."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        text = self._codec.decode(self._ids, self._skip)
        certain = text if final else text.rstrip("\ufffd")
        piece, self._sent = certain[self._sent :], max(self._sent, len(certain))
        if certain == text and len(self._ids) > self._context:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._sent = len(self._codec.decode(self._ids, self._skip))
        return piece


def codec_from_directory(directory: str | Path) -> TextCodec | None:
    """The codec of a Hugging Face directory; None where it has no `tokenizer.json`.

    The chat template is `chat_template.jinja`, else the one in `tokenizer_config.json`, else in
    `chat_template.json`.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    read_json(path)  # one line for a damaged file
    tokenizers = require("tokenizers", "gguf")
    with _one_line("not a tokenizer", str(path)):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    settings = directory / "tokenizer_config.json"
    config = read_json(settings) if settings.is_file() else {}
    file, template = _directory_template(directory, settings, config)
    return TextCodec(tokenizer, template, _special_tokens(config), str(path), str(file))


def codec_from_gguf(metadata: Mapping[str, Any], source: str = "") -> TextCodec:
    """The codec of a GGUF file's metadata: byte-level BPE (`tokenizer.ggml.model` gpt2).

    source: the file, which later errors name. NotImplementedError naming the model or the
    pre-tokenizer where it is another one, ValueError naming what is no sound table.
    """
    model, pre = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model != "gpt2":
        raise NotImplementedError(
            f"tokenizer.ggml.model: expected 'gpt2' (BPE), found {model!r:.60}"
        )
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        known = ", ".join(map(repr, PRE_TOKENIZERS))
        raise NotImplementedError(f"tokenizer.ggml.pre: expected one of {known}, found {pre!r:.60}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    _strings(metadata, "tokenizer.ggml.merges")
    types = metadata.get("tokenizer.ggml.token_type")
    numbers = isinstance(types, list) and all(type(kind) is int for kind in types)
    if types is not None and (not numbers or len(types) not in (0, len(tokens))):
        many = f"{len(types)} values" if isinstance(types, list) else f"{types!r:.60}"
        raise ValueError(
            f"tokenizer.ggml.token_type: expected {len(tokens)} integers, found {many}"
        )
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template: expected text, found {template!r:.60}")
    # llama.cpp's default for this one family where the file does not say.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    if not isinstance(add_bos, bool):
        raise ValueError(f"tokenizer.ggml.add_bos_token: expected a boolean, found {add_bos!r:.60}")
    special = {}
    for name in ("bos", "eos", "unknown", "padding"):
        index = token_id(metadata, f"tokenizer.ggml.{name}_token_id")
        if index is not None and index < len(tokens):
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            special[f"{short}_token"] = tokens[index]
    tokenizer = _byte_level_bpe(metadata, pre)
    if add_bos and "bos_token" in special:
        bos = special["bos_token"]
        processors = require("tokenizers", "gguf").processors
        with _one_line("tokenizer.ggml.bos_token_id"):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))]
            )
    return TextCodec(tokenizer, template, special, source, source)


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        found = "nothing" if value is None else f"{value!r:.60}"
        raise ValueError(f"{name}: expected a list of strings, found {found}")
    return value


def _byte_level_bpe(metadata: Mapping[str, Any], pre: str) -> Any:
    tokenizers = require("tokenizers", "gguf")
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    with _one_line("tokenizer.ggml.merges"):
        model = tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            # Llama 3 takes a whole piece that is in the vocabulary before it looks at merges.
            ignore_merges=pre == "llama-bpe",
        )
    tokenizer = tokenizers.Tokenizer(model)
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    style, pattern = PRE_TOKENIZERS[pre]
    first = []
    if style == "digits":
        first = [tokenizers.pre_tokenizers.Digits(individual_digits=True)]
    elif style == "split":
        first = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [*first, byte_level(add_prefix_space=False, use_regex=style != "split")]
    )
    if pre == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()

    def added(kind: int) -> list[Any]:
        names = (token for token, t in zip(tokens, types, strict=True) if t == kind)
        special = kind == CONTROL
        return [tokenizers.AddedToken(n, special=special, normalized=False) for n in names]

    tokenizer.add_special_tokens(added(CONTROL))
    tokenizer.add_tokens(added(USER_DEFINED))
    return tokenizer


def _directory_template(
    directory: Path, settings: Path, config: Mapping[str, Any]
) -> tuple[Path, str | None]:
    """The chat template, None where there is none, and the file that says so."""
    jinja, older = directory / "chat_template.jinja", directory / "chat_template.json"
    if jinja.is_file():
        try:
            return jinja, jinja.read_text(encoding="utf-8")
        except ValueError as error:
            raise ValueError(f"{jinja}: not text ({error})") from None
    file, template = settings, config.get("chat_template")
    if template is None and older.is_file():
        file, template = older, read_json(older).get("chat_template")
    if isinstance(template, list):  # named templates; "default" is the chat's
        entries = [entry for entry in template if isinstance(entry, Mapping)]
        chats = [entry.get("template") for entry in entries if entry.get("name") == "default"]
        template = chats[-1] if chats else None
    if not isinstance(template, str | None):
        raise ValueError(f"{file}: chat_template: expected a string, found {template!r:.200}")
    return file, template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, which a config gives as text or as an object."""
    special = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return special


@contextlib.contextmanager
def _one_line(what: str, source: str = "") -> Iterator[None]:
    """Whatever is raised inside as a ValueError of one line that names `source`, a file, first.

    A template is a program of its own; the tokenizer package raises bare Exceptions, and where it
    panics what is no Exception at all.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{source and source + ': '}{what}: {reason_of(error)}") from None


def _unicode(text: str) -> str:
    """The text; ValueError where it holds half a surrogate pair, which has no bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise ValueError(f"text: expected Unicode characters, found {found!r}") from None
    return text


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    """The template in the environment that Hugging Face chat templates are written for."""
    return _environment().from_string(template)


@functools.lru_cache(maxsize=8)
def _unset_names(template: str) -> frozenset[str]:
    """Names that a template reads and does not set: asked for with every line of a prompts file."""
    _compile(template)
    environment, meta = _environment(), require("jinja2.meta", "gguf")
    names = meta.find_undeclared_variables(environment.parse(template))
    return frozenset(names - set(environment.globals))


@functools.cache
def _environment() -> Any:
    sandbox = require("jinja2.sandbox", "gguf")
    extensions = [require("jinja2.ext", "gguf").loopcontrols, _generation_tag()]
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which would put `\\u003c` into prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise require("jinja2", "gguf").TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.cache
def _generation_tag() -> type:
    """`{% generation %} ... {% endgeneration %}`, which marks what to train on: its body as is."""
    jinja2 = require("jinja2", "gguf")

    class Generation(require("jinja2.ext", "gguf").Extension):
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    return Generation
