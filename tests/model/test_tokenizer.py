import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from workbench.model.pair import END, TINY_TARGET
from workbench.model.prompts import load_prompts
from workbench.model.tokenizer import ByteTokenizer, TextStream, load_tokenizer


@given(st.text())
def test_bytes_come_back(text):
    tokenizer = ByteTokenizer(END)
    ids = tokenizer.encode(text)
    assert ids[0] == END and tokenizer.decode(ids) == text


@given(st.text(max_size=40), st.lists(st.integers(1, 5), min_size=1))
def test_a_stream_shows_the_whole_text_once(text, widths):
    stream, ids = TextStream(ByteTokenizer()), ByteTokenizer().encode(text)
    shown, i = "", 0
    while ids:
        width = widths[i % len(widths)]
        shown, ids, i = shown + stream.push(ids[:width]), ids[width:], i + 1
    assert shown == text.rstrip("\ufffd") or shown == text


def test_a_split_character_is_held_back():
    stream = TextStream(ByteTokenizer())
    first, second = "é".encode()
    assert stream.push([ord("a"), first]) == "a"
    assert stream.push([second, ord("b")]) == "éb"


def test_checkpoint_tokenizer_and_its_absence(tmp_path):
    config = TINY_TARGET.__class__(**{**TINY_TARGET.__dict__, "mask_token_id": None, "vocab_size": 100})
    with pytest.raises(ValueError, match=r"no tokenizer.json.*--tokenizer bytes"):
        load_tokenizer(tmp_path, config)
    with pytest.raises(ValueError, match="vocabulary of 100"):
        load_tokenizer(tmp_path, config, "bytes")
    own = Tokenizer(WordLevel({"draft": 0, "tree": 1, "?": 2}, unk_token="?"))
    own.pre_tokenizer = Whitespace()
    own.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, config).encode("tree draft tree") == [1, 0, 1]
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path, config)


def test_the_tiny_model_speaks_bytes(tmp_path):
    assert load_tokenizer(tmp_path, TINY_TARGET).encode("ab") == [END, 97, 98]


def test_prompts_are_named_once_and_of_two_kinds():
    prompts = load_prompts()
    assert len({p.name for p in prompts}) == len(prompts) >= 12
    assert len(load_prompts("code")) + len(load_prompts("prose")) == len(prompts)
    with pytest.raises(ValueError, match="choose one of code, prose"):
        load_prompts("poems")
