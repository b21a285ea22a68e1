"""Model directories: tiny models, tokenizers, and directories that are not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from hotbunk.rollout.errors import ConfigError, UsageError
from hotbunk.trainer_hooks.recipes import models
from hotbunk.trainer_hooks.recipes.tasks import Sample
from hotbunk.trainer_hooks.recipes.tokenizer import ByteTokenizer

FAMILIES = ["llama", "qwen2", "qwen3"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return models.build_tiny(tmp_path / "tiny")


# -- byte tokenizer ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "123=", "héllo ☃ 𝄞", "\x00\n\t", "a" * 5000])
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_specials_are_left_out_and_bad_bytes_keep_their_places() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, 49, 50, 257, 258]) == "12"
    # Three bytes of a longer character: three marks, so that what follows keeps its position.
    assert tokenizer.decode([0xF0, 0x9D, 0x84, 49]) == "\ufffd\ufffd\ufffd1"
    assert tokenizer.decode([0xFF, 0xC0, 49]) == "\ufffd\ufffd1"


@pytest.mark.parametrize("token", [-1, 259, 10**6])
def test_ids_out_of_range(token: int) -> None:
    with pytest.raises(UsageError, match="outside"):
        ByteTokenizer().decode([49, token])


def test_chat_without_a_template_is_a_transcript() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "user: hi\nassistant: "


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"type":"byte"}', '{"type":"byte","bos_id":1,"eos_id":2,"pad_id":3}'],
)
def test_broken_tokenizer_file(tiny: Path, content: str) -> None:
    (tiny / "byte_tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="byte tokenizer"):
        models.load_bundle(tiny)


def test_transformers_reads_the_same_tokenizer(tiny: Path) -> None:
    ours, theirs = ByteTokenizer(), transformers.AutoTokenizer.from_pretrained(tiny)
    every_byte = bytes(range(256)).decode("latin-1")
    for text in ("123=", "héllo ☃ 𝄞\n\t", "", " it's  2 spaces", every_byte):
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert len(theirs) == ours.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 257, 258)
    wrapped = models.HFTokenizer(theirs)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert wrapped.encode_chat(chat) == ours.encode_chat(chat)
    assert wrapped.decode([256, 49, 257, 258]) == "1"
    theirs.chat_template = None
    assert wrapped.encode_chat(chat) == ours.encode_chat(chat)
    with pytest.raises(UsageError, match="outside"):
        wrapped.decode([259])
    theirs.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence"):
        models.HFTokenizer(theirs)


# -- tiny models ------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_loads_the_same_both_ways(tmp_path: Path, family: str, tied: bool) -> None:
    path = models.build_tiny(tmp_path / "m", family=family, tied=tied, scale=4)
    bundle = models.load_bundle(path)
    ours = models.load_model(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.tensor([bundle.tokenizer.encode("123=")])
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert ours.config.model_type == family
    assert bundle.config.max_position_embeddings >= 1024
    state = models.load_state(path)
    assert ("lm_head.weight" in state) != tied
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert 300_000 < sum(parameter.numel() for parameter in ours.parameters()) < 600_000
    assert all(parameter.dtype == torch.float32 for parameter in ours.parameters())


def test_same_seed_same_bytes_and_no_global_randomness(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    files = [
        models.build_tiny(tmp_path / name, seed=seed) / "model.safetensors"
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != files[2].read_bytes()


def test_every_tensor_of_two_seeds_differs(tmp_path: Path) -> None:
    one = models.load_state(models.build_tiny(tmp_path / "a", family="qwen2", seed=1))
    two = models.load_state(models.build_tiny(tmp_path / "b", family="qwen2", seed=2))
    assert one.keys() == two.keys()
    assert any(name.endswith(".bias") for name in one)
    for name in one:
        assert not torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_scale_four_makes_a_usable_oracle(tmp_path: Path, family: str) -> None:
    prompts = [f"{n}=" for n in range(100, 800, 100)]
    outputs = []
    for seed in (1, 2):
        path = models.build_tiny(tmp_path / str(seed), family=family, seed=seed, scale=4)
        model, tokenizer = models.load_model(path), ByteTokenizer()
        outputs.append(
            [
                model.generate(
                    torch.tensor([tokenizer.encode(prompt)]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=8,
                    do_sample=False,
                )[0, len(prompt) :].tolist()
                for prompt in prompts
            ]
        )
    assert all(one != two for one, two in zip(*outputs, strict=True))


def test_a_config_is_never_shared(tiny: Path) -> None:
    bundle = models.load_bundle(tiny)
    assert bundle.config is not bundle.config
    trainer, engine = models.load_model(tiny), models.load_model(tiny)
    engine.set_attn_implementation("eager")
    assert trainer.config._attn_implementation == "sdpa"
    assert bundle.config._attn_implementation != "eager"


@pytest.mark.parametrize(
    "wrong",
    [
        {"family": "lama"},
        {"hidden": 0},
        {"layers": 0},
        {"hidden": 100, "heads": 8},
        {"heads": 4, "kv_heads": 3},
        {"context": 0},
    ],
)
def test_impossible_sizes(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        models.build_tiny(tmp_path / "m", **wrong)  # type: ignore[arg-type]


def test_encode_sample(tiny: Path) -> None:
    tokenizer = models.load_bundle(tiny).tokenizer
    assert models.encode_sample(tokenizer, Sample("ab", "c")) == [97, 98]
    chat = Sample("user: hi", "c", messages=({"role": "user", "content": "hi"},))
    assert tokenizer.decode(models.encode_sample(tokenizer, chat)).endswith("assistant: ")


# -- directories that are not whole -----------------------------------------------------------


def test_missing_parts(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model directory"):
        models.load_bundle(tmp_path / "none")
    with pytest.raises(ConfigError, match="there is no model directory"):
        models.load_state(tiny / "config.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        models.load_config(empty)
    with pytest.raises(ConfigError, match="no safetensors weights"):
        models.load_state(empty)
    with pytest.raises(ConfigError, match="no tokenizer"):
        models.load_bundle(empty)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": "no_such_family"}'])
def test_broken_config(tiny: Path, content: str) -> None:
    (tiny / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        models.load_config(tiny)


def test_cut_and_foreign_weights(tmp_path: Path, tiny: Path) -> None:
    path = tiny / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        models.load_model(tiny)
    deeper = models.build_tiny(tmp_path / "deeper", layers=3)
    path.write_bytes((deeper / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="unknown tensors"):
        models.load_model(tiny)
    (deeper / "model.safetensors").write_bytes(whole)
    with pytest.raises(ConfigError, match="lack tensors"):
        models.load_model(deeper)
    wider = models.build_tiny(tmp_path / "wider", hidden=64)
    path.write_bytes((wider / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="do not fit"):
        models.load_model(tiny)


def test_shards(tiny: Path) -> None:
    from safetensors.torch import save_file

    state = models.load_state(tiny)
    names = sorted(state)
    (tiny / "model.safetensors").unlink()
    files = {name: f"part-{place % 2}.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, tiny / file)
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    again = models.load_state(tiny)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in names)

    (tiny / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks its weight file part-1\.safetensors"):
        models.load_state(tiny)
    for hostile in ('{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {}}', "{", "[]"):
        index.write_text(hostile)
        with pytest.raises(ConfigError, match=r"index\.json"):
            models.load_state(tiny)


def test_more_ids_than_rows(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config["vocab_size"] = 100
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has 259 ids and the model 100"):
        models.load_bundle(tiny)
