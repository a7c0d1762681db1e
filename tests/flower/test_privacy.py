"""What a client of a deployment holds, and what never crosses the network."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, load_file
from transformers import ViTImageProcessor

from hf_coefsfl.flower.wire import chunk_of, has_chunk, header_of
from tests.support.deployed import ImageSite, LocalGrid, Site, client_process
from tests.support.federated import same, weights


def live_tensors() -> set[str]:
    """Return checksums of all tensors that were in the process of the clients, and watch no longer."""
    from hf_coefsfl.flower import client_round

    client_round.ClientRound.run = client_round.PLAIN  # type: ignore[attr-defined]
    return client_round.SEEN  # type: ignore[attr-defined]


def watch() -> None:
    """Note every tensor that is there when a client has done a step."""
    import gc

    from hf_coefsfl.flower import client_round

    run = client_round.ClientRound.run
    client_round.SEEN = set()  # type: ignore[attr-defined]

    def watched(self: Any, *args: Any) -> Any:
        done = run(self, *args)
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor) and found.device.type == "cpu" and found.numel() > 8:
                client_round.SEEN.add(checksum(found))  # type: ignore[attr-defined]
        return done

    client_round.ClientRound.run = watched  # type: ignore[method-assign]
    client_round.PLAIN = run  # type: ignore[attr-defined]


def checksum(t: torch.Tensor) -> str:
    data = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(t.shape)}".encode() + data).hexdigest()


def test_a_client_never_holds_the_servers_weights(site: Site) -> None:
    """Neither in its folder nor in its memory; what it should hold is found the same way."""
    client_process().submit(watch).result()
    trainer, _ = site.deployed(num_rounds=1)
    seen = client_process().submit(live_tensors).result()
    server = {name: p for name, p in trainer.split.model.named_parameters() if name in trainer.split.owners.server}
    frozen = {name: p for name, p in trainer.split.model.named_parameters() if not p.requires_grad and p.numel() > 8}
    constant = {name for name, p in frozen.items() if len(set(p.flatten().tolist())) == 1}  # norms: ones and zeros
    on_client = {name for name in frozen if name in trainer.split.owners.client and name not in constant}
    assert len(on_client) > 5 and {name for name in on_client if checksum(frozen[name]) in seen} == on_client
    assert not {name for name in server if name not in constant and checksum(server[name]) in seen}
    files = load_file(site.folder / "half" / "client" / "model.safetensors")
    assert not {name for name in files if name in trainer.split.owners.server - trainer.split.owners.client}


def payloads(grid: LocalGrid) -> list[bytes]:
    """Return everything that crossed the network, as bytes."""
    found = []
    for message in (*grid.sent, *grid.received):
        found.append(json.dumps({k: str(v) for k, v in header_of(message.content).items()}).encode())
        if has_chunk(message.content):
            found.append(chunk_of(message.content))
    return found


def test_no_raw_text_crosses(site: Site) -> None:
    """No token ids in any integer type, no words; labels do, as the loss needs them."""
    _, grid = site.deployed(num_rounds=1, method="vanilla")
    sent = payloads(grid)
    from tests.support.words import words_tokenizer

    tokenizer = words_tokenizer()
    checked = 0
    for client in range(2):
        for i in range(site.sizes[client]):
            text = site.row(client, i)["text"]
            if len(text.split()) < 3:
                continue
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32):
                data = torch.tensor(ids).to(dtype).numpy().tobytes()
                if len(data) >= 6:
                    assert not any(data in part for part in sent)
                    checked += 1
            assert not any(text.encode() in part for part in sent)
    assert checked > 10
    labels = [load(part)["0.labels.labels"] for part in sent if b"0.labels.labels" in part]
    assert labels, "labels were expected to cross"


def test_no_pixels_cross(tmp_path: Path) -> None:
    """No row of pixels, as they are stored or as the model gets them; the result is the simulation's here, too."""
    site = ImageSite(tmp_path, sizes=(4, 3))
    trainer, grid = site.deployed(num_rounds=1)
    assert same(weights(trainer), weights(site.simulated(num_rounds=1)))
    sent = payloads(grid)
    processor = ViTImageProcessor.from_pretrained(site.folder / "model")
    for client in range(2):
        for i in range(site.sizes[client]):
            image = site.row(client, i)["image"]
            values = processor(images=[image], return_tensors="pt")["pixel_values"][0]
            rows = [np.asarray(image)[0].tobytes(), *(values[channel, 0].numpy().tobytes() for channel in range(3))]
            assert not any(row in part for row in rows for part in sent)
