"""``python -m hotbunk.trainer_hooks.verl.tiny DIR``: a problem to try verl with on a laptop.

Made from nothing: a random Qwen2 of two layers, a byte-level tokenizer with a chat template, 64 questions
and a reward that a random model learns quickly. ``configs/verl/tiny.yaml`` names them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):
    """How much of the response is of the letters a to e: a random model learns it quickly."""
    text = solution_str or ""
    return sum(letter in "abcde" for letter in text) / max(1, len(text))
'''


def make(root: Path) -> Path:
    """Write ``model``, ``train.parquet`` and ``reward.py`` into ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    asked = [f"what is {i} plus {j} ? answer {i + j}" for i in range(30) for j in range(30)]
    tokenizer.train_from_iterator(asked, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT,
    )
    fast.save_pretrained(root / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(root / "model")
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"what is {i} plus {i + 1} ?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(64)
    ]
    table = import_module("pyarrow").Table.from_pylist(rows)
    import_module("pyarrow.parquet").write_table(table, root / "train.parquet")
    (root / "reward.py").write_text(REWARD)
    return root


if __name__ == "__main__":
    make(Path(sys.argv[1]))
