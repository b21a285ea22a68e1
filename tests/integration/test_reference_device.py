"""The reference engine on a GPU, as far as a machine without one can tell: every operand of a step
is on the device it belongs to. Torch's fake tensors know devices and have no memory.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hotbunk.rollout.backends.reference import runner as runner_module
from hotbunk.rollout.backends.reference.attention import NAME
from hotbunk.rollout.backends.reference.blocks import BlockPool
from hotbunk.rollout.backends.reference.lora import Adapter, AdapterBank
from hotbunk.rollout.backends.reference.options import ReferenceOptions
from hotbunk.rollout.backends.reference.runner import ModelRunner
from hotbunk.rollout.backends.reference.scheduler import Scheduler, Sequence
from hotbunk.rollout.contract import GenerateRequest, Sampling
from hotbunk.rollout.errors import ConfigError

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def runner_on(device: str, model: Any) -> Any:
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    held[name] = nn.Parameter(empty, False) if held is module._parameters else empty
    model.set_attn_implementation(NAME)
    runner = ModelRunner.__new__(ModelRunner)
    runner.model, runner.device, runner._block_size = model, torch.device(device), 4
    pool = SimpleNamespace(device=device)
    runner.adapters = AdapterBank(model, pool, torch.float32)  # type: ignore[arg-type]
    layer = "model.layers.0.self_attn.q_proj"
    pair = {"A": torch.empty(2, 32, device=device), "B": torch.empty(32, 2, device=device)}
    runner.adapters._adapters["a"] = Adapter(None, {}, {layer: pair})  # type: ignore[arg-type]
    for path, module in runner.adapters._layers.items():
        module.register_forward_hook(runner.adapters._hook(path))
    runner._kv = torch.empty(2, 2, 64, 2, 8, device=device)
    return runner


def steps(device: str) -> None:
    """A few steps over fake memory: prompts, both, single tokens alone; rows of an adapter."""
    seen: list[torch.Tensor] = []

    def draw(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        seen.append(logits)
        return [1] * len(sequences)

    runner_module.draw = draw  # type: ignore[assignment]
    scheduler = Scheduler(BlockPool(16, 4, caching=True), max_num_seqs=4, max_num_batched_tokens=8)
    for number, adapter in enumerate((None, "a", None)):
        sampling = Sampling(0.0, max_tokens=4)
        request = GenerateRequest(str(number), tuple(range(5)), sampling, adapter=adapter)
        scheduler.add(Sequence(request, 0))
    model = LlamaForCausalLM(CONFIG).eval()
    with FakeTensorMode():
        runner = runner_on(device, model)
        for _ in range(4):
            plan = scheduler.plan(str)
            drawn = runner.step(plan)
            scheduler.computed(plan, str)
            for chunk, token in zip(plan.chunks, drawn, strict=True):
                if token is not None:
                    chunk.sequence.tokens.append(token)
    assert plan.decode
    assert seen
    assert all(logits.device.type == "cpu" for logits in seen)


def test_a_step_keeps_every_operand_on_its_device() -> None:
    """Operands on two devices are an error of the fake tensors. In a process of its own: the
    device, which has no kernels, is there for good."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch knows no devices without kernels")
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_devices_that_are_none_are_refused() -> None:
    for device in ("gpu", "cuda:", "cuda:x", "npu", "CPU"):
        with pytest.raises(ConfigError, match="is not cpu, cuda or cuda:N"):
            ReferenceOptions(model="unread", device=device)
    for device in ("cpu", "cuda", "cuda:11"):
        ReferenceOptions(model="unread", device=device)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_read_into_the_arena_and_exist_once(
    tiny: Any, family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(family, tied=tied)
    whole = AutoModelForCausalLM.from_pretrained(path)

    def never(*args: Any, **kw: Any) -> Any:
        raise AssertionError("a second copy of the weights")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    runner = ModelRunner(ReferenceOptions(model=str(path), kv_cache_tokens=64))
    for name, parameter in whole.named_parameters():
        assert torch.equal(runner.binding.tensor(name), parameter), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(runner.binding.tensor(name), buffer), name
    runner.close()
    empty = ModelRunner(ReferenceOptions(model=str(path), load="empty", kv_cache_tokens=64))
    assert not any(p.any() for p in empty.model.parameters())
    empty.close()


def test_a_checkpoint_that_does_not_fit_its_model_is_a_typed_error(
    tiny: Any, tmp_path: Path
) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        ModelRunner(ReferenceOptions(model=str(tmp_path / "model"), kv_cache_tokens=64))
    file.write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match="no weights"):
        ModelRunner(ReferenceOptions(model=str(tmp_path / "model"), kv_cache_tokens=64))


if __name__ == "__main__":
    backend_registration._setup_privateuseone_for_python_backend("gpu")  # type: ignore[no-untyped-call]
    # Else a tensor of one element is computed for real, too, for which there is no kernel.
    fake_tensor.CONSTANT_NUMEL_LIMIT = 0
    steps("gpu:0")
