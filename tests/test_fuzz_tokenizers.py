"""Damaged tokenizers and chat templates: they work or end in one line that names their file."""

import copy
import json
import random

import gguf
import pytest
from damage import ABSURD, encoded, mutate, one_line_or_loads
from target_files import HF_TARGETS, byte_tokens, copy_target, write_gguf, write_tokenizer

from dflash_jax.cli import main
from dflash_jax.targets.loading import abstract_target, load_target
from dflash_jax.text import PRE_TOKENIZERS, TextCodec, codec_from_directory, codec_from_gguf

SEVERAL = 40
"""Cases a seed: 8 seeds of each kind by default, 100 in the slow tests."""
HELLO = [{"role": "user", "content": "ab"}]
LETTERS = [*"abcdehlo12 ", "<unk>"]
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 14, "content": "<s>", "special": True, "single_word": False}
        | dict.fromkeys(("lstrip", "rstrip", "normalized"), False)
    ],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFC"},
            {"type": "Replace", "pattern": {"Regex": "x+"}, "content": "x"},
        ],
    },
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": " ?[a-z]+"},
        "behavior": "Isolated",
        "invert": False,
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [14], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "Fuse"},
    "model": {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": False,
        "byte_fallback": False,
        "dropout": None,
        "vocab": {token: i for i, token in enumerate([*LETTERS, "ab", "he"])},
        "merges": [["a", "b"], ["h", "e"]],
    },
}
SETTINGS = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "<s>",
    "chat_template": [
        {"name": "default", "template": "{{ bos_token }}{% for m in messages %}{{ m.content }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ],
}
SETTINGS["chat_template"][0]["template"] += "{% endfor %}"
WORDS = ("vocab", "merges", "type", "unk_token", "added_tokens", "ids", "name", "template")


def use(codec: TextCodec, file: str) -> None:
    """All that a codec does, each thing by itself."""
    calls = [
        lambda: codec.encode("hello abxx 1 é<s>"),
        lambda: codec.decode([0, 5, 14, 300, 10**6]),
        lambda: codec.template_arguments,
    ]
    # Half a character in a template is the text's own error, whoever wrote it.
    if codec.template is not None and "\ud800" not in codec.template:
        calls.append(lambda: codec.encode_chat(HELLO))
    for call in calls:
        with one_line_or_loads(naming=file):
            call()


def directory_case(directory, chance: random.Random) -> None:
    """`tokenizer.json` and `tokenizer_config.json` with one to three faults."""
    parts = {"tokenizer": copy.deepcopy(TOKENIZER), "tokenizer_config": copy.deepcopy(SETTINGS)}
    hurt = chance.choice([None, None, None, *parts])
    for _ in range(0 if hurt else chance.choice([1, 1, 2, 3])):
        mutate(parts["tokenizer" if chance.random() < 0.7 else "tokenizer_config"], chance, WORDS)
    for name, part in parts.items():
        (directory / f"{name}.json").write_bytes(encoded(part, chance, name == hurt))


def fuzz_directories(directory, seed):
    """Beside a sound target: what the config's reader and the tokenizer's make of it."""
    chance = random.Random(seed)
    for _ in range(SEVERAL):
        directory_case(directory, chance)
        with one_line_or_loads(naming=str(directory)):
            abstract_target(directory)
        with one_line_or_loads(naming=str(directory)):
            use(codec_from_directory(directory), str(directory))


@pytest.fixture
def target(tmp_path):
    return copy_target("llama3", tmp_path / "target")


def test_the_case_without_a_fault_works(target):
    (target / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (target / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    codec = codec_from_directory(target)
    assert codec.encode("ab1") == [14, 12, 8]
    assert codec.encode_chat(HELLO) == [14, 12]
    assert abstract_target(target).vocab_size == 15


@pytest.mark.parametrize("seed", range(8))
def test_damaged_tokenizer_files(target, seed):
    fuzz_directories(target, seed)


@pytest.mark.slow
def test_four_thousand_damaged_tokenizer_files(target):
    for seed in range(1000, 1100):
        fuzz_directories(target, seed)


# --- the metadata of a GGUF file ------------------------------------------------------------------


def metadata(pre: str) -> dict:
    tokens = [*byte_tokens(), "ab", "<s>", "</s>", "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }


def metadata_case(chance: random.Random) -> dict:
    """Values of other types, and lists of other lengths or with an odd entry."""
    held = metadata(chance.choice(list(PRE_TOKENIZERS)))
    for _ in range(chance.choice([1, 1, 2])):
        name = chance.choice(list(held))
        value, kind = held[name], chance.randrange(5)
        if kind == 0:
            del held[name]
        elif kind == 1 or not isinstance(value, list) or not value:
            held[name] = chance.choice(ABSURD)
        elif kind == 2:
            held[name] = value[: chance.randrange(len(value) + 1)]
        elif kind == 3:
            held[name] = value + value[:3]
        else:
            value[chance.randrange(len(value))] = chance.choice(ABSURD)
    return held


def fuzz_metadata(seed):
    chance = random.Random(seed)
    for _ in range(SEVERAL):
        with one_line_or_loads():
            use(codec_from_gguf(metadata_case(chance), "some.gguf"), "some.gguf")


@pytest.mark.parametrize("seed", range(8))
def test_damaged_gguf_tokenizers(seed):
    fuzz_metadata(seed)


@pytest.mark.slow
def test_four_thousand_damaged_gguf_tokenizers():
    for seed in range(1000, 1100):
        fuzz_metadata(seed)


# --- templates ------------------------------------------------------------------------------------

PIECES = [
    *("{{ '", "' }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{% if ", "%}"),
    *("{% endif %}", "{% set x = ", "{% macro f(a) %}", "{% endmacro %}", "{{ f(1) }}", "{#", "#}"),
    *("messages[0]", "| tojson", "|length", "{% generation %}", "{% endgeneration %}", "{{", "}}"),
    *("{% break %}", "(", "[", "'", "\n", "-", "+1", "range(5)", "|join", "\ud800", "\0", "é"),
    *("{% include 'x' %}", "{% extends 'a' %}", "|attr('__class__')", "|int", "10**400", "1e999"),
    *(
        "raise_exception('a\nb')",
        "strftime_now(5)",
        "|batch(0)",
        "{{ " + "(" * 300 + "1" + ")" * 300,
    ),
    *("{% if a %}" * 120, "{% for a in b %}" * 25, "{{ x." + "a." * 400 + "b }}"),
]


def fuzz_templates(seed):
    chance = random.Random(seed)
    for _ in range(SEVERAL):
        template = " ".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 12)))
        if chance.random() < 0.5:
            template += "{% endfor %}" * template.count("{% for")
            template += "{% endif %}" * template.count("{% if")
        codec = TextCodec(None, template, template_source="some.jinja")
        for call in (lambda: codec.render_chat(HELLO), lambda: codec.template_arguments):  # noqa: B023
            with one_line_or_loads(naming="some.jinja: chat template: "):
                call()


@pytest.mark.parametrize("seed", range(4))
def test_any_template(seed):
    fuzz_templates(seed)


@pytest.mark.slow
def test_four_thousand_templates():
    for seed in range(1000, 1100):
        fuzz_templates(seed)


# --- by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "tokenizer.json: not JSON"),
        ("tokenizer.json", '{"model": {"vocab": {}}}', "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe\x00", "tokenizer.json: not JSON"),
        (
            "tokenizer_config.json",
            "[]",
            "tokenizer_config.json: expected a JSON object, found list",
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": 5}',
            "tokenizer_config.json: chat_template: expected a string, found 5",
        ),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja: chat template: "),
        ("chat_template.jinja", "{{ raise_exception('a\\nb') }}", "chat template: a b"),
        ("chat_template.json", '{"chat_template": "{{ 1 / 0 }}"}', "chat_template.json: chat temp"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_id"),
    ],
)
def test_the_command_prints_one_line_and_exits_2(target, capsys, name, content, says):
    write_tokenizer(target, byte_tokens()[:90])
    data = content if isinstance(content, bytes) else content.encode()
    (target / name).write_bytes(data)
    assert main(["generate", "Hi", "--target", str(target), "--draft", "none"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"dflash-jax: {target}/")
    assert says in line
    assert line.count("\n") == 1


@pytest.mark.parametrize("kind", ["1.5", '"x"', "true", "-1", "null", "99999999999"])
def test_ids_of_a_vocabulary_are_token_ids(target, kind):
    """A number that is none would become the size of the vocabulary."""
    (target / "tokenizer.json").write_text(
        '{"model": {"vocab": {"a": KIND}}}'.replace("KIND", kind)
    )
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer \(expected token ids"):
        abstract_target(target)


@pytest.mark.parametrize(
    ("name", "add", "says"),
    [
        ("token_type", lambda w: w.add_token_types([1, 2]), "expected 97 integers, found 2 values"),
        ("merges", lambda w: w.add_token_merges(["aa b"]), "merges: "),
        ("add_bos_token", lambda w: w.add_string(ADD_BOS, "no"), "expected a boolean, found 'no'"),
        ("chat_template", lambda w: w.add_uint32(TEMPLATE, 5), "expected text, found 5"),
    ],
)
def test_a_gguf_tokenizer_of_another_length_or_type_is_named(tmp_path, name, add, says):
    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([*byte_tokens()[:96], "!?"])
        if name != "merges":
            writer.add_token_merges(["! ?"])
        add(writer)

    path = tmp_path / "model.gguf"
    write_gguf(path, HF_TARGETS / "llama3", "llama", metadata=tokenizer)
    with pytest.raises(ValueError, match=rf"model\.gguf: tokenizer\.\S*{name}: .*") as caught:
        load_target(path)
    assert says in str(caught.value)


ADD_BOS, TEMPLATE = "tokenizer.ggml.add_bos_token", "tokenizer.chat_template"


def test_a_tokenizer_that_panics_is_one_line():
    """The package's panics are no Exceptions."""

    class Panic(BaseException):
        pass

    class Broken:
        def encode(self, text, add_special_tokens):
            raise Panic("no entry\nfound")

    with pytest.raises(ValueError, match=r"^t\.json: tokenizer: no entry found$"):
        TextCodec(Broken(), source="t.json").encode("a")


def test_an_interrupt_is_none_of_the_tokenizers_errors():
    class Slow:
        def encode(self, text, add_special_tokens):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TextCodec(Slow()).encode("a")
