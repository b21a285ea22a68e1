"""The model on the device: weights and KV in a pool's arenas, one forward pass a step.

Everything here runs on the engine's own thread, between or in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hotbunk.rollout import errors
from hotbunk.rollout.backends.reference.attention import NAME, StepContext
from hotbunk.rollout.backends.reference.options import ReferenceOptions
from hotbunk.rollout.backends.reference.scheduler import Plan
from hotbunk.rollout.binding import ModuleBinding, content_key, dtype_from
from hotbunk.rollout.contract import TARGET, Bucket, Manifest, Tag
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.kernels import as_bytes, fingerprint
from hotbunk.rollout.memory import HostPool

FAMILIES = ("llama", "qwen2", "qwen3")


class Drawn:
    """What one sequence got in a step: a token and its log-probability."""

    __slots__ = ("logprob", "token")

    def __init__(self, token: int, logprob: float) -> None:
        self.token = token
        self.logprob = logprob


class ModelRunner:
    """Loads a model into the pool, computes steps, and takes weights."""

    def __init__(self, options: ReferenceOptions) -> None:
        self.pool = HostPool(Path(options.backup_dir) if options.backup_dir else None)
        self._block_size = options.block_size
        self.blocks = options.kv_cache_tokens // options.block_size
        self.model = _load_model(options)
        self.config: Any = self.model.config
        self.max_context = int(self.config.max_position_embeddings)
        self.binding = ModuleBinding(self.model, self.pool, Tag.WEIGHTS, TARGET)
        self._kv = self._make_kv(dtype_from(options.dtype))

    def _make_kv(self, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        config = self.config
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, self.blocks * self._block_size, heads, dim)
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        arena = self.pool.arena(Tag.KV_CACHE, nbytes)
        region = arena.add("kv", nbytes)
        whole = torch.frombuffer(arena.view(region), dtype=dtype).view(shape)
        return [(layer[0], layer[1]) for layer in whole]

    @torch.inference_mode()
    def step(self, plan: Plan) -> list[Drawn | None]:
        """Compute a plan; one result a chunk, None where the prompt is not through yet."""
        chunks = plan.chunks
        ids = [t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        ends, at = [], -1
        for chunk in chunks:
            at += chunk.count
            if chunk.samples:
                ends.append(at)
        context = StepContext.of(plan, self._kv, self._block_size)
        hidden = self.model.model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            hotbunk_step=context,
        ).last_hidden_state
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        if not ends:
            return [None] * len(chunks)
        sampling = [c.sequence for c in chunks if c.samples]
        logits = self.model.lm_head(hidden[0, ends]).float()
        temperature = torch.tensor(
            [[s.request.sampling.temperature] for s in sampling], dtype=torch.float64
        )
        greedy = temperature == 0
        # Relative to the best one and in float64: the smallest temperature cannot overflow.
        relative = (logits - logits.amax(-1, keepdim=True)).double()
        logprobs = (relative / torch.where(greedy, 1.0, temperature)).log_softmax(-1)
        # One uniform number a token from the request's own generator: a draw does not depend on
        # which other requests share the step, nor on whether its KV was computed twice.
        uniform = torch.tensor([[s.draws.random()] for s in sampling], dtype=torch.float64)
        cdf = logprobs.exp().cumsum(-1)
        drawn = torch.searchsorted(cdf, uniform * cdf[:, -1:]).clamp_(max=cdf.shape[1] - 1)
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), drawn)
        chosen = logprobs.gather(1, tokens).view(-1).tolist()
        results = iter(
            [Drawn(t, lp) for t, lp in zip(tokens.view(-1).tolist(), chosen, strict=True)]
        )
        return [next(results) if c.samples else None for c in chunks]

    def digest(self, names: Collection[str] | None) -> dict[str, int]:
        """Fingerprints of all state, or of ``names``."""
        everything = {**self.binding.state, **self.binding.parameters}
        chosen = everything if names is None else names
        unknown = set(chosen) - everything.keys()
        if unknown:
            raise errors.UnknownNames(unknown)
        return {name: fingerprint(everything[name]) for name in chosen}

    def close(self) -> None:
        """Let go of the model, then of its memory."""
        del self.model, self.binding, self._kv
        self.pool.close()


class Writer:
    """Writes one update's buckets into the arena."""

    def __init__(self, runner: ModelRunner, manifest: Manifest) -> None:
        self._manifest = manifest
        # Each entry's places, and which name's content is there already (ties), or nothing.
        self._targets: list[list[tuple[torch.Tensor, str]]] = []
        taken: dict[Hashable, str] = {}
        for spec in manifest.tensors:
            tensors = {name: runner.binding.tensor(name) for name in spec.names}
            places = {content_key(name, tensor): tensor for name, tensor in tensors.items()}
            self._targets.append([(as_bytes(t), taken.get(key, "")) for key, t in places.items()])
            for key in places:
                taken.setdefault(key, spec.name)
        self.intake = Intake(manifest, [places[0][0].numel() for places in self._targets])

    @torch.no_grad()
    def write(self, bucket: Bucket) -> None:
        """Copy a bucket's pieces in.

        :raises TransferFailed: a broken table.
        :raises TiedMismatch: one tied tensor, two contents.
        """
        data = bucket.data
        if not isinstance(data, torch.Tensor):
            view = memoryview(data).cast("B")
            if view.readonly:  # torch wants buffers it could write to
                view = memoryview(bytearray(view))
            data = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0)
        for entry in self.intake.check(bucket, data.numel()):
            piece = data[entry.offset : entry.offset + entry.nbytes]
            for target, earlier in self._targets[entry.index]:
                place = target[entry.start : entry.start + entry.nbytes]
                if not earlier:
                    place.copy_(piece)
                elif not torch.equal(place, piece):
                    spec = self._manifest.tensors[entry.index]
                    raise errors.TiedMismatch({spec.name, earlier})

    def differing(self, expected: Mapping[str, int]) -> list[str]:
        """Names whose content in the arena is not what was sent."""
        return [
            spec.name
            for spec, targets in zip(self._manifest.tensors, self._targets, strict=True)
            if any(fingerprint(t) != expected.get(spec.name) for t, _ in targets)
        ]


def _load_model(options: ReferenceOptions) -> Any:
    path = Path(options.model)
    if not (path / "config.json").is_file():
        raise errors.ConfigError(f"no model at {options.model!r}: config.json is missing")
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in FAMILIES:
        raise errors.Unsupported(
            f"model type {config.model_type!r}", "reference", f"it runs {', '.join(FAMILIES)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise errors.Unsupported(f"layers of kind {sorted(kinds)}", "reference")
    dtype = dtype_from(options.dtype)
    build: Callable[[], Any]
    if options.load == "empty":
        build = lambda: AutoModelForCausalLM.from_config(config, dtype=dtype)  # noqa: E731
    else:
        if not any(path.glob("*.safetensors")):
            raise errors.ConfigError(f"no weights at {options.model!r}: no *.safetensors file")
        build = lambda: AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)  # noqa: E731
    with torch.random.fork_rng():  # building draws numbers; the caller's stream is not ours
        model = build()
    model = model.eval().requires_grad_(False)
    model.set_attn_implementation(NAME)
    return model
