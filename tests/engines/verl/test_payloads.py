"""Images, videos and audio go to the engine, routed experts come back; nothing of them is lost."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from hotbunk.rollout.contract import (
    Deployment,
    FinishReason,
    GenerateRequest,
    TokenChunk,
    Version,
)
from hotbunk.rollout.errors import UsageError
from hotbunk.rollout.process import ReplicaSpec
from hotbunk.rollout.process.messages import encode
from hotbunk.rollout.process.verbs import Generate
from hotbunk.trainer_hooks.verl.payloads import payload
from hotbunk.trainer_hooks.verl.server import RolloutServer, ServerOptions

PICTURE = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
VIDEO = (torch.arange(24, dtype=torch.float16).reshape(2, 3, 4), {"fps": 2.0})
SOUND = np.linspace(-1, 1, 5, dtype=np.float32)


class Replica:
    """Keeps what it is asked, as an engine's own process is told it; answers with experts."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.got = msgspec.msgpack.decode(encode(Generate(request)), type=Generate).request
        version = Version(0, 3)
        yield TokenChunk(
            request.request_id, (7, 8), (-0.5, -0.25), version, routed_experts=[[1, 2], [0, 3]]
        )
        yield TokenChunk(
            request.request_id,
            (9,),
            (-0.125,),
            version,
            finish_reason=FinishReason.LENGTH,
            routed_experts=[[2, 3]],
        )


@pytest.mark.anyio
async def test_media_reach_the_engine_and_routed_experts_come_back() -> None:
    spec = ReplicaSpec("oracle", {}, "r")
    server = RolloutServer(encode(spec), encode(ServerOptions(Deployment.STANDALONE)))
    replica: Any = Replica()
    server._started = replica
    done = await server.generate(
        [1, 2],
        {"logprobs": True, "max_tokens": 3},
        "one",
        image_data=[PICTURE],
        video_data=[VIDEO],
        audio_data=[SOUND],
        mm_processor_kwargs={"fps": 2.0},
        custom={"mine": 1},
    )
    assert done.token_ids == [7, 8, 9]
    assert done.log_probs == [-0.5, -0.25, -0.125]
    assert done.routed_experts == [[1, 2], [0, 3], [2, 3]]
    assert done.extra_fields["min_global_steps"] == done.extra_fields["max_global_steps"] == 3
    media = replica.got.media
    (image,) = media["image"]
    assert Image.open(io.BytesIO(image["data"])).tobytes() == PICTURE.tobytes()
    ((frames, about),) = media["video"]
    whole = np.frombuffer(frames["data"], frames["dtype"]).reshape(frames["shape"])
    assert np.array_equal(whole, VIDEO[0].numpy())
    assert about == {"fps": 2.0}
    (sound,) = media["audio"]
    assert np.array_equal(np.frombuffer(sound["data"], sound["dtype"]), SOUND)
    assert media["mm_processor_kwargs"] == {"fps": 2.0}
    assert replica.got.metadata == {"custom": {"mine": 1}}


def test_what_cannot_travel_is_refused_by_its_type() -> None:
    with pytest.raises(UsageError, match="object"):
        encode(payload({"image": object()}))
