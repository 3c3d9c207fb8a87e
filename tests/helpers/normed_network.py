"""Network with batch norms, as a user's file defines it."""

from collections.abc import Callable

from torch import Tensor, nn

WIDTH = 8


class Normed(nn.Module):
    """Convolution, batch norm, attention over the pixels, batch norm and a Linear."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        attention: Callable[..., nn.Module],
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(shape[0], WIDTH, 3, stride=2)
        self.norm = norm(WIDTH)
        self.attn = attention(WIDTH, 2)
        self.last_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.convolution(images)).flatten(2).transpose(1, 2)
        pooled = (tokens + self.attn(tokens)).mean(1)
        return self.head(self.last_norm(pooled))


class Wasteful(Normed):
    """Network with a Linear that nothing uses."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, attention: Callable[..., nn.Module]
    ) -> None:
        super().__init__(shape, classes, attention)
        self.extra = nn.Linear(WIDTH, WIDTH)


class Declared(Wasteful):
    """Network that says so."""

    leaves_parameters_unused = True


class Grouped(Normed):
    """Network whose norm keeps statistics of a batch in its own way."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, attention: Callable[..., nn.Module]
    ) -> None:
        def instance_norm(width: int) -> nn.Module:
            return nn.InstanceNorm2d(width, track_running_stats=True)

        super().__init__(shape, classes, attention, instance_norm)


class Untracked(Normed):
    """Network whose norm has no running statistics."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, attention: Callable[..., nn.Module]
    ) -> None:
        def untracked(width: int) -> nn.Module:
            return nn.BatchNorm2d(width, track_running_stats=False)

        super().__init__(shape, classes, attention, untracked)
