"""lm-eval's own API models against the server, beside its `hf` model on the same checkpoint: the same scores.

On a tiny random model, and on the demo model where it lies in the cache. Nothing is downloaded.
"""

import json
import math
import os
from pathlib import Path

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lm_eval
import pytest
from demo_model import MODEL_NAME
from server_helpers import MODEL, serving

DEMO = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm" / MODEL_NAME
PATHS = [
    "tiny",
    pytest.param("demo", marks=[pytest.mark.slow, pytest.mark.skipif(not DEMO.is_dir(), reason="no demo model here")]),
]
QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome", " Madrid"], 0),
    ("The sun rises in the", [" west", " east", " kitchen"], 1),
    ("Two plus two equals", [" four", " seven", " purple"], 0),
    ("Water is made of hydrogen and", [" gold", " carbon", " oxygen"], 2),
    ("A dog is a kind of", [" animal", " stone", " number"], 0),
    ("The opposite of hot is", [" blue", " cold", " loud"], 1),
    ("Ice is frozen", [" water", " wood", " fire and smoke"], 0),
    ("Shakespeare wrote the play", [" Star Wars", " Hamlet", " the telephone book"], 1),
]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Australia": "Canberra"}
CHOOSE = {
    "task": "choose", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip
CONTINUE = {
    "task": "continue", "output_type": "generate_until", "doc_to_text": "What is the capital of {{q}}?",
    "doc_to_target": "The capital of {{q}} is {{answer}}.",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


@pytest.fixture(scope="module", params=PATHS)
def running(request):
    """Path of a checkpoint and the address of a server that has it."""
    path = request.getfixturevalue("qwen3_path") if request.param == "tiny" else str(DEMO)
    with serving(path) as (_, url):
        yield path, url


@pytest.fixture
def evaluate(tmp_path):
    """evaluate(task, questions, model, model_args): metrics, and one sample per question in order."""
    data = tmp_path / "questions.jsonl"
    dataset = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path)}

    def run(task, questions, model, model_args, chat=False):
        data.write_text("".join(json.dumps(question) + "\n" for question in questions))
        config = {**task, "dataset_path": "json", "dataset_kwargs": dataset, "test_split": "test"}
        found = lm_eval.simple_evaluate(
            model=model, model_args=model_args, tasks=[config], apply_chat_template=chat, bootstrap_iters=0
        )
        samples = sorted(found["samples"][task["task"]], key=lambda sample: sample["doc_id"])
        return found["results"][task["task"]], samples

    return run


def hf_args(path):
    return {"pretrained": path, "device": "cpu", "dtype": "float32", "batch_size": 1}


def test_local_completions_scores_as_hf_does(running, evaluate):
    """acc to 1e-3, each log likelihood to 1e-2, and whether it is the greedy one."""
    path, url = running
    questions = [{"q": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS]
    remote = {
        "model": MODEL,
        "base_url": f"{url}/v1/completions",
        "tokenizer": path,
        "tokenizer_backend": "huggingface",
        "max_length": 512,
    }
    ours, our_samples = evaluate(CHOOSE, questions, "local-completions", remote | {"num_concurrent": 4})
    theirs, their_samples = evaluate(CHOOSE, questions, "hf", hf_args(path))
    for metric in ("acc,none", "acc_norm,none"):
        assert ours[metric] == pytest.approx(theirs[metric], abs=1e-3)
    difference = 0.0
    for mine, other in zip(our_samples, their_samples, strict=True):
        for (logprob, greedy), (expected, expected_greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            difference = max(difference, abs(float(logprob) - float(expected)))
            assert greedy == expected_greedy
    assert difference < 1e-2 and math.isfinite(difference)
    print(f"acc {ours['acc,none']} acc_norm {ours['acc_norm,none']} log likelihoods differ by {difference:.1e}")


def test_local_chat_completions_answers_as_hf_does(running, evaluate):
    """generate_until through the chat route and the model's template: the same text, the same exact_match."""
    path, url = running
    questions = [{"q": country, "answer": city} for country, city in CAPITALS.items()]
    remote = {"model": MODEL, "base_url": f"{url}/v1/chat/completions", "max_length": 512}
    ours, our_samples = evaluate(CONTINUE, questions, "local-chat-completions", remote, chat=True)
    theirs, their_samples = evaluate(CONTINUE, questions, "hf", hf_args(path), chat=True)
    texts, expected = ([sample["resps"][0][0] for sample in samples] for samples in (our_samples, their_samples))
    assert texts == expected and any(texts)
    assert ours["exact_match,none"] == theirs["exact_match,none"]
    print(f"exact_match {ours['exact_match,none']}, first answer {texts[0]!r}")
