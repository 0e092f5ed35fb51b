"""From tokens to text: characters in parts, stop strings, special tokens, streams, chat templates."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from checkpoints import BOS_TOKEN, SPECIAL_TOKENS, make_checkpoint, make_tokenizer, special_id
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.engine.detokenizer import TextStream
from nanovllm.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
EMOJI = "a\U0001f600\u00e9 \U0001f469\u200d\U0001f4bb \u4f60\u597d e\u0301\u2028"
ENDOFTEXT, IM_START, IM_END = (special_id(token) for token in SPECIAL_TOKENS)


# Text of a stream, token by token


class Pieces:
    """A tokenizer whose token i is pieces[i]; it counts what it is made to decode."""

    special_ids = frozenset()

    def __init__(self, *pieces):
        self.pieces = pieces
        self.decoded = 0

    def decode(self, token_ids, skip_special_tokens):
        self.decoded += len(token_ids)
        return b"".join(self.pieces[i] for i in token_ids).decode(errors="replace")


def stream_text(tokenizer, ids, stop=(), min_tokens=0, skip_special_tokens=True):
    """Yielded deltas and the stop string that ended the text; what a TextStream holds must be their sum."""
    stream = TextStream(tokenizer, tuple(stop), min_tokens, skip_special_tokens)
    deltas, hit = [], None
    for token_id in ids:
        hit = stream.push([token_id])
        deltas.append(stream.take_delta())
        if hit is not None:
            break
    stream.finish()
    deltas.append(stream.take_delta())
    assert "".join(deltas) == stream.text
    return deltas, hit


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    directory = tmp_path_factory.mktemp("byte_level")
    make_tokenizer(directory)
    return Tokenizer(str(directory))


def byte_ids(tokenizer, data):
    """One token per byte."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(ENDOFTEXT)}
    return [by_byte[bytes([byte])] for byte in data]


CHARACTERS = st.sampled_from([*EMOJI, "STOP", "ab", "\n", "\x00", REPLACEMENT])
BYTES = st.lists(
    st.one_of(
        CHARACTERS.map(str.encode),
        st.binary(min_size=1, max_size=5),
        st.sampled_from([b"\xff", b"\xf0\x9f", b"\xe2\x82", b"\x80" * 12, b"\xf0" * 11]),
    ),
    max_size=25,
).map(b"".join)


@settings(max_examples=400, deadline=None)
@given(data=BYTES, cuts=st.sets(st.integers(1, 60)), stops=st.lists(CHARACTERS, max_size=2, unique=True))
def test_stream_gives_the_whole_text_up_to_the_first_stop_string(data, cuts, stops):
    """A59, A61, A62: any bytes in any tokens, invalid UTF-8 too."""
    stops = [stop for stop in stops if not any(stop in other for other in stops if other != stop)]
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = Pieces(*(data[a:b] for a, b in itertools.pairwise(edges)))
    deltas, hit = stream_text(pieces, range(len(pieces.pieces)), stops)
    whole = data.decode(errors="replace")
    found = sorted((at, stop) for stop in stops if (at := whole.find(stop)) >= 0)
    assert "".join(deltas) == (whole[: found[0][0]] if found else whole)
    if found and REPLACEMENT not in whole:
        assert hit == found[0][1]


@settings(max_examples=200, deadline=None)
@given(data=BYTES, specials=st.lists(st.tuples(st.integers(0, 60), st.integers(ENDOFTEXT, IM_END)), max_size=3))
@pytest.mark.parametrize("skip", [True, False])
def test_stream_equals_decode_with_a_byte_level_tokenizer(skip, byte_level, data, specials):
    """A59: the real decoder, one byte a token, special tokens anywhere, even inside a character."""
    ids = byte_ids(byte_level, data)
    for place, token_id in specials:
        ids.insert(place, token_id)
    deltas, _ = stream_text(byte_level, ids, skip_special_tokens=skip)
    assert "".join(deltas) == byte_level.decode(ids, skip)


def test_characters_are_never_split(byte_level):
    """A59: no U+FFFD on the way when there is none in the end."""
    deltas, _ = stream_text(byte_level, byte_ids(byte_level, EMOJI.encode()))
    assert REPLACEMENT not in "".join(deltas)
    assert "".join(deltas) == EMOJI
    assert sum(map(bool, deltas)) == len(EMOJI), "a whole character is held back"


@pytest.mark.parametrize("byte", [b"\xff", b"\x80", b"\xf0"])
def test_lone_bytes_are_let_go_in_linear_time(byte):
    """A61: 500 equal bytes that are no character; giving them up does not tear the next character."""
    for count in (*range(1, 40), 500):
        pieces = Pieces(byte, b"\xf0", b"\x9f", b"\x98", b"\x80")
        deltas, _ = stream_text(pieces, [0] * count + [1, 2, 3, 4])
        assert "".join(deltas) == REPLACEMENT * count + "\U0001f600"
        sent = itertools.accumulate(map(len, deltas[:count]))
        assert all(done - so_far <= 12 for done, so_far in enumerate(sent, start=1)), "held back for too long"
        assert pieces.decoded < 60 * (count + 4)


# Stop strings

ALPHABET = [b"abc", b"DEF", b"G", b"HI", b"J", b"xHIJy", b"D", b"\xf0", b"DE\xf0", b"tail"]
STOPPED = [
    ("over four tokens", [0, 1, 2, 3, 4, 9], ["DEFGHIJ"], "abc", "DEFGHIJ"),
    ("nearly, then text", [0, 1, 2, 3, 9], ["DEFGHIJ"], "abcDEFGHItail", None),
    ("nearly, then the end", [0, 1, 2, 3], ["DEFGHIJ"], "abcDEFGHI", None),
    ("twice begun", [6, 1, 2, 9], ["DEFG"], "D", "DEFG"),
    ("inside a token", [0, 5, 9], ["HI"], "abcx", "HI"),
    ("first token", [1, 0], ["DEF"], "", "DEF"),
    ("earliest of two", [0, 1, 2], ["G", "EF"], "abcD", "EF"),
    ("earliest of two in a token", [0, 5], ["J", "HI"], "abcx", "HI"),
    ("one begins the other", [0, 1, 2], ["DEFG", "DE"], "abc", "DE"),
    ("of one character", [0, 1], ["b"], "a", "b"),
    ("longer than the text", [0], ["abcdefghijk"], "abc", None),
    ("with half a character behind it", [0, 8, 9], ["DE"], "abc", "DE"),
]


@pytest.mark.parametrize(("ids", "stop", "text", "reason"), [c[1:] for c in STOPPED], ids=[c[0] for c in STOPPED])
def test_stop_string(ids, stop, text, reason):
    """A62: no part of it is ever sent, the text is cut exactly, and only what looks like it comes late."""
    pieces = Pieces(*ALPHABET)
    deltas, hit = stream_text(pieces, ids, stop)
    assert ("".join(deltas), hit) == (text, reason)
    before_the_end = len(deltas) - (1 if hit is None else 2)
    for count, sent in enumerate(itertools.accumulate(deltas[:before_the_end]), start=1):
        held = pieces.decode(ids[:count], True)[len(sent) :]
        assert REPLACEMENT in held or any(one.startswith(held) for one in stop), f"{held!r} is held back"


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "a"), (3, "abca"), (6, "abcabca"), (9, None)])
def test_stop_strings_are_not_looked_for_before_min_tokens(min_tokens, text):
    """Completed by token min_tokens + 1 or later, a stop string counts, wherever it began (as in vLLM)."""
    ids = [0, 1, 2] * 3
    deltas, hit = stream_text(Pieces(b"a", b"b", b"c"), ids, ["bc"], min_tokens)
    assert "".join(deltas) == ("abc" * 3 if text is None else text)
    assert hit == (None if text is None else "bc")


# A model that says what it is told


@pytest.fixture
def scripted(tmp_path, make_llm):
    """LLM whose greedy answer to [chain[0]] is chain[1:], for a chain of different tokens; then it ends."""

    def make(chain, **knobs):
        size = {"hidden_size": 512, "intermediate_size": 8, "num_hidden_layers": 1}
        path = make_checkpoint(
            tmp_path / str(len(list(tmp_path.iterdir()))), "llama", tie=False, tokenizer=True, **size
        )
        weights = load_file(Path(path) / "model.safetensors")
        for name, tensor in weights.items():
            if "o_proj" in name or "down_proj" in name:
                tensor.zero_()
        weights["model.norm.weight"].fill_(1.0)
        weights["model.embed_tokens.weight"].copy_(torch.eye(512))
        head = weights["lm_head.weight"].zero_()
        for token_id, successor in zip(chain, [*chain[1:], IM_END], strict=True):
            head[successor, token_id] = 1.0
        save_file(weights, Path(path) / "model.safetensors", metadata={"format": "pt"})
        return make_llm(path, **knobs)

    return make


def greedy(**params):
    return SamplingParams(temperature=0, **{"max_tokens": 200, **params})


def both_ways(llm, prompt, params):
    """The answer of generate; stream must give the same in pieces."""
    (whole,) = llm.generate([prompt], params, use_tqdm=False)
    parts = list(llm.stream(prompt, params))
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [i for part in parts for i in part["token_ids"]] == whole["token_ids"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    assert parts[-1]["stop_reason"] == whole["stop_reason"]
    return whole, [part["text"] for part in parts]


def test_engine_streams_whole_characters(scripted, byte_level):
    """A59: emoji of four tokens each."""
    text = "\U0001f600\u00e9"
    ids = byte_ids(byte_level, text.encode())
    whole, parts = both_ways(scripted([5, *ids]), [5], greedy())
    assert whole["text"] == text
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", None)
    assert [part for part in parts if part] == list(text)


def test_engine_cuts_at_stop_strings(scripted, byte_level):
    """A62: the stop string comes in four tokens, and generate cuts at the same place as stream."""
    ids = byte_ids(byte_level, b"abcDEFGHIJxyz")
    llm = scripted([5, *ids])
    whole, parts = both_ways(llm, [5], greedy(stop=["DEFGHIJ", "nowhere"]))
    assert whole["text"] == "abc"
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "DEFGHIJ")
    assert whole["token_ids"] == ids[:10]
    assert not set("".join(parts)) & set("DEFGHIJ")
    assert both_ways(llm, [5], greedy(stop="DEG"))[0]["text"] == "abcDEFGHIJxyz"
    last, _ = both_ways(llm, [5], greedy(stop="DEFGHIJ", max_tokens=10))
    assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("abc", "stop", "DEFGHIJ")
    late, _ = both_ways(llm, [5], greedy(stop="c", min_tokens=3))
    assert late["text"] == "abcDEFGHIJxyz"


def test_stop_string_before_half_a_character_at_the_end(make_llm, scripted, byte_level):
    """The text was cut at the stop string, so that is the reason, although max_tokens was reached with it."""
    llm = scripted([5, *byte_ids(byte_level, b"ab\xf0")])
    tokenizer = llm.engine.tokenizer
    pieces = {5: b"", **dict(zip(byte_ids(byte_level, b"ab\xf0"), (b"a", b"b", b"END\xf0"), strict=True))}
    tokenizer.decode = lambda ids, skip: b"".join(pieces[i] for i in ids).decode(errors="replace")
    whole, _ = both_ways(llm, [5], greedy(stop="END", max_tokens=3))
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == ("ab", "stop", "END")


def test_failed_request_keeps_its_text_once(scripted, byte_level):
    """A49: logits turn infinite after three tokens; no token's text comes twice, and no stop string shows up."""
    ids = byte_ids(byte_level, b"abc")
    llm = scripted([5, *ids])
    llm.engine.runner.model.model.embed_tokens.weight[ids[-1]] = math.nan
    for stop in ("", "cc"):
        (whole,) = llm.generate([[5]], greedy(stop=[stop] if stop else []), use_tqdm=False)
        assert (whole["text"], whole["token_ids"], whole["finish_reason"]) == ("abc", ids, "error")
    assert "".join(part["text"] for part in llm.stream([5], greedy())) == "abc"


# Tokenizers: bytes of a token, special tokens, byte fallback


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """As in Llama 2: words with a leading space, <0x00> to <0xFF> for what the vocabulary lacks."""
    words = ["\u2581", "\u2581Hello", "\u2581world", "Hello", "\u00e9", "a", "!"]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocabulary += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)] + [(word, -len(word) / 9) for word in words]
    raw = RawTokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    directory = tmp_path_factory.mktemp("byte_fallback")
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>").save_pretrained(directory)
    return Tokenizer(str(directory))


TEXTS = [EMOJI, "Hello world!", "  two  spaces ", "na\u00efve \U0001f469\u200d\U0001f4bb\n\ttab", "\u2581"]


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_of_a_text_are_its_bytes(text, byte_level, byte_fallback):
    """Also where a token holds part of a character."""
    (ids,) = byte_level.encode([text])
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    (ids,) = byte_fallback.encode([text])
    assert b"".join(map(byte_fallback.token_bytes, ids)) == (" " + text.replace("\u2581", " ")).encode()


def test_token_bytes_are_exact(byte_level, byte_fallback, tmp_path):
    """Every byte has its token; special tokens are their own text; ids past the vocabulary have none."""
    singles = [byte_level.token_bytes(i) for i in range(ENDOFTEXT)]
    assert {one for one in singles if len(one) == 1} == {bytes([byte]) for byte in range(256)}
    assert max(map(len, singles)) > 2
    assert [byte_fallback.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert [byte_level.token_bytes(i) for i in (IM_END, IM_END + 1, 10**6)] == [b"<|im_end|>", b"", b""]
    assert byte_level.token_text(byte_ids(byte_level, b"\xf0")[0]) == REPLACEMENT
    # DeepSeek's distilled Qwen and Llama models spell special tokens with the sign that elsewhere is a space.
    raw = RawTokenizer.from_file(f"{byte_level._hf.name_or_path}/tokenizer.json")
    special = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    raw.add_special_tokens([special])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special).save_pretrained(tmp_path)
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.token_text(tokenizer.eos_token_id) == special
    assert tokenizer.token_bytes(tokenizer.eos_token_id) == special.encode()


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.one_of(st.sampled_from([0, 1, 2, *range(259, 266)]), st.integers(3, 258)), max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
@example(data=[260, 2, 2, 261], sizes=[3])  # "Hello</s></s> world", which must not read "Helloworld"
@example(data=[0, 0, 197, 131, 3, 3, 200], sizes=[3])  # a lone byte undoes the run of bytes it stands in
@pytest.mark.parametrize("skip", [True, False])
def test_stream_equals_generate_with_byte_fallback(skip, byte_fallback, data, sizes):
    """A59: leading spaces, skipped special tokens and invalid bytes; one token at a time, some, or all at once."""
    deltas, _ = stream_text(byte_fallback, data, skip_special_tokens=skip)
    at_once, gathered = (TextStream(byte_fallback, (), 0, skip) for _ in range(2))
    at_once.push(data)
    at_once.finish()
    rest, size = data, itertools.cycle(sizes)
    while rest:
        n = next(size)
        gathered.push(rest[:n])
        rest = rest[n:]
    gathered.finish()
    assert "".join(deltas) == at_once.text == gathered.text
    if REPLACEMENT not in at_once.text:
        assert at_once.text == byte_fallback.decode(data, skip)


def test_skip_special_tokens(scripted):
    """eos and others are in the text only when asked for."""
    llm = scripted([5, 70, IM_START, 71])
    assert both_ways(llm, [5], greedy())[0]["text"] == llm.engine.tokenizer.decode([70, 71], True)
    spelled, _ = both_ways(llm, [5], greedy(skip_special_tokens=False))
    assert spelled["text"] == llm.engine.tokenizer.decode([70, IM_START, 71, IM_END], False)
    assert spelled["text"].endswith("<|im_end|>")
    cut, _ = both_ways(llm, [5], greedy(skip_special_tokens=False, stop="<|im_start|>"))
    assert cut["text"] == llm.engine.tokenizer.decode([70], True)


# What ends a text


@pytest.fixture
def many_eos(tmp_path, make_llm):
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=True)
    for file, ids in (("config.json", 42), ("generation_config.json", [40, 41])):
        content = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({**content, "eos_token_id": ids}))
    return make_llm(path)


@pytest.mark.parametrize("eos", [40, 41, 42, IM_END])
def test_every_eos_ends_the_text(eos, many_eos):
    """A56, A57: of generation_config.json, config.json and the tokenizer alike; ignore_eos ignores them all."""
    (output,) = many_eos.generate([[5]], greedy(logit_bias={eos: 100.0}), use_tqdm=False)
    assert (output["token_ids"], output["finish_reason"], output["stop_reason"]) == ([eos], "stop", None)
    assert (output["text"] == "") == (eos == IM_END), "a special token is left out of the text, another one is not"
    ignored = greedy(logit_bias={eos: 100.0}, ignore_eos=True, max_tokens=5)
    (output,) = many_eos.generate([[5]], ignored, use_tqdm=False)
    assert (output["token_ids"], output["finish_reason"]) == ([eos] * 5, "length")
    stop = greedy(logit_bias={eos: 100.0}, ignore_eos=True, stop_token_ids=[eos])
    (output,) = many_eos.generate([[5]], stop, use_tqdm=False)
    assert (output["token_ids"], output["stop_reason"]) == ([eos], eos)
    (output,) = many_eos.generate([[5]], greedy(logit_bias={IM_START: 100.0}, max_tokens=3), use_tqdm=False)
    assert output["token_ids"] == [IM_START] * 3, "special, but no eos"


# Prompts


def test_one_bos(make_llm, llama_path, qwen3_path):
    """A64: text gets one unless it brings its own; a chat template writes its own; ids are taken as they are."""
    llm, params = make_llm(llama_path), greedy(max_tokens=1)
    bos, text = special_id(BOS_TOKEN), "Hello there"
    messages = [{"role": "user", "content": text}]
    hf = AutoTokenizer.from_pretrained(llama_path)
    templated = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    outputs = llm.generate([text, BOS_TOKEN + text, templated, [7, 8]], params, use_tqdm=False)
    plain, own, chat, ids = [output["prompt_token_ids"] for output in outputs]
    assert plain == own
    assert [prompt.count(bos) for prompt in (plain, own, chat, ids)] == [1, 1, 1, 0]
    assert plain[0] == chat[0] == bos
    expected = hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert llm.chat(messages, params, use_tqdm=False)[0]["prompt_token_ids"] == chat == expected
    (output,) = make_llm(qwen3_path).generate(text, params, use_tqdm=False)  # a tokenizer without BOS
    assert output["prompt_token_ids"] == AutoTokenizer.from_pretrained(qwen3_path)(text)["input_ids"]


def test_chat_template_kwargs(make_llm, qwen3_path):
    """A65: enable_thinking reaches the template, and at the wrong level it is an error."""
    llm = make_llm(qwen3_path)
    talks = [[{"role": "user", "content": text}] for text in ("Hi", "Bye")]

    def rendered(messages, **kwargs):
        outputs = llm.chat(messages, greedy(max_tokens=1), use_tqdm=False, **kwargs)
        return [llm.engine.tokenizer.decode(output["prompt_token_ids"], False) for output in outputs]

    plain = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(talks) == [plain, plain.replace("Hi", "Bye")]
    assert rendered(talks[0], chat_template_kwargs={"enable_thinking": True}) == [plain]
    empty = [plain + "<think>\n\n</think>\n\n"]
    assert rendered(talks[0], chat_template_kwargs={"enable_thinking": False}) == empty
    assert rendered(talks[0], add_generation_prompt=False) == ["<|im_start|>user\nHi<|im_end|>\n"]
    for call in (lambda: llm.chat(talks, enable_thinking=False), lambda: SamplingParams(enable_thinking=False)):
        with pytest.raises(TypeError, match="enable_thinking"):
            call()
