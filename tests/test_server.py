"""The OpenAI-compatible server, driven by the real openai client over a socket; a tiny random model behind it."""

import hmac
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from server_helpers import MODEL, serving

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.server import cli, run_batch
from nanovllm.server.chat import ThinkSplitter


@pytest.fixture(scope="module")
def server(qwen3_path):
    with serving(qwen3_path) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server[1] + "/v1", api_key="none", max_retries=0)


@pytest.fixture(autouse=True)
def books_balance(server):
    """Nothing runs and all blocks are free after every test."""
    yield
    service, _ = server
    deadline = time.time() + 10
    while (service.engine.has_unfinished or service.thread.num_jobs) and time.time() < deadline:
        time.sleep(0.01)
    assert not service.engine.has_unfinished and not service.thread.num_jobs
    service.engine.scheduler.check()
    blocks = service.engine.scheduler.block_manager
    assert blocks.num_free == len(blocks.blocks)


@pytest.fixture(scope="module")
def offline(qwen3_path):
    """What the library itself answers."""
    with LLM(qwen3_path, device="cpu", dtype="float32", num_kvcache_blocks=256, max_model_len=512) as llm:
        yield lambda prompt, **params: llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def post(server, path, body, **kwargs):
    return httpx.post(server[1] + path, json=body, timeout=60, **kwargs)


# Completions


def test_completion_is_what_the_library_answers(client, offline):
    """Text, ids, and lists of either; usage; the reason for the end."""
    expected = offline("Hello there", temperature=0, max_tokens=8)
    ids = expected["prompt_token_ids"]
    for prompt in ("Hello there", ids, ["Hello there"], [ids]):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
        assert answer.choices[0].text == expected["text"]
        assert answer.choices[0].finish_reason == expected["finish_reason"]
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == len(expected["token_ids"])


def test_default_length_of_a_completion(client):
    """A85: OpenAI's 16, as documented."""
    answer = client.completions.create(model=MODEL, prompt=[5, 6, 7], extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_n_samples_and_seeds(client):
    """The same seed gives the same samples, which differ among themselves."""
    ask = lambda: client.completions.create(model=MODEL, prompt="Hi", n=3, seed=4, max_tokens=12)  # noqa: E731
    first, second = ask(), ask()
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert len({c.text for c in first.choices}) > 1


def test_extensions_reach_the_engine(server, client):
    """A55: top_k = 1 is greedy whatever the temperature."""
    greedy = client.completions.create(model=MODEL, prompt="Hi", temperature=0, max_tokens=8).choices[0].text
    one = client.completions.create(model=MODEL, prompt="Hi", temperature=2, max_tokens=8, extra_body={"top_k": 1})
    assert one.choices[0].text == greedy


def test_echo_scores_the_prompt(client, offline):
    """A70, A71: one entry per prompt token, the first null, offsets that match the text; twice the same."""
    answers = [
        client.completions.create(model=MODEL, prompt="Hello there friend", echo=True, logprobs=2, max_tokens=0)
        for _ in range(2)
    ]
    logprobs = answers[0].choices[0].logprobs
    assert answers[0].choices[0].text == "Hello there friend"
    assert logprobs.token_logprobs[0] is None and all(lp <= 0 for lp in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == answers[0].usage.prompt_tokens == len(logprobs.text_offset)
    assert "".join(logprobs.tokens) == "Hello there friend"
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert "Hello there friend"[offset:].startswith(token)
    assert logprobs.token_logprobs == pytest.approx(
        answers[1].choices[0].logprobs.token_logprobs, abs=1e-5, nan_ok=True
    )
    both = client.completions.create(model=MODEL, prompt="Hello there friend", echo=True, logprobs=1, max_tokens=1)
    assert len(both.choices[0].logprobs.tokens) == len(logprobs.tokens) + 1


def test_filtered_tokens_do_not_break_json(server):
    """A73: log probabilities of -inf are a finite floor."""
    body = {"model": MODEL, "prompt": "Hi", "top_k": 1, "logprobs": 5, "echo": True, "logit_bias": {"7": -100}}
    answer = post(server, "/v1/completions", {**body, "max_tokens": 3})
    assert answer.status_code == 200
    json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))


def test_stream_is_the_whole_text_in_pieces(client, offline):
    """A59, A76: joined deltas are the answer; usage comes once, last, with empty choices."""
    whole = offline("Hello there", temperature=0, max_tokens=20, ignore_eos=True)["text"]
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="Hello there", temperature=0, max_tokens=20, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole
    assert [bool(c.choices) for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [c.usage is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == 20


def test_stop_strings(client, offline):
    """A62: cut exactly, none of it sent, also in a stream."""
    whole = offline("Hello there", temperature=0, max_tokens=20, ignore_eos=True)["text"]
    stop = whole[6:9]
    ask = {"model": MODEL, "prompt": "Hello there", "temperature": 0, "max_tokens": 20, "stop": stop}
    answer = client.completions.create(**ask, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == whole[: whole.index(stop)] and answer.choices[0].finish_reason == "stop"
    stream = client.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].text for chunk in stream) == whole[: whole.index(stop)]


# Chat


def test_chat_by_the_models_template(client):
    """Text parts; log probabilities in the chat shape (A74); the room that is left is the limit (A85)."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, logprobs=True, top_logprobs=2, max_completion_tokens=5, temperature=0
    )
    plain = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=5, temperature=0
    )
    assert answer.choices[0].message.content == plain.choices[0].message.content
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert bytes(entry.bytes).decode(errors="replace") and entry.logprob <= 0 and len(entry.top_logprobs) == 2


def test_streamed_chat(client):
    """Joined deltas are the answer."""
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


# What is refused


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": [10**12]}, "1000000000000"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "top_kk": 3}, "top_kk"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "max_tokens": 600}, "512"),
        ({"prompt": list(range(3, 600))}, "512"),
    ],
    ids=str,
)
def test_bad_requests_are_400_and_name_the_field(server, client, body, named):
    """A66, A68, A69, A77, A86: in OpenAI's error shape, and the next request is served."""
    answer = post(server, "/v1/completions", {"model": MODEL, **body})
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).usage.completion_tokens == 1


def test_a_setting_at_the_wrong_level_is_an_error(server):
    """A65: enable_thinking belongs into chat_template_kwargs."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert "enable_thinking" in post(server, "/v1/chat/completions", {**body, "enable_thinking": False}).text
    answer = post(server, "/v1/chat/completions", {**body, "chat_template_kwargs": {"enable_thinking": False}})
    assert answer.status_code == 200


def test_errors_are_small(server):
    """A79: five thousand malformed messages give one small error."""
    answer = post(
        server, "/v1/chat/completions", {"model": MODEL, "messages": [{"role": 1, "content": "x" * 99}] * 5000}
    )
    assert answer.status_code == 400 and len(answer.content) < 2000


def test_null_means_default(server):
    """A84: every optional field null; stream=false is plain JSON."""
    body = {
        name: None for name in ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream_options", "suffix")
    }
    answer = post(server, "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": False, **body})
    assert answer.status_code == 200 and answer.json()["object"] == "text_completion"


def test_another_model_is_404(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


# Other routes


def test_models_tokens_version_and_metrics(server, client):
    assert [model.id for model in client.models.list()] == [MODEL]
    tokens = post(server, "/tokenize", {"prompt": "Hello there"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"] == "Hello there"
    assert httpx.get(server[1] + "/version").json()["version"]
    assert httpx.get(server[1] + "/health").status_code == 200
    client.completions.create(model=MODEL, prompt="x", max_tokens=2)
    metrics = httpx.get(server[1] + "/metrics").text
    for name in ("requests_running", "kv_cache_usage_ratio", "time_to_first_token_seconds", "generation_tokens"):
        assert name in metrics


def test_every_route_but_health_needs_the_key(qwen3_path):
    """A82, A83: unknown routes too; a browser's preflight needs none."""
    with serving(qwen3_path, api_key="secret", origins=("http://page",)) as (_, url):
        for method, path in [
            ("GET", "/v1/models"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/nowhere"), ("GET", "/docs"),
            ("GET", "/openapi.json"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"), ("POST", "/detokenize"),
        ]:  # fmt: skip
            assert httpx.request(method, url + path).status_code == 401, path
            wrong = httpx.request(method, url + path, headers={"authorization": "Bearer secreT"})
            assert wrong.status_code == 401, path
        assert httpx.get(url + "/health").status_code == 200
        preflight = {"origin": "http://page", "access-control-request-method": "POST"}
        answer = httpx.options(url + "/v1/completions", headers=preflight)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://page"
        good = openai.OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0)
        assert good.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


def test_keys_are_compared_in_constant_time(qwen3_path, monkeypatch):
    """By the standard library's function for it; no key at all, a short one and a longer one go the same way."""
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(
        hmac, "compare_digest", lambda given, expected: compared.append(given) or compare(given, expected)
    )
    with serving(qwen3_path, api_key="secret") as (_, url):
        for given in ({}, {"authorization": "B"}, {"authorization": "Bearer secret and more"}):
            assert httpx.get(url + "/version", headers=given).status_code == 401
        assert httpx.get(url + "/version", headers={"authorization": "Bearer secret"}).status_code == 200
    assert compared == [b"", b"B", b"Bearer secret and more", b"Bearer secret"]


# Many at once, and those that leave


def test_three_hundred_aborted_streams_leave_nothing_behind(server, client):
    """A81: each is closed after its first chunk; and requests without a stream that are given up. What nobody waits for
    is not computed to its end; the books are checked after the test."""
    before = server[0].engine.stats.decode_tokens
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
    with httpx.Client(timeout=60) as http:
        for _ in range(300):
            with http.stream("POST", server[1] + "/v1/completions", json={**body, "stream": True}) as stream:
                next(stream.iter_raw())
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server[1] + "/v1/completions", json={**body, "n": 8}, timeout=0.05)
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).usage.completion_tokens == 1
    assert server[0].engine.stats.decode_tokens - before < 400 * (300 + 5 * 8) / 3


def test_an_engine_that_fails_fails_its_requests_and_the_health(qwen3_path):
    """Those in flight get 500, a stream that has begun an event with the error; /health turns 503, later requests 503;
    nothing hangs."""
    with serving(qwen3_path) as (service, url), ThreadPoolExecutor(3) as pool:
        real, is_broken = service.engine.step, threading.Event()

        def broken():
            if is_broken.is_set():
                raise RuntimeError("out of something")
            return real()

        service.engine.step = broken
        body = {"model": MODEL, "prompt": "x", "max_tokens": 500, "ignore_eos": True}
        with httpx.stream("POST", url + "/v1/completions", json={**body, "stream": True}, timeout=20) as stream:
            lines = stream.iter_lines()
            next(lines)
            waiting = [pool.submit(httpx.post, url + "/v1/completions", json=body, timeout=20) for _ in range(3)]
            while service.thread.num_jobs < 4:
                time.sleep(0.001)
            is_broken.set()
            events = [line for line in lines if line]
        assert "out of something" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        for answer in waiting:
            assert answer.result().status_code == 500
            assert "out of something" in answer.result().json()["error"]["message"]
        assert httpx.get(url + "/health").status_code == 503
        assert httpx.post(url + "/v1/completions", json=body, timeout=20).status_code == 503


# The command


def start(path, *options):
    command = [sys.executable, "-c", "import sys; from nanovllm.server import main; sys.exit(main())"]
    given = ["--model", path, "--port", "0", "--device", "cpu", "--num-kvcache-blocks", "64", "--max-model-len", "256"]
    process = subprocess.Popen(
        [*command, *given, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "listening on" in line:
            return process, line.split()[-1]
    raise AssertionError("".join(lines))


def test_sigterm_lets_requests_end(qwen3_path):
    """No new ones, those that run are answered, and the exit status is 0."""
    process, url = start(qwen3_path, "--drain-seconds", "30", "--max-model-len", "510")
    answers = []
    body = {"model": qwen3_path, "prompt": "x", "max_tokens": 300, "n": 4, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream:
        chunks = stream.iter_lines()
        answers.append(next(chunks))
        process.send_signal(signal.SIGTERM)
        while (health := httpx.get(url + "/health")).status_code == 200:
            time.sleep(0.01)
        assert health.status_code == 503 and "stopping" in health.json()["error"]["message"]
        assert httpx.post(url + "/v1/completions", json=body).status_code == 503
        answers += list(chunks)
    assert answers[-2] == "data: [DONE]" or answers[-1] == "data: [DONE]"
    assert process.wait(20) == 0


def test_a_second_interrupt_stops_at_once(qwen3_path):
    process, url = start(qwen3_path, "--drain-seconds", "600")
    body = {"model": qwen3_path, "prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 8}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        started = time.time()
        process.wait(20)
    assert time.time() - started < 15


def test_start_up_errors_are_one_line(qwen3_path, capsys):
    """Port taken, no model, wrong knob."""
    taken = cli.listen("127.0.0.1", 0)
    taken.listen()
    assert cli.main(["--model", qwen3_path, "--port", str(taken.getsockname()[1])]) == 1
    assert cli.main(["--model", "nowhere", "--port", "0"]) == 1
    assert cli.main(["--model", qwen3_path, "--port", "0", "--max-num-seqs", "0"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    taken.close()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    assert "choose another --port" in lines[0] and "nowhere" in lines[1] and "max_num_seqs=0" in lines[2]


def test_without_the_extra_one_line_says_what_to_install():
    code = "import sys; sys.modules['fastapi'] = None; from nanovllm.server import batch, main; print(main(), batch())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "1 1\n"
    assert run.stderr == "error: this needs fastapi: pip install 'nanovllm[server]'\n" * 2


def test_every_engine_knob_is_an_option():
    """Generated from EngineConfig, with its docstring as help."""
    text = cli.make_parser().format_help()
    for name in EngineConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text
    options = {action.dest: action for action in cli.make_parser()._actions}
    assert all(options[name].help for name in EngineConfig.__dataclass_fields__)


# Thinking


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nLet me see.\n</think>\n\nParis.", False, "Let me see.\n", "Paris."),
        ("Let me see.</think>Paris.", True, "Let me see.", "Paris."),
        ("Paris < Rome </thin> end", False, "", "Paris < Rome </thin> end"),
        ("<think>never ends </th", False, "never ends </th", ""),
        ("", False, "", ""),
    ],
)
def test_thinking_is_told_apart_however_it_is_cut(text, inside, reasoning, content, size):
    """`--reasoning-parser qwen3`: pieces of any size join to the same two texts, and no part of a tag is sent."""
    splitter = ThinkSplitter(inside)
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    parts = [splitter.push(piece, final=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    assert "".join(part[0] for part in parts) == reasoning
    assert "".join(part[1] for part in parts) == content


# Batches


def test_a_batch_is_answered_line_by_line_and_resumed(qwen3_path, tmp_path, capsys):
    """One bad line gives one error line; a second run does what is left, also after a line that was cut off."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body, messages = {"model": "any", "temperature": 0, "max_tokens": 4}, [{"role": "user", "content": "x"}]
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": "Hello"}},
        {
            "custom_id": "b",
            "url": "/v1/chat/completions",
            "body": {**body, "messages": messages},
        },
        {"custom_id": "c", "url": "/v1/completions", "body": {**body, "prompt": "x", "top_kk": 1}},
        {"custom_id": "d", "url": "/v1/nowhere", "body": {}},
    ]
    source.write_text("\n".join([*map(json.dumps, lines), "{no json", "[" * 100_000, ""]))
    command = [
        "-i",
        str(source),
        "-o",
        str(target),
        "--model",
        qwen3_path,
        "--device",
        "cpu",
        "--num-kvcache-blocks",
        "64",
    ]
    command += ["--max-model-len", "256"]
    assert run_batch.main(command) == 0
    answers = {answer["id"]: answer for answer in map(json.loads, target.read_text().splitlines())}
    assert [answers[f"batch-{n}"]["response"]["status_code"] for n in range(1, 7)] == [200, 200, 400, 400, 400, 400]
    assert answers["batch-1"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert "top_kk" in answers["batch-3"]["error"]["message"] and "line 5" in answers["batch-5"]["error"]["message"]
    assert answers["batch-5"]["custom_id"] is None

    kept = [line for line in target.read_text().splitlines(True) if json.loads(line)["custom_id"] != "b"]
    target.write_text("".join(kept) + '{"id": "batch-2", "custom_id": "b", "resp')
    assert run_batch.main(command) == 0
    again = target.read_text().splitlines()
    assert len(again) == 7 and json.loads(again[-1])["custom_id"] == "b"
    assert run_batch.main(command) == 0 and target.read_text().splitlines() == again
    assert run_batch.main([*command[:4], "--model", "nowhere"]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: ")


def test_an_interrupted_batch_keeps_what_it_answered(qwen3_path, tmp_path):
    """Ctrl-C: status 130 and one line; every answer that was written is whole, and a second run adds the rest."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": f"Number {i}", "temperature": 0, "max_tokens": 100, "ignore_eos": True} for i in range(300)]
    lines = [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
    source.write_text("\n".join(map(json.dumps, lines)))
    options = ["-i", str(source), "-o", str(target), "--model", qwen3_path, "--device", "cpu", "--max-num-seqs", "2"]
    options += ["--num-kvcache-blocks", "64", "--max-model-len", "256"]
    command = [sys.executable, "-c", "import sys; from nanovllm.server import batch; sys.exit(batch())", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not target.exists() or target.read_text().count("\n") < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and error.splitlines()[-1].startswith("interrupted: ") and "Trace" not in error
    first = target.read_text().splitlines()
    assert 3 <= len(first) < 300
    assert all(json.loads(line)["response"]["status_code"] == 200 for line in first)
    options[options.index("--max-num-seqs") + 1] = "64"
    assert run_batch.main([*options, "--num-kvcache-blocks", "1024"]) == 0
    answers = target.read_text().splitlines()
    assert answers[: len(first)] == first
    assert sorted(int(json.loads(line)["custom_id"]) for line in answers) == list(range(300))
