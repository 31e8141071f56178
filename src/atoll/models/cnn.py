"""The small convolutional networks whose published results Atoll compares itself with."""

from torch import nn

from atoll.models.split import BodyAndHead, image_size


def _convolutions(channels: int, first: int, second: int) -> list[nn.Module]:
    """Return two 5x5 convolutions without padding, each with ReLU and pooling by 2, and a flattening."""
    blocks = [(channels, first), (first, second)]
    layers = [[nn.Conv2d(wide, narrow, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2)] for wide, narrow in blocks]
    return [*layers[0], *layers[1], nn.Flatten()]


class PFLlibCNN(BodyAndHead):
    """The CNN of PFLlib (Zhang et al., JMLR 2025), after McMahan et al. (AISTATS 2017), without padding.

    582,026 parameters on 1x28x28 and 878,538 on 3x32x32, with 10 classes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        channels, height, width = image_size("PFLlibCNN", shape, smallest=16)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        body = nn.Sequential(
            *_convolutions(channels, 32, 64),
            nn.Linear(64 * rows * columns, 512),
            nn.ReLU(),
        )
        super().__init__(body, nn.Linear(512, classes))


class LeNet(BodyAndHead):
    """The small CNN of NIID-Bench (Li et al., ICDE 2022), after LeNet-5.

    62,006 parameters on 3x32x32 with 10 classes. `PFedHNCNN` has more kernels.
    """

    first, second = 6, 16  # kernels

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        channels, height, width = image_size(type(self).__name__, shape, smallest=16)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        body = nn.Sequential(
            *_convolutions(channels, self.first, self.second),
            nn.Linear(self.second * rows * columns, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        )
        super().__init__(body, nn.Linear(84, classes))


class PFedHNCNN(LeNet):
    """The CNN of pFedHN (Shamsian et al., ICML 2021) and of FEDORA's code (Wu et al., KDD 2023).

    121,182 parameters on 3x32x32 with 10 classes.
    """

    first, second = 16, 32


class TutorialCNN(BodyAndHead):
    """A small CNN that tutorials on MNIST use: 10 and 20 kernels, dropout of whole channels, one linear layer.

    8,490 parameters on 1x28x28 with 10 classes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        channels, height, width = image_size("TutorialCNN", shape, smallest=16)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        *convolutions, flatten = _convolutions(channels, 10, 20)
        body = nn.Sequential(*convolutions, nn.Dropout2d(), flatten)
        super().__init__(body, nn.Linear(20 * rows * columns, classes))


class FedFSACNN(BodyAndHead):
    """The CNN of FedFSA (AAAI 2025): narrow on grey images, wide on coloured ones, under three linear layers.

    1,258,798 parameters on 1x28x28 and 2,806,602 on 3x32x32, with 10 classes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        channels, height, width = image_size("FedFSACNN", shape, smallest=16)
        first, second = (4, 12) if channels == 1 else (64, 64)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        body = nn.Sequential(
            *_convolutions(channels, first, second),
            nn.Linear(second * rows * columns, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
        )
        super().__init__(body, nn.Linear(1024, classes))


class SimpleCNN(BodyAndHead):
    """The CIFAR-10 network of the pfl-research benchmarks (Granqvist et al., NeurIPS 2024).

    1,626,442 parameters on 3x32x32 with 10 classes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        channels, height, width = image_size("SimpleCNN", shape, smallest=6)
        rows, columns = ((side - 4) // 2 for side in (height, width))
        body = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=3),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * rows * columns, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
        )
        super().__init__(body, nn.Linear(128, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
