"""Program that trains every preset on two sharded ranks, some on four, and all in one process.

`python -m helpers.sharded_ranks FOLDER` forks the ranks once, and they train the presets one after
another in float64. Each rank writes the largest differences of its weights to those of one process.
Two ranks also train one preset with every optimiser.
"""

import functools
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from helpers.two_ranks import batches, fork_ranks, largest_difference, transformer
from lit_attn.attention.spec import PRESETS
from lit_attn.attention.statistics import end_step, leave_steps_to_loop
from lit_attn.models.blocks import recompute_blocks
from lit_attn.models.sharding import gather, shard
from lit_attn.optim.base import Optimizer
from lit_attn.optim.jax_adamw import JaxAdamW
from lit_attn.optim.muon import Muon
from lit_attn.optim.set_adam import SetAdam
from lit_attn.optim.standard import SGD, Adam, AdamW

WORLD = 4
STEPS = 2
CLIP = 0.3
PLAIN = SGD(lr=0.1)
# Four ranks have parts of two heads' parameters that are empty.
ON_FOUR = ["standard", "mgk-soft-e", "dcmha-all", "differential", "sink", "gated-heads", "linear"]
# Adam makes whole steps of gradients that are rounding errors alone, unless eps exceeds them.
OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Adam(lr=0.01, eps=1e-3),
    "adamw": AdamW(lr=0.01, eps=1e-3, weight_decay=0.1, decay="weights"),
    "set-adam": SetAdam(lr=0.01, eps=1e-6),
    "jax-adamw": JaxAdamW(lr=0.01, eps=1e-3, moment="bfloat16", bfloat16=("*.mlp.*",)),
    "muon": Muon(lr=0.01),
}


def train(
    preset: str,
    mesh: DeviceMesh | None = None,
    *,
    is_recomputed: bool = False,
    chosen: Optimizer = PLAIN,
) -> dict[str, Tensor]:
    """Train a network on the ranks of `mesh`, or in this process alone; return its full weights."""
    rank = 0 if mesh is None else mesh.get_local_rank()
    world = 1 if mesh is None else mesh.size()
    torch.manual_seed(0)
    network = transformer(preset, depth=1).double().train()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    leave_steps_to_loop(network)
    reduce = None
    if mesh is not None:
        shard(network, mesh)
        reduce = functools.partial(distributed.all_reduce, group=mesh.get_group())
    if is_recomputed:
        recompute_blocks(network)
    optimizer = chosen.build(network, fused=mesh is None or chosen.fuses_shards)
    for number, (images, labels) in enumerate(batches()[0][:STEPS]):
        optimizer.zero_grad()
        F.cross_entropy(network(images[rank::world]), labels[rank::world]).backward()
        if number == 0:
            # Clipping would hide a wrong factor of the gradients, so the next step is without it.
            chosen.clip(list(network.parameters()), CLIP)
        optimizer.step()
        end_step(network, reduce)
    weights: dict[str, Tensor] = gather(network.state_dict(), is_kept=True)
    return weights


def train_presets(rank: int, folder: Path) -> None:
    """Train all presets with the other ranks, and write the differences that this rank has found.

    Ranks 0 and 1 train the even presets as a pair, and recompute the blocks; 2 and 3 the odd ones.
    All ranks together train those of ON_FOUR.
    """
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    everyone = init_device_mesh("cpu", (WORLD,))
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "pair"))["pair"]
    differences = {}
    for number, preset in enumerate(PRESETS):
        shared = train(preset, everyone) if preset in ON_FOUR else None
        if number % 2 != rank // 2:
            continue
        shared_by_two = train(preset, pair, is_recomputed=True)
        # The two ranks of a pair compare its presets in turn.
        if number // 2 % 2 == rank % 2:
            alone = train(preset)
            differences[f"{preset} on 2"] = largest_difference(shared_by_two, alone)
            if shared is not None:
                differences[f"{preset} on 4"] = largest_difference(shared, alone)
    for number, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        if number % 2 == rank // 2:
            shared = train("standard", pair, chosen=optimizer)
            if rank % 2 == 0:
                alone = train("standard", chosen=optimizer)
                differences[name] = largest_difference(shared, alone)
    (folder / f"differences{rank}.json").write_text(json.dumps(differences))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(train_presets, Path(sys.argv[1]), WORLD)
