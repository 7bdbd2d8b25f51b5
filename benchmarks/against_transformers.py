"""jspec beside transformers on the same prompts, the same weights and the same cores, in one run.

    pip install -e '.[cli,compare]' && python benchmarks/against_transformers.py

Each repeat times all four in turn (transformers generate, transformers with prompt lookup, jspec
plain, jspec n-gram), greedy, float32, batch 1; whole calls, prompt included. Prints tokens per second,
the ratio to transformers of the same repeat (median), and whether the tokens are equal.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

import jspec
from jspec.bench.prompts import PROMPTS, asked
from jspec.loading import embedded_model, with_drafter


def main() -> None:
    """Times everything and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(PROMPTS), choices=list(PROMPTS))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    path = embedded_model()
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    plain = jspec.load(
        drafter="plain", max_slots=1, prefix_cache=False, compilation_cache="~/.cache/jspec/compiled"
    )
    ngram = with_drafter(plain, "ngram")
    settings = jspec.Settings(max_tokens=arguments.max_tokens)
    assert plain.tokenizer is not None

    def transformers(ids: list[int], **options: object) -> tuple[int, ...]:
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            out = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=arguments.max_tokens,
                do_sample=False,
                eos_token_id=list(plain.eos_ids),
                pad_token_id=plain.eos_ids[0],
                **options,
            )
        return tuple(out[0, len(ids) :].tolist())

    variants = {
        "transformers": transformers,
        "transformers, prompt lookup": lambda ids: transformers(ids, prompt_lookup_num_tokens=7),
        "jspec plain": lambda ids: plain.generate([ids], settings)[0].token_ids,
        "jspec n-gram": lambda ids: ngram.generate([ids], settings)[0].token_ids,
    }
    for task in arguments.tasks:
        prompts = [plain.tokenizer.chat(asked(text)) for text in PROMPTS[task]]
        tokens = {name: [run(ids) for ids in prompts] for name, run in variants.items()}  # also warms up
        speeds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(arguments.repeats):
            for name, run in variants.items():
                start = time.perf_counter()
                count = sum(len(run(ids)) for ids in prompts)
                speeds[name].append(count / (time.perf_counter() - start))
        print(
            f"\n{task}: {len(prompts)} prompts, {arguments.max_tokens} tokens at most, {torch.get_num_threads()} threads"
        )
        for name in variants:
            ratio = statistics.median(
                a / b for a, b in zip(speeds[name], speeds["transformers"], strict=True)
            )
            same = tokens[name] == tokens["transformers"]
            print(
                f"  {name:<28} {statistics.median(speeds[name]):7.1f} tokens/s  {ratio:5.2f}x  equal tokens: {same}"
            )


if __name__ == "__main__":
    main()
