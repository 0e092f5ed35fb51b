"""Many clients at once, and a long prompt among short ones."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
from checkpoints import make_checkpoint
from server_helpers import MODEL, serving

from nanovllm import LLM, SamplingParams

LONG, CHUNK = 4000, 512


def test_two_hundred_clients_get_what_each_would_get_alone(qwen3_path):
    """Greedy, streams among them; alone: one prompt at a time, offline."""
    prompts = [f"Number {i} of many" for i in range(200)]
    knobs = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 1024, "max_model_len": 512}
    params = SamplingParams(temperature=0, max_tokens=10)
    with LLM(qwen3_path, **knobs) as llm:
        expected = [llm.generate(prompt, params, use_tqdm=False)[0]["text"] for prompt in prompts]
    assert len(set(expected)) > 20

    async def ask(api, i):
        given = {"model": MODEL, "prompt": prompts[i], "temperature": 0, "max_tokens": 10}
        if i % 2:
            return (await api.completions.create(**given)).choices[0].text
        stream = await api.completions.create(**given, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them(url):
        limits = httpx.Limits(max_connections=None)
        async with openai.AsyncOpenAI(
            base_url=url + "/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(limits=limits, timeout=120),
        ) as api:
            return await asyncio.gather(*(ask(api, i) for i in range(len(prompts))))

    with serving(qwen3_path, **knobs) as (service, url):
        most_at_once, publish = 0, service.thread._publish

        def watch(touched):
            nonlocal most_at_once
            most_at_once = max(most_at_once, len(service.engine.scheduler.running))
            publish(touched)

        service.thread._publish = watch
        assert asyncio.run(all_of_them(url)) == expected
        assert most_at_once > 20


def test_a_long_prompt_comes_in_chunks_between_the_others_tokens(tmp_path):
    """While 4,000 tokens are prefilled, a running stream gets its next token after at most one chunk, and a short
    request that comes meanwhile has its first token with the next chunk. Counted in steps, not in seconds."""
    path = make_checkpoint(tmp_path, "qwen3", max_position_embeddings=8192, tokenizer=True)
    knobs = {"max_model_len": 4500, "num_kvcache_blocks": 1024, "max_num_batched_tokens": CHUNK}
    with serving(path, **knobs) as (service, url), ThreadPoolExecutor(3) as pool:
        steps, scheduler, long_has_begun = [], service.engine.scheduler, threading.Event()
        schedule = scheduler.schedule

        def watch():
            step = schedule()
            if step is not None:
                steps.append(([(chunk.row, len(chunk.token_ids)) for chunk in step.chunks], list(step.decode_rows)))
            if step is not None and step.num_tokens >= CHUNK and not long_has_begun.is_set():
                long_has_begun.set()
                deadline = time.time() + 20
                while service.thread.num_jobs < 3 and time.time() < deadline:  # until the short one has come
                    time.sleep(0.001)
            return step

        def ask(prompt, max_tokens):
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
            return httpx.post(url + "/v1/completions", json=body, timeout=60).raise_for_status()

        scheduler.schedule = watch
        answers = [pool.submit(ask, [5, 6, 7], 1500)]
        while len(steps) < 5:
            time.sleep(0.001)
        answers.append(pool.submit(ask, [i % 500 for i in range(LONG)], 1))
        assert long_has_begun.wait(20)
        answers.append(pool.submit(ask, [8, 9, 10], 1))
        for answer in answers:
            answer.result()

    prefills = [i for i, (chunks, _) in enumerate(steps) if chunks]
    begun, after = prefills[1:3]
    stream, long = (steps[i][0][-1][0] for i in prefills[:2])
    assert all(sum(size for _, size in chunks) <= CHUNK for chunks, _ in steps)
    assert sum(size for chunks, _ in steps[begun:] for row, size in chunks if row == long) == LONG
    assert all(steps[i + 1] == ([], [stream]) for i in prefills[3:-1])  # a token of the stream after every chunk
    assert sorted(size for _, size in steps[after][0]) == [3, CHUNK - 3]  # the short prompt, and the long one's rest
    assert after == begun + 2 and prefills[-1] - begun == 2 * (-(-(LONG + 3) // CHUNK) - 1)
