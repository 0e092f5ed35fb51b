"""Ask a model two things at once: `python example.py`, or `python example.py --model PATH` for your own."""

import argparse
from pathlib import Path

from nanovllm import LLM, SamplingParams
from scripts.demo_model import demo_model_path

QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "What is gravity?",
]


def main():
    parser = argparse.ArgumentParser(description="Answer two questions with a language model.")
    parser.add_argument("--model", help="a Hugging Face directory; default: ~/huggingface/Qwen3-0.6B or a demo model")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens per answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.3, help="0 is greedy (default: %(default)s)")
    args = parser.parse_args()

    qwen3 = Path.home() / "huggingface" / "Qwen3-0.6B"
    model = args.model or (qwen3 if qwen3.is_dir() else demo_model_path())

    llm = LLM(model)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]

    for question, answer in zip(QUESTIONS, llm.chat(conversations, params), strict=True):
        print(f"\n> {question}\n\n{answer['text'].strip()}")


if __name__ == "__main__":
    main()
