"""Tokenizers, chat templates and streams of text."""

import datetime
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from target_files import byte_tokens, write_tokenizer

from dflash_jax import extras, text
from dflash_jax.text import StreamDecoder, TextCodec, codec_from_directory, codec_from_gguf

BYTES = byte_tokens()
CHATML = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'system' %}\n"
    "<|sys|>{{ message.content }}<|end|>\n"
    "    {% else %}\n"
    "<|{{ message.role }}|>{{ message.content }}<|end|>\n"
    "    {% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def spell(text):
    """The byte characters of a text."""
    return "".join(BYTES[b] for b in text.encode())


def metadata(pre="smollm", merges=(), words=(), control=(), user=(), **more):
    """GGUF metadata of a byte-level tokenizer: bytes, merged words, then added tokens."""
    words = [*words, *(merge.replace(" ", "") for merge in merges)]
    tokens = [*BYTES, *words, *control, *user]
    types = [1] * (256 + len(words)) + [3] * len(control) + [4] * len(user)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(merges),
    } | {f"tokenizer.{name}": value for name, value in more.items()}


def pieces(codec, text):
    """Tokens of a text, each decoded on its own."""
    return [codec.decode([i], skip_special_tokens=False) for i in codec.encode(text)]


MERGES = ["1 2", "12 3", "Ġ Ġ", "Ġ 1", "a b", "ab c"]


class TestBytePairs:
    def test_smollm_splits_every_digit_first(self):
        codec = codec_from_gguf(metadata("smollm", MERGES))
        assert pieces(codec, "abc 123") == ["abc", " ", "1", "2", "3"]
        # The run of spaces is cut before it could give its last space to the number.
        assert pieces(codec, "a  1") == ["a", "  ", "1"]

    def test_gpt2_merges_numbers_with_their_space(self):
        codec = codec_from_gguf(metadata("gpt-2", MERGES))
        assert pieces(codec, "abc 12") == ["abc", " ", "12"]
        assert pieces(codec, "123") == ["123"]
        assert pieces(codec, "a  1") == ["a", " ", " 1"]

    def test_llama_groups_three_digits_and_begins_with_bos(self):
        special = {"ggml.bos_token_id": 256 + len(MERGES)}
        codec = codec_from_gguf(metadata("llama-bpe", MERGES, control=["<|bos|>"], **special))
        assert pieces(codec, "1231") == ["<|bos|>", "123", "1"]
        assert pieces(codec, "a  1") == ["<|bos|>", "a", " ", " ", "1"]

    def test_llama_prefers_a_whole_word_of_the_vocabulary(self):
        codec = codec_from_gguf(metadata("llama-bpe", ["a b"], words=["xyz"]))
        assert pieces(codec, "xyz") == ["xyz"]
        codec = codec_from_gguf(metadata("qwen2", ["a b"], words=["xyz"]))
        assert pieces(codec, "xyz") == ["x", "y", "z"]

    def test_qwen_composes_characters(self):
        codec = codec_from_gguf(metadata("qwen2"))
        assert codec.encode(unicodedata.normalize("NFD", "é")) == codec.encode("é")
        assert pieces(codec_from_gguf(metadata("qwen2", MERGES)), "12") == ["1", "2"]

    @pytest.mark.parametrize("pre", list(text.PRE_TOKENIZERS))
    @settings(max_examples=50, deadline=None)
    @given(words=st.text(st.characters(exclude_categories=["Cs"])))
    def test_every_text_comes_back(self, pre, words):
        codec = codec_from_gguf(metadata(pre, MERGES))
        expected = unicodedata.normalize("NFC", words) if pre == "qwen2" else words
        assert codec.decode(codec.encode(words)) == expected

    def test_bos_is_the_files_own_choice(self):
        options = {"control": ["<s>"], "ggml.bos_token_id": 256}
        assert codec_from_gguf(metadata(**options)).encode("a") == [BYTES.index("a")]
        codec = codec_from_gguf(metadata(**options, **{"ggml.add_bos_token": True}))
        assert codec.encode("a") == [256, BYTES.index("a")]
        codec = codec_from_gguf(metadata("llama-bpe", **options, **{"ggml.add_bos_token": False}))
        assert codec.encode("a") == [BYTES.index("a")]

    def test_special_tokens_in_text_become_their_ids(self):
        codec = codec_from_gguf(metadata(control=["<|end|>"], user=["<think>"]))
        ids = codec.encode("a<|end|><think>b")
        assert ids == [BYTES.index("a"), 256, 257, BYTES.index("b")]
        assert codec.decode(ids) == "a<think>b"
        assert codec.decode(ids, skip_special_tokens=False) == "a<|end|><think>b"
        assert codec.token_to_id("<|end|>") == 256
        assert codec.token_to_id("<|none|>") is None

    def test_other_kinds_are_refused_by_name(self):
        with pytest.raises(NotImplementedError, match=r"tokenizer\.ggml\.model.*'llama'"):
            codec_from_gguf(metadata() | {"tokenizer.ggml.model": "llama"})
        with pytest.raises(NotImplementedError, match=r"tokenizer\.ggml\.pre.*'tekken'"):
            codec_from_gguf(metadata("tekken"))

    def test_a_missing_table_is_named(self):
        without = {k: v for k, v in metadata().items() if k != "tokenizer.ggml.merges"}
        with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges"):
            codec_from_gguf(without)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tokens", [1, 2]),
            ("tokens", "ab"),
            ("merges", 5),
            ("merges", [None]),
            ("token_type", 5),
            ("token_type", [1]),
            ("pre", ["qwen2"]),
            ("bos_token_id", "x"),
            ("bos_token_id", [1]),
            ("eos_token_id", 1.5),
        ],
    )
    def test_a_table_of_another_kind_is_named(self, name, value):
        damaged = metadata() | {f"tokenizer.ggml.{name}": value}
        message = rf"^tokenizer\.ggml\.{name}: expected .*, found"
        with pytest.raises((ValueError, NotImplementedError), match=message):
            codec_from_gguf(damaged)

    @pytest.mark.parametrize("none", [-1, 2**32 - 1, 2**70])
    def test_an_id_may_stand_for_none(self, none):
        codec = codec_from_gguf(metadata() | {"tokenizer.ggml.bos_token_id": none})
        assert "bos_token" not in codec.special

    def test_merges_of_unknown_tokens_are_one_line(self):
        damaged = metadata() | {"tokenizer.ggml.merges": ["aa b"]}
        with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges.*aa"):
            codec_from_gguf(damaged)


class TestDirectory:
    def test_without_a_tokenizer(self, tmp_path):
        assert codec_from_directory(tmp_path) is None

    def test_plain_text_and_special_tokens(self, tmp_path):
        write_tokenizer(tmp_path, BYTES, added=["<|end|>"])
        codec = codec_from_directory(tmp_path)
        ids = codec.encode("né<|end|>")
        assert ids == [*(BYTES.index(c) for c in spell("né")), 256]
        assert codec.decode(ids) == "né"

    def test_bos_of_the_post_processor_but_not_in_chats(self, tmp_path):
        path = write_tokenizer(tmp_path, BYTES, added=["<s>"])
        raw = json.loads(path.read_text())
        raw["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
        }
        raw["truncation"] = {
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        }
        path.write_text(json.dumps(raw))
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None})
        )
        codec = codec_from_directory(tmp_path)
        hello = [BYTES.index(c) for c in "Hello"]
        assert codec.encode("Hello") == [256, *hello]  # and not truncated
        assert codec.encode_chat(HELLO) == [256, *hello]

    def test_where_the_template_comes_from(self, tmp_path):
        write_tokenizer(tmp_path, BYTES)
        assert codec_from_directory(tmp_path).template is None

        def write(name, value):
            content = value if isinstance(value, str) else json.dumps(value)
            (tmp_path / name).write_text(content)
            return codec_from_directory(tmp_path).template

        assert write("chat_template.json", {"chat_template": "A"}) == "A"
        assert write("tokenizer_config.json", {"chat_template": "B"}) == "B"
        named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "C"}]
        assert write("tokenizer_config.json", {"chat_template": named}) == "C"
        assert write("chat_template.jinja", "D") == "D"

    def test_damaged_files_are_one_line(self, tmp_path):
        path = tmp_path / "tokenizer.json"
        for content in ("{", "[]", '{"model": {"type": "Nothing"}}'):
            path.write_text(content)
            with pytest.raises(ValueError, match=r"tokenizer\.json: ") as caught:
                codec_from_directory(tmp_path)
            assert "\n" not in str(caught.value)


class TestChat:
    def codec(self, template, **special):
        return TextCodec(None, template, special)

    def test_blocks_leave_no_blank_lines(self):
        messages = [{"role": "system", "content": "S"}, *HELLO]
        expected = "<|sys|>S<|end|>\n<|user|>Hello<|end|>\n"
        codec = self.codec(CHATML)
        assert codec.render_chat(messages, add_generation_prompt=False) == expected
        assert codec.render_chat(messages) == expected + "<|assistant|>"

    def test_special_tokens_and_further_arguments_reach_the_template(self):
        codec = self.codec(
            "{{ bos_token }}{{ enable_thinking }}{{ tools is none }}", bos_token="<s>"
        )
        assert codec.render_chat(HELLO, enable_thinking=False) == "<s>FalseTrue"
        assert codec.render_chat(HELLO, tools=[1], bos_token="!") == "!False"

    def test_a_template_says_what_it_reads(self):
        template = (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% generation %}{% if enable_thinking is defined and not enable_thinking %}"
            "{{ raise_exception(strftime_now('%Y')) }}{% endif %}{% endgeneration %}"
            "{{ bos_token }}{{ ns.n }}"
        )
        expected = {"messages", "enable_thinking", "bos_token"}
        assert self.codec(template).template_arguments == expected
        assert TextCodec(None).template_arguments == frozenset()
        with pytest.raises(ValueError, match="chat template: "):
            _ = self.codec("{% for %}").template_arguments

    def test_json_is_not_escaped(self):
        codec = self.codec("{{ tools | tojson }}|{{ tools | tojson(indent=1) }}")
        expected = '[{"a": "<é>"}]|[\n {\n  "a": "<é>"\n }\n]'
        assert codec.render_chat(HELLO, tools=[{"a": "<é>"}]) == expected

    def test_functions_tags_and_loop_controls(self):
        codec = self.codec(
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
            "{% break %}{% endfor %}{{ strftime_now('%Y') }}"
        )
        year = datetime.datetime.now().strftime("%Y")
        assert codec.render_chat(HELLO * 2) == "Hello" + year

    @pytest.mark.parametrize(
        ("template", "part"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{% for %}", "chat template: "),
            ("{{ messages[0].content + None }}", "chat template: "),
            ("{{ messages.__class__.__mro__ }}", "chat template: "),
            (None, "this target has none"),
        ],
    )
    def test_what_a_template_refuses_is_one_line(self, template, part):
        with pytest.raises(ValueError, match=part) as caught:
            self.codec(template).render_chat(HELLO)
        assert "\n" not in str(caught.value)

    def test_the_conversation_is_left_as_it_was(self):
        messages = [{"role": "user", "content": "Hello", "extra": [1]}]
        with pytest.raises(ValueError, match="chat template"):
            self.codec("{{ messages[0].extra.append(2) }}").render_chat(messages)
        assert messages == [{"role": "user", "content": "Hello", "extra": [1]}]


def stream(codec, rounds):
    decoder = StreamDecoder(codec)
    return [*map(decoder.push, rounds), decoder.flush()]


@pytest.fixture(scope="module")
def codec():
    return codec_from_gguf(metadata(control=["<|end|>"], words=["ĠðŁ", "abc"]))


class TestStream:
    def test_a_character_split_over_two_rounds(self, codec):
        """Case 106: nothing but the open character waits, and no U+FFFD shows."""
        ids = codec.encode("ab 🤔c")
        for cut in range(len(ids) + 1):
            texts = stream(codec, [ids[:cut], ids[cut:]])
            assert "".join(texts) == "ab 🤔c"
            assert "\ufffd" not in "".join(texts)
            # Bytes 3..6 are the emoji's.
            assert texts[0] == (
                "ab 🤔c"[:cut] if cut <= 3 else "ab " if cut < 7 else "ab 🤔c"[: cut - 3]
            )

    def test_a_token_with_the_beginning_of_a_character(self, codec):
        first = codec.token_to_id("ĠðŁ")
        rest = [codec.token_to_id(c) for c in spell("🤔")[2:]]
        assert stream(codec, [[first], rest, []]) == [" ", "🤔", "", ""]

    def test_special_tokens_are_not_shown(self, codec):
        end = codec.token_to_id("<|end|>")
        assert stream(codec, [codec.encode("ab"), [end]]) == ["ab", "", ""]
        decoder = StreamDecoder(codec, skip_special_tokens=False)
        assert decoder.push([end]) == "<|end|>"

    def test_real_replacement_characters_come_through(self, codec):
        ids = codec.encode("a\ufffdb\ufffd")
        assert "".join(stream(codec, [[i] for i in ids])) == "a\ufffdb\ufffd"

    def test_bytes_that_are_no_text(self, codec):
        broken = [BYTES.index(c) for c in spell("é")[:1]]
        ids = [*broken, *codec.encode("a"), *broken]
        assert stream(codec, [[i] for i in ids]) == ["", "\ufffda", "", "\ufffd"]

    @settings(max_examples=200, deadline=None)
    @given(rounds=st.lists(st.lists(st.integers(0, 258), max_size=6), max_size=12))
    def test_pieces_joined_are_the_whole(self, codec, rounds):
        whole = codec.decode([i for ids in rounds for i in ids])
        assert "".join(stream(codec, rounds)) == whole

    @settings(max_examples=100, deadline=None)
    @given(words=st.text(st.characters(exclude_categories=["Cs"])), data=st.data())
    def test_text_never_shows_a_broken_character(self, codec, words, data):
        ids, rounds = codec.encode(words), []
        while ids:
            size = data.draw(st.integers(1, len(ids)))
            rounds, ids = [*rounds, ids[:size]], ids[size:]
        texts = stream(codec, rounds)
        assert "".join(texts) == words
        assert sum(t.count("\ufffd") for t in texts) == words.count("\ufffd")

    def test_words_with_a_space_mark(self):
        """Sentencepiece style: the first token of a text loses its space, single bytes exist."""
        from tokenizers import Tokenizer, decoders, models

        vocab = ["▁Hello", "▁world", "!", "<0xC3>", "<0xA9>", "▁"]
        tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, []))
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        codec = TextCodec(tokenizer)
        rounds = [[0], [1, 3], [4], [2, 5], [1]]
        assert stream(codec, rounds) == ["Hello", " world", "é", "! ", " world", ""]
        assert codec.decode([0, 1, 3, 4, 2, 5, 1]) == "Hello worldé!  world"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' + 5 }}",
        "{{ '%d' % 'x' }}",
        "{{ messages[5].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
    ],
)
def test_whatever_a_template_raises_is_a_value_error(template):
    with pytest.raises(ValueError, match=r"^chat template: "):
        TextCodec(None, template).render_chat(HELLO)


@pytest.mark.parametrize("template", [5, {"a": "b"}, [{"name": "default", "template": 5}]])
def test_a_template_that_is_no_text_is_refused(tmp_path, template):
    write_tokenizer(tmp_path, BYTES)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match="chat_template: expected a string, found "):
        codec_from_directory(tmp_path)


@pytest.mark.parametrize("template", [[1], [{"a": 1}], []])
def test_a_list_without_a_default_template_is_no_template(tmp_path, template):
    write_tokenizer(tmp_path, BYTES)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert codec_from_directory(tmp_path).template is None


def test_a_template_file_that_is_no_text_is_named(tmp_path):
    write_tokenizer(tmp_path, BYTES)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: not text"):
        codec_from_directory(tmp_path)


def test_half_a_surrogate_pair_is_refused():
    codec = codec_from_gguf(metadata(chat_template="{{ messages[0].content }}"))
    for call in (codec.encode, lambda t: codec.encode_chat([{"role": "user", "content": t}])):
        with pytest.raises(ValueError, match=r"text: expected Unicode .*, found '\\udc80'"):
            call("a\udc80")


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("tokenizers", lambda: codec_from_gguf(metadata())),
        ("jinja2", lambda: TextCodec(None, "x").render_chat(HELLO)),
    ],
)
def test_a_missing_package_is_one_line_with_the_command(package, use, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(extras.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError) as caught:
        use()
    assert str(caught.value) == f'{package} is not installed: pip install "dflash-jax[gguf]"'
