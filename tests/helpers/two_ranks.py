"""Small networks that two processes train together, and that one process trains alone.

`python -m helpers.two_ranks FOLDER` forks two processes that run `train_everything`, which writes
what differs.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from helpers.paths import EXPERIMENTS
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.attention.statistics import end_step, leave_steps_to_loop
from lit_attn.models import vit
from lit_attn.models.batch_norm import synchronise_batch_norms
from lit_attn.models.blocks import recompute_blocks
from lit_attn.models.vit import ViTConfig
from lit_attn.schema.plugins import load_parts
from lit_attn.training.several_devices import choose_ddp_options

load_parts([EXPERIMENTS / "token_mixers" / "token_mixers.py"])

WORLD = 2
STEPS, MICRO_BATCHES, ROWS = 2, 2, 4
CLASSES, SHAPE = 5, (3, 8, 8)


class Case(NamedTuple):
    """Function that builds a network, and what its training does besides."""

    build: Callable[[], nn.Module]
    is_checkpointed: bool = False


def transformer(attention: Any, ffn: bool = True, depth: int = 2) -> nn.Module:
    """Return a vision transformer of `depth` blocks on 16 tokens."""
    sizes = {"dim": 8, "depth": depth, "heads": 2, "patch": 2, "ffn": {"width": 8} if ffn else None}
    model = ViTConfig.model_validate({**sizes, "attention": attention})
    return vit.build(model, SHAPE, CLASSES)


class Normed(nn.Module):
    """Convolutions with every kind of batch norm."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.first = nn.BatchNorm2d(4, **options)
        self.second = BatchNormAct2d(4)
        self.third = nn.BatchNorm3d(4, affine=False)
        self.fourth = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.second(self.first(self.convolution(images)))
        x = self.third(x.unsqueeze(-1)).squeeze(-1).square()
        return self.head(self.fourth(x.mean((-2, -1))))


# The presets whose layers do more in a step than to compute a gradient, or in another order, and
# the standard layer. Every preset is trained with recomputed blocks, which includes what is done
# without.
PLAIN = ("standard", "mgk-soft-e", "mgk-hard", "dcmha", "differential", "value-residual")


def cases() -> dict[str, Case]:
    """Return presets, plain and checkpointed, combinations of the parts, mixers and batch norms."""
    built: dict[str, Case] = {}
    for name in PLAIN:
        built[name] = Case(lambda name=name: transformer(name))
    for name in PRESETS:
        built[f"{name} checkpointed"] = Case(lambda name=name: transformer(name), True)
    # A block without an FFN, and parts that leave projections without a gradient.
    for residual, zz, ffn, compose in (
        ("full", True, False, "key"),
        ("perpendicular", True, True, "query"),
        ("projected", False, False, "query"),
        ("projected", True, True, "none"),
        ("value", False, False, "none"),
        ("value", False, True, "none"),
    ):
        parts = {"residual": residual, "zz": zz, "compose": compose}
        name = f"residual={residual},zz={zz},ffn={ffn},compose={compose}"
        built[name] = Case(lambda parts=parts, ffn=ffn: transformer(parts, ffn))
    position = {"kind": "mixture", "prior": "m-step", "prior_scope": "position", "positions": 20}
    for scope in ("layer", "position"):
        similarity = position | {"prior_scope": scope}
        if scope == "layer":
            del similarity["positions"]
        spec = AttentionSpec.model_validate({"similarity": similarity})
        built[f"m-step of each {scope}"] = Case(lambda spec=spec: transformer(spec))
    for layer in ("GatedDeltaRule", "StateSpace"):
        mixer = {"kind": "module", "import": f"token_mixers:{layer}"}
        built[layer] = Case(lambda mixer=mixer: transformer(mixer))
        hybrid = mixer | {"layers": {"last": 1, "use": "standard"}}
        built[f"{layer} and attention"] = Case(lambda hybrid=hybrid: transformer(hybrid), True)
    built["batch norms"] = Case(Normed)
    built["batch norms with the mean of all batches"] = Case(lambda: Normed(momentum=None))
    return built


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Return the images and labels of each micro-batch of each step."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(STEPS):
        micro_batches = []
        for _ in range(MICRO_BATCHES):
            images = torch.randn(ROWS, *SHAPE, dtype=torch.double, generator=generator)
            labels = torch.randint(CLASSES, (ROWS,), generator=generator)
            micro_batches.append((images, labels))
        steps.append(micro_batches)
    return steps


def train(case: Case, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Return the state of the case's network after STEPS steps of accumulated gradients."""
    torch.manual_seed(0)
    network = case.build().double().train()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    leave_steps_to_loop(network)
    model: nn.Module = network
    if world > 1:
        synchronise_batch_norms(network)
        options = choose_ddp_options(network, MICRO_BATCHES)
        model = DistributedDataParallel(network, **options)
    if case.is_checkpointed:
        recompute_blocks(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for step in batches():
        optimizer.zero_grad()
        for images, labels in step:
            loss = F.cross_entropy(model(images[rank::world]), labels[rank::world])
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        end_step(network, distributed.all_reduce if world > 1 else None)
    return network.state_dict()


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def train_everything(rank: int, folder: Path) -> None:
    """Train all cases together with the other rank; write the differences to one process."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    errors: dict[str, float] = {}
    for number, (name, case) in enumerate(cases().items()):
        shared = train(case, rank, WORLD)
        # The processes compare in turn, and a checkpointed case with the plain one.
        if number % WORLD == rank:
            plain = case._replace(is_checkpointed=False)
            errors[name] = largest_difference(shared, train(plain))
    torch.save(errors, folder / f"errors{rank}.pt")
    distributed.destroy_process_group()


def fork_ranks(train_rank: Callable[[int, Path], None], folder: Path, world: int) -> None:
    """Run `train_rank` with each rank and the folder in a process, and exit as the worst one."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train_rank, args=(rank, folder)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    fork_ranks(train_everything, Path(sys.argv[1]), WORLD)
